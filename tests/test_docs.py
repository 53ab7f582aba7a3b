import re
from pathlib import Path

import lightning_hetpipe as hp

ROOT = Path(hp.__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_ci_runs_what_the_readme_calls_the_tests():
    checks = "ruff check . && ruff format --check . && mypy && lint-imports && pytest -n 2"
    assert f"&& {checks}\n" in README
    assert (ROOT / ".ci" / "run").read_text(encoding="utf-8").splitlines()[-1] == checks


def test_the_readme_names_only_commands_and_choices_that_exist():
    from lightning_hetpipe.__main__ import COMMANDS
    from lightning_hetpipe.shipped import conf_dir

    for line in re.findall(r"^hetpipe .*", README, re.MULTILINE):
        _, command, *overrides = line.split("#")[0].split()
        assert command in COMMANDS
        for key, value in (word.split("=") for word in overrides if "=" in word):
            if (conf_dir() / key).is_dir():
                assert (conf_dir() / key / f"{value}.yaml").exists(), line


def test_every_recipe_begins_with_its_command():
    for name in ("resnet", "vgg", "normalization", "overhead", "one_stage", "largest_batch", "sweep"):
        source = (ROOT / "recipes" / f"{name}.py").read_text(encoding="utf-8")
        assert source.startswith(f'"""python recipes/{name}.py\n')
