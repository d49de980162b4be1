"""The cache of kernels on disk.

A cubin is found by a digest of its variant, the options, the NVRTC version and the content of every file it includes,
so an edited header leads to a new cubin. It ends with the SHA-256 of its name and itself, so a file that was truncated,
altered or renamed is noticed and rebuilt. That digest is no signature: whoever may write to the folder may forge it,
which is why only files and folders of this user and of root are read. Files are written under a temporary name and
renamed, so any number of processes may share the folder. A validated file is returned as bytes, not as a path: whoever
swaps the file afterwards changes nothing.
"""

from __future__ import annotations

import errno
import hashlib
import os
import secrets
import stat
import sys
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path

from platformdirs import user_cache_path

from ..errors import UnsupportedError
from ..locks import MOST_SECONDS
from .file_lock import alone

CUBINS = "*.cubin"
DIGEST_BYTES = 32
MOST_BYTES = 2**26  # of a file that is read, as it goes into memory whole: the largest kernels take half a megabyte
PROBE_BYTES = 2**19  # that are written to see whether there is room: as many as the largest kernels take
# For another process that compiles the same kernel: longer than any takes. why half: a thread that waited in vain then
# compiles it in the same section.
WAIT_SECONDS = MOST_SECONDS / 2
# Temporary files that are older are of processes that were killed. why so long: clocks of machines differ. why more
# than a section: the lock of a kernel that is being compiled is such a file.
STALE_SECONDS = MOST_SECONDS + 24 * 3600.0
ROOT = 0
_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH
_WAY_OUT = "set CUFLASH_CACHE_DIR to a folder of your own that can be written"
# Where no cache can be used: files by name that this process has compiled, or its parent before a fork, to MOST_BYTES.
_in_process: dict[str, bytes] = {}


def cache_dir() -> Path:
    """Returns the folder of cubins: `CUFLASH_CACHE_DIR`, or the user's; raises UnsupportedError without a home."""
    setting = os.environ.get("CUFLASH_CACHE_DIR")
    try:
        return Path(setting).expanduser() if setting else user_cache_path("cuflash", appauthor=False)
    except RuntimeError as error:
        source = f" for CUFLASH_CACHE_DIR={setting}" if setting else ""
        raise UnsupportedError(
            f"the kernel cache has no folder: no home folder is known{source}; {_WAY_OUT}"
        ) from error


def contents() -> tuple[Path, list[int]]:
    """Returns the folder and the bytes of each cubin in it; raises UnsupportedError if it cannot be read."""
    folder = _trusted_dir()
    sizes = []
    try:
        for path in sorted(folder.iterdir()):
            with suppress(OSError):  # why: another process may have removed it
                status = path.stat()
                if path.match(CUBINS) and stat.S_ISREG(status.st_mode):
                    sizes.append(status.st_size)
    except FileNotFoundError:
        pass  # why: it is made for the first kernel
    except OSError as error:
        raise _unusable(folder, error) from error
    return folder, sizes


def check_writable() -> None:
    """Raises UnsupportedError if no kernel can be added to the folder, or it cannot be made.

    A folder that is not there is made for that, and removed.
    """
    folder = _trusted_dir()
    if os.path.lexists(folder):
        _probe(folder)
        return
    missing = [each for each in (folder, *folder.parents) if not os.path.lexists(each)]
    parent = next((each for each in folder.parents if os.path.lexists(each)), None)
    if parent is None or not os.access(parent, os.W_OK | os.X_OK, effective_ids=os.access in os.supports_effective_ids):
        reason = f"{parent} cannot be written" if parent else "no folder above it is there"
        raise _unusable(folder, OSError(errno.EACCES, reason), "made")
    try:
        writable_dir()  # why tried too: by rights root may write anywhere, even in /proc, and a disk may be full
    finally:
        for each in missing:
            with suppress(OSError):  # why: another process may have begun to use it
                each.rmdir()


def find_in_cache(name: str) -> bytes | None:
    """Returns the contents of the sound file of this name in the cache folder."""
    try:
        path = _trusted_dir() / name
    except UnsupportedError:
        return None  # why no warning: it comes, with the reason, when the kernel is written
    return read(path)


def find(name: str) -> bytes | None:
    """Returns the contents of this name in the cache folder, or in this process."""
    content = find_in_cache(name)
    return _in_process.get(name) if content is None else content


@contextmanager
def compiling(name: str) -> Iterator[None]:
    """Waits until no other process is inside for the same file of the cache. Then it is to be looked for once more."""
    try:
        folder = _create_dir()
    except UnsupportedError:
        yield  # why no warning: as in `find_in_cache`
        return
    with alone(folder / f"{name}.lock.tmp", WAIT_SECONDS):  # why .tmp: what killed processes leave is then removed
        yield


def keep(name: str, content: bytes) -> None:
    """Writes a file to the cache; where that is impossible, warns, and keeps its contents in this process.

    why no temporary folder instead: there may be none, and processes that are killed would leave theirs behind.
    """
    try:
        _write_to_cache(name, content)
    except UnsupportedError as error:
        _in_process[name] = content
        while sum(map(len, list(_in_process.values()))) > MOST_BYTES:
            _in_process.pop(next(iter(_in_process)), None)  # the oldest, which is compiled anew at its next use
        _warn(str(error))


