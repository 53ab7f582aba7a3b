"""Keeps this machine's processors from sleeping while a recipe measures.

A virtual processor that idles between two actions wakes cold, for a while at half its speed: the steps of a
pipeline, which waits a lot, then drift by a factor of two. One process per processor that runs only when
nothing else wants to (``SCHED_IDLE``) prevents that.
"""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

_SPIN = """
import os
os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
parent = os.getppid()
while os.getppid() == parent:
    for _ in range(1_000_000):
        pass
"""


@contextmanager
def warm_processors() -> Iterator[None]:
    """Does nothing on systems without idle-priority scheduling."""
    if not hasattr(os, "SCHED_IDLE"):
        yield
        return
    spinners = [subprocess.Popen([sys.executable, "-c", _SPIN]) for _ in range(len(os.sched_getaffinity(0)))]
    try:
        yield
    finally:
        for each in spinners:
            each.kill()
            each.wait()
