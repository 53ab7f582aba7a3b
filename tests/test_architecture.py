import subprocess
import sys
from pathlib import Path

import lightning_hetpipe as hp

ROOT = Path(hp.__file__).parent.parent
PURE = ("cluster", "graph", "plans", "profiles", "timeline", "schedule", "planner", "report", "__main__")


def test_imports_run_one_way():
    from importlinter.application.use_cases import lint_imports
    from importlinter.configuration import configure

    configure()
    assert lint_imports(config_filename=str(ROOT / "pyproject.toml"), cache_dir=None)


def test_planning_imports_neither_torch_nor_lightning():
    modules = ", ".join(f"lightning_hetpipe.{name}" for name in PURE)
    code = f"import sys, {modules}; print(*({{'torch', 'lightning', 'matplotlib'}} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == []


def test_every_public_name_can_be_had():
    for name in hp.__all__:
        assert getattr(hp, name) is not None


def test_no_module_is_longer_than_a_few_screens():
    long = {
        path.name: count
        for path in (ROOT / "lightning_hetpipe").rglob("*.py")
        if (count := len(path.read_text(encoding="utf-8").splitlines())) > 460
    }
    assert long == {}


def test_the_top_level_holds_what_belongs_there_and_no_output_of_a_run():
    done = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=False)
    files = done.stdout.split()
    known = {
        "lightning_hetpipe", "tests", "recipes", "conf", ".ci", ".gitignore",
        "pyproject.toml", "CHANGELOG.md", "README.md", "LICENSE",
    }  # fmt: skip
    assert {name.split("/")[0] for name in files} <= known
    assert [name for name in files if name.endswith((".ckpt", ".png", ".pt", ".whl", ".log"))] == []