def writable_dir() -> Path:
    """Returns the folder of cubins, which can be written; raises UnsupportedError at once if it cannot."""
    folder = _create_dir()
    _probe(folder)
    return folder


def read(path: Path) -> bytes | None:
    """Returns the contents of a file that this user or root wrote; None if it is not there whole and unaltered."""
    try:
        with open(path, "rb", opener=_open_at_once) as file:
            status = os.fstat(file.fileno())
            if not stat.S_ISREG(status.st_mode) or _distrust(status) or status.st_size > MOST_BYTES:
                return None
            data = file.read(status.st_size)  # why no more: it may grow meanwhile
    except OSError:
        return None
    content, digest = data[:-DIGEST_BYTES], data[-DIGEST_BYTES:]
    return content if content and _digest(path, content) == digest else None


def write(path: Path, content: bytes) -> None:
    """Writes a file in one step: a reader sees all of it or nothing."""
    temporary = path.with_name(f"{path.name}.{secrets.token_hex(8)}.tmp")
    try:
        # why others may read: a cache that root made for all, when an image was built, has to serve them
        with open(temporary, "xb", opener=lambda name, flags: os.open(name, flags, 0o644)) as file:
            file.write(content + _digest(path, content))
        os.replace(temporary, path)
    except BaseException:
        with suppress(OSError):
            temporary.unlink()
        raise


def _create_dir() -> Path:
    """Returns the folder of cubins, which now exists."""
    folder = cache_dir()
    try:
        folder.mkdir(mode=0o755 if _user() == ROOT else 0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise _unusable(folder, error) from error
    return _trusted_dir()


def _write_to_cache(name: str, content: bytes) -> None:
    folder = _create_dir()
    try:
        write(folder / name, content)
    except OSError as error:
        raise _unusable(folder, error) from error
    _remove_stale_files(folder)


def _probe(folder: Path) -> None:
    """Raises UnsupportedError if no kernel can be written to the folder."""
    probe = folder / f"probe.cubin.{secrets.token_hex(8)}.tmp"  # why so called: if left behind, it is removed as others
    try:
        probe.write_bytes(bytes(PROBE_BYTES))
    except OSError as error:
        raise _unusable(folder, error, "written") from error
    finally:
        with suppress(OSError):
            probe.unlink()


def _digest(path: Path, content: bytes) -> bytes:
    """Returns the end of a file. Its name has the variant and the digest of all that its code depends on."""
    return hashlib.sha256(path.name.encode() + b"\0" + content).digest()


def _open_at_once(name: str, flags: int) -> int:
    """Opens a file without waiting, as to open a FIFO would wait for its writer."""
    return os.open(name, flags | getattr(os, "O_NONBLOCK", 0))


def _trusted_dir() -> Path:
    """Returns the folder of cubins; raises UnsupportedError if others may have written to it. It may not exist yet."""
    folder = cache_dir()
    try:
        status = folder.stat()
        if not stat.S_ISDIR(status.st_mode):
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR))
    except FileNotFoundError:
        return folder
    except OSError as error:
        raise _unusable(folder, error) from error
    if reason := _distrust(status):
        # why not for a sticky folder: it is meant for all users, as /tmp is.
        may_change = status.st_uid == _user() and not status.st_mode & stat.S_ISVTX
        chmod = "run chmod go-w on it, or " if may_change else ""
        raise UnsupportedError(f"the kernel cache {folder} is not trusted: {reason}; {chmod}{_WAY_OUT}")
    return folder


def _distrust(status: os.stat_result) -> str:
    """Returns why others may have written a file or a folder; empty if this user or root wrote it."""
    user = _user()
    if user is None:
        return ""  # why: Windows protects the folders of a user by lists of its own, which the mode does not show
    if status.st_uid not in (user, ROOT):
        return f"it belongs to user {status.st_uid}, neither to this user ({user}) nor to root"
    return "others than its owner may write to it" if status.st_mode & _OTHERS_WRITE else ""


def _user() -> int | None:
    return None if sys.platform == "win32" else os.geteuid()


def _unusable(folder: Path, error: OSError, verb: str = "used") -> UnsupportedError:
    reason = error.strerror or type(error).__name__
    return UnsupportedError(f"the kernel cache {folder} cannot be {verb} ({reason}); {_WAY_OUT}")


@cache
def _remove_stale_files(folder: Path) -> None:
    """Removes, once in a process, temporary files of processes that were killed while they wrote."""
    with suppress(OSError):
        for path in folder.glob(f"{CUBINS}*.tmp"):
            with suppress(OSError):
                status = path.lstat()
                if stat.S_ISREG(status.st_mode) and time.time() - status.st_mtime > STALE_SECONDS:
                    path.unlink()


@cache
def _warn(problem: str) -> None:
    """Warns once that kernels are not cached, and says why."""
    warnings.warn(f"{problem}. Until then, kernels are compiled anew in every process", RuntimeWarning, stacklevel=2)
