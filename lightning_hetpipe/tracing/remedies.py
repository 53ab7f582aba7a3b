"""Where in the user's code something is, and what to do about it."""

import os
import traceback
from types import TracebackType

import torch

_OWN_FILES = (os.path.dirname(torch.__file__) + os.sep, os.path.dirname(__file__) + os.sep)


def remedy(scope: str) -> str:
    """What to do about a module whose forward cannot be followed."""
    if not scope:
        return (
            "That line is in the pipelined module's own forward: move it out of there, or pipeline a "
            "submodule that does not contain it (module='...')"
        )
    return (
        f"Keep the module that holds this line whole with blocks={scope!r} (of an nn.Sequential or "
        "nn.ModuleList, each item stays whole), or pipeline a submodule without it (module='...')"
    )


def relative(path: str) -> str:
    return path.removeprefix("module").removeprefix(".")


def where(trace: TracebackType | None = None) -> str:
    """File and line of the innermost user code: of an error, or of the call that is going on."""
    frames = traceback.walk_stack(None) if trace is None else reversed(list(traceback.walk_tb(trace)))
    for frame, line in frames:
        file = frame.f_code.co_filename
        if not file.startswith((*_OWN_FILES, "<")) and not file.endswith("contextlib.py"):
            return f"{file}:{line}"
    return "torch"
