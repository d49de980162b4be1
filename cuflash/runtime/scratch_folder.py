"""A private folder of one process for compiled kernels, for when the cache folder cannot be written."""

from __future__ import annotations

import atexit
import os
import stat
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path

from ..locks import Lock
from .file_lock import hold, is_held, release

PREFIX = "cuflash-kernels-"
# What is older may be of a process that was killed. why so long: clocks of machines that share a folder differ.
LEFT_SECONDS = 24 * 3600.0


class ScratchFolder:
    """It is made when first asked for, and removed when its process ends; those of killed processes by a later one."""

    def __init__(self, process: int) -> None:
        self.folder: Path | None = None
        self._process = process
        self._lock = Lock()
        self._handle = -1

    def made(self) -> Path:
        """The folder, which now exists; raises OSError if there is no temporary folder to make it in."""
        with self._lock:
            # why again: a program that cleans temporary files may have removed it
            if self.folder is None or not self.folder.is_dir():
                remove_left_folders()
                if self.folder is None:
                    atexit.register(self._remove)
                self.folder = Path(tempfile.mkdtemp(prefix=PREFIX))
                release(self._handle)
                self._handle = hold(self.folder)
            return self.folder

    def _remove(self) -> None:
        if os.getpid() == self._process and self.folder is not None:  # why: a child of fork calls this, too
            _remove(self.folder)
            release(self._handle)


def remove_left_folders() -> None:
    """Removes the folders of processes that were killed, which nobody holds and nobody has written to for a day."""
    with suppress(OSError):
        for folder in Path(tempfile.gettempdir()).glob(f"{PREFIX}*"):
            with suppress(OSError):
                found = folder.lstat()
                old = time.time() - found.st_mtime > LEFT_SECONDS
                if old and stat.S_ISDIR(found.st_mode) and found.st_uid == _user() and not is_held(folder):
                    _remove(folder)


def _remove(folder: Path) -> None:
    """Removes the files that cuflash writes, and the folder if nothing else is in it."""
    with suppress(OSError):
        for path in folder.glob("*.cubin*"):
            with suppress(OSError):
                path.unlink()
        folder.rmdir()


def _user() -> int:
    return 0 if sys.platform == "win32" else os.geteuid()
