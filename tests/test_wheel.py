import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import lightning_hetpipe as hp

ROOT = Path(hp.__file__).parent.parent
SOURCES = ("lightning_hetpipe", "conf", "pyproject.toml", "README.md", "LICENSE")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    # A copy, so that no build/ and no *.egg-info appear in the tree.
    tree, target = tmp_path_factory.mktemp("tree"), tmp_path_factory.mktemp("dist")
    for name in SOURCES:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, tree / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(source, tree / name)
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(target), str(tree)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    (path,) = target.glob("*.whl")
    return path


def test_the_wheel_holds_every_module_and_every_shipped_configuration(wheel):
    names = set(zipfile.ZipFile(wheel).namelist())
    modules = {str(path.relative_to(ROOT)) for path in (ROOT / "lightning_hetpipe").rglob("*.py")}
    files = {f"lightning_hetpipe/{path.relative_to(ROOT)}" for path in (ROOT / "conf").rglob("*.yaml")}
    assert modules - names == set()
    assert files - names == set()
    assert "lightning_hetpipe/py.typed" in names
    assert any(name.endswith("licenses/LICENSE") for name in names)


def test_the_installed_wheel_finds_its_configuration_outside_the_tree(wheel, tmp_path):
    zipfile.ZipFile(wheel).extractall(tmp_path / "site")
    code = (
        "import lightning_hetpipe as hp\n"
        "from lightning_hetpipe.shipped import conf_dir\n"
        "cluster = hp.Cluster.from_yaml(conf_dir() / 'cluster' / 'lab4.yaml')\n"
        "print(hp.__file__, len(cluster.devices))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        env={"PYTHONPATH": str(tmp_path / "site"), "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        check=True,
    )
    path, n_devices = done.stdout.split()
    assert Path(path).is_relative_to(tmp_path)
    assert n_devices == "4"
