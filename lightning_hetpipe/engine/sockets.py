"""Interrupts a rank that waits inside gloo.

Gloo's ``abort`` and ``shutdown`` do nothing (torch 2.14), a wait cannot be polled, and a timed out
wait closes the connection. What ends a wait at once, from any thread, is closing the connection
below it; the peers then see it closed too.
"""

import contextlib
import os
import socket
import stat
from collections.abc import Iterator


class Sockets:
    """The connections that were opened while `record` was active."""

    def __init__(self) -> None:
        self._inodes: dict[int, int] = {}  # by file descriptor

    @contextlib.contextmanager
    def record(self) -> Iterator[None]:
        """Remembers every socket that is open at the end and was not at the beginning."""
        before = _open_sockets()
        try:
            yield
        finally:
            self._inodes |= {fd: inode for fd, inode in _open_sockets().items() if before.get(fd) != inode}

    def shut_down(self) -> None:
        """Ends the connections in both directions; whoever waits on them is woken with an error."""
        inodes, self._inodes = self._inodes, {}  # two threads may want this at once
        for fd, inode in inodes.items():
            with contextlib.suppress(OSError):
                if os.fstat(fd).st_ino != inode:
                    continue  # closed since, and the number was given to another file
                with socket.socket(fileno=os.dup(fd)) as connection:
                    if not connection.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                        connection.shutdown(socket.SHUT_RDWR)  # of a listener: gloo's thread would abort


def _open_sockets() -> dict[int, int]:
    found = {}
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            status = os.fstat(int(name))
            if stat.S_ISSOCK(status.st_mode):
                found[int(name)] = status.st_ino
    return found
