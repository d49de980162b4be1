"""The cache of kernels on disk.

A file's name has a digest of its variant, the options, the NVRTC version and the content of every included file. So an
edited header leads to a new cubin. The file ends with the SHA-256 of its name and content, so a truncated, altered or
renamed file is rebuilt. This hash is no signature, as anyone with write access could forge it: only files and folders
of this user and of root are read. Files are written under a temporary name and renamed, so any number of processes may
share the folder. A validated file is returned as bytes, not as a path, so a later swap of the file changes nothing.
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
MOST_BYTES = 2**26  # limit of a file, which is read whole: the largest kernels take half a megabyte
PROBE_BYTES = 2**19  # written to test for free space: the size of the largest kernels
# Limit of waiting for another process to compile a kernel: longer than any kernel takes. Half a section, as a thread
# that waited in vain compiles the kernel in the same section.
WAIT_SECONDS = MOST_SECONDS / 2
# Age from which temporary files count as left by killed processes. The day allows for clocks that differ between
# machines. The section is added because the lock of a kernel that is being compiled is such a file.
STALE_SECONDS = MOST_SECONDS + 24 * 3600.0
ROOT = 0
_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH
_WAY_OUT = "set CUFLASH_CACHE_DIR to a folder of your own that can be written"
# Files by name, up to MOST_BYTES, that this process (or its parent before a fork) compiled but could not cache.
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
            with suppress(OSError):  # another process may have removed it
                status = path.stat()
                if path.match(CUBINS) and stat.S_ISREG(status.st_mode):
                    sizes.append(status.st_size)
    except FileNotFoundError:
        pass  # the folder is created for the first kernel
    except OSError as error:
        raise _unusable(folder, error) from error
    return folder, sizes


def check_writable() -> None:
    """Raises UnsupportedError if no kernel can be added to the folder, or it cannot be created.

    A missing folder is created for the test, and removed.
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
        writable_dir()  # os.access is not enough: it lets root write anywhere, even in /proc or on a full disk
    finally:
        for each in missing:
            with suppress(OSError):  # another process may have begun to use it
                each.rmdir()


def find_in_cache(name: str) -> bytes | None:
    """Returns the contents of the sound file of this name in the cache folder."""
    try:
        path = _trusted_dir() / name
    except UnsupportedError:
        return None  # `keep` warns, with the reason, when the kernel is written
    return read(path)


def find(name: str) -> bytes | None:
    """Returns the contents of this name in the cache folder, or in this process."""
    content = find_in_cache(name)
    return _in_process.get(name) if content is None else content


@contextmanager
def compiling(name: str) -> Iterator[None]:
    """Waits until no other process compiles the same file. The caller then searches the cache once more."""
    try:
        folder = _create_dir()
    except UnsupportedError:
        yield  # `keep` warns when the kernel is written
        return
    with alone(folder / f"{name}.lock.tmp", WAIT_SECONDS):  # .tmp: stale ones of killed processes are removed
        yield


def keep(name: str, content: bytes) -> None:
    """Writes a file to the cache; where that is impossible, warns, and keeps its contents in this process.

    A temporary folder would not do: there may be none, and killed processes would leave theirs behind.
    """
    try:
        _write_to_cache(name, content)
    except UnsupportedError as error:
        _in_process[name] = content
        while sum(map(len, list(_in_process.values()))) > MOST_BYTES:
            _in_process.pop(next(iter(_in_process)), None)  # the oldest, which is compiled anew at its next use
        _warn(str(error))


def writable_dir() -> Path:
    """Returns the folder of cubins after a test write; raises UnsupportedError if it cannot be written."""
    folder = _create_dir()
    _probe(folder)
    return folder


def read(path: Path) -> bytes | None:
    """Returns the contents of a file that this user or root wrote; None if it is missing, truncated or altered."""
    try:
        with open(path, "rb", opener=_open_at_once) as file:
            status = os.fstat(file.fileno())
            if not stat.S_ISREG(status.st_mode) or _distrust(status) or status.st_size > MOST_BYTES:
                return None
            data = file.read(status.st_size)  # bounded, as the file may grow meanwhile
    except OSError:
        return None
    content, digest = data[:-DIGEST_BYTES], data[-DIGEST_BYTES:]
    return content if content and _digest(path, content) == digest else None


def write(path: Path, content: bytes) -> None:
    """Writes a file atomically: a reader gets all of it or nothing."""
    temporary = path.with_name(f"{path.name}.{secrets.token_hex(8)}.tmp")
    try:
        # Readable for all: a cache that root filled while building an image has to serve its users.
        with open(temporary, "xb", opener=lambda name, flags: os.open(name, flags, 0o644)) as file:
            file.write(content + _digest(path, content))
        os.replace(temporary, path)
    except BaseException:
        with suppress(OSError):
            temporary.unlink()
        raise


def _create_dir() -> Path:
    """Creates the folder of cubins if it is missing, and returns it."""
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
    probe = folder / f"probe.cubin.{secrets.token_hex(8)}.tmp"  # a name that _remove_stale_files matches
    try:
        probe.write_bytes(bytes(PROBE_BYTES))
    except OSError as error:
        raise _unusable(folder, error, "written") from error
    finally:
        with suppress(OSError):
            probe.unlink()


def _digest(path: Path, content: bytes) -> bytes:
    """Returns the hash at the end of a file. The file's name has the variant and a digest of its sources."""
    return hashlib.sha256(path.name.encode() + b"\0" + content).digest()


def _open_at_once(name: str, flags: int) -> int:
    """Opens a file without blocking: opening a FIFO would wait for its writer."""
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
        # chmod is no advice for a sticky folder, which is meant for all users, as /tmp is.
        may_change = status.st_uid == _user() and not status.st_mode & stat.S_ISVTX
        chmod = "run chmod go-w on it, or " if may_change else ""
        raise UnsupportedError(f"the kernel cache {folder} is not trusted: {reason}; {chmod}{_WAY_OUT}")
    return folder


def _distrust(status: os.stat_result) -> str:
    """Returns the reason to distrust a file or folder, as others may have written it; empty if there is none."""
    user = _user()
    if user is None:
        return ""  # Windows protects a user's folders by access lists, which the mode does not show
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
    """Removes, once in a process, temporary files of processes that were killed while writing."""
    with suppress(OSError):
        for path in folder.glob(f"{CUBINS}*.tmp"):
            with suppress(OSError):
                status = path.lstat()
                if stat.S_ISREG(status.st_mode) and time.time() - status.st_mtime > STALE_SECONDS:
                    path.unlink()


@cache
def _warn(problem: str) -> None:
    """Warns once that kernels are not cached, with the reason."""
    warnings.warn(f"{problem}. Until then, kernels are compiled anew in every process", RuntimeWarning, stacklevel=2)
