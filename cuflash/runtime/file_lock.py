"""Locks between processes, by `flock`: the system releases those of a process that ends, however it ends.

why no package: those that there are lock by the mere presence of a file where there is no `flock`, and a process that
is killed leaves that file behind.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

PAUSE = 0.02  # seconds until a process that waits looks again

if sys.platform == "win32":

    @contextmanager
    def alone(path: Path, seconds: float) -> Iterator[None]:
        """Waits for nothing."""
        yield

else:
    import fcntl

    @contextmanager
    def alone(path: Path, seconds: float) -> Iterator[None]:
        """Waits, but no longer than so many seconds, until no other process is inside with the same path.

        The file is made for that, and removed. Where there can be no such file, or no lock, nothing is waited for.
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
            # why removed although others may wait for it: who comes later, and waits for nobody, finds what was made.
            with suppress(OSError):
                path.unlink()
            with suppress(OSError):
                fcntl.flock(handle, fcntl.LOCK_UN)  # why: a child by fork may have a copy of the handle
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
