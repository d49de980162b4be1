"""Locks between processes by `flock`, which the system releases when a process ends, even if it is killed.

No package is used: without `flock`, they lock by the presence of a file, which a killed process leaves behind.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

PAUSE = 0.02  # seconds between attempts to take the lock

if sys.platform == "win32":

    @contextmanager
    def alone(path: Path, seconds: float) -> Iterator[None]:
        """Does nothing, as Windows has no `flock`."""
        yield

else:
    import fcntl

    @contextmanager
    def alone(path: Path, seconds: float) -> Iterator[None]:
        """Waits, at most so many seconds, until no other process is inside with the same path.

        The file is created for the lock, and removed. Where neither file nor lock is possible, there is no wait.
        """
        try:
            handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        except OSError:
            yield
            return
        try:
            _wait(handle, seconds)
            yield
        finally:
            # Removed although others may wait for it: a later process does not wait, and finds the finished work.
            with suppress(OSError):
                path.unlink()
            with suppress(OSError):
                fcntl.flock(handle, fcntl.LOCK_UN)  # closing is not enough: a forked child may hold the handle, too
            os.close(handle)

    def _wait(handle: int, seconds: float) -> None:
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                time.sleep(PAUSE)
            except OSError:
                return
            else:
                return
