"""The configuration files that come with the package: models, clusters, experiments."""

from pathlib import Path


def conf_dir() -> Path:
    """The folder of shipped YAML files: inside the installed package, or beside it in a source tree."""
    package = Path(__file__).parent
    installed = package / "conf"
    return installed if installed.is_dir() else package.parent / "conf"
