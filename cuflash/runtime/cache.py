"""The cache of kernels on disk.

A cubin is found by a digest of its variant, the options, the NVRTC version and the content of every file it includes,
so an edited header leads to a new cubin. It ends with the SHA-256 of its name and itself, so a file that was truncated,
altered or renamed is noticed and rebuilt. That digest is no signature: whoever may write to the folder may forge it,
which is why only files and folders of this user and of root are taken. Files are written under a temporary name and
renamed, so any number of processes may share the folder.
"""

from __future__ import annotations

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
from ..locks import Lock
from .file_lock import alone
from .scratch_folder import LEFT_SECONDS, ScratchFolder

CUBINS = "*.cubin"
DIGEST_BYTES = 32
WAIT_SECONDS = 300.0  # for another process that compiles the same kernel: longer than any takes
ROOT = 0
_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH
_WAY_OUT = "set CUFLASH_CACHE_DIR to a folder of your own that can be written"
_lock = Lock()


def cache_dir() -> Path:
    """The folder of cubins: `CUFLASH_CACHE_DIR`, or the user's cache folder. Raises UnsupportedError without a home."""
    chosen = os.environ.get("CUFLASH_CACHE_DIR")
    try:
        return Path(chosen).expanduser() if chosen else user_cache_path("cuflash", appauthor=False)
    except RuntimeError as error:
        given = f" for CUFLASH_CACHE_DIR={chosen}" if chosen else ""
        raise UnsupportedError(f"the kernel cache has no folder: no home folder is known{given}; {_WAY_OUT}") from error


def contents() -> tuple[Path, list[int]]:
    """The folder and the bytes of each cubin in it; raises UnsupportedError if it cannot be used."""
    folder = _trusted_dir()
    sizes = []
    try:
        for path in sorted(folder.iterdir()):
            with suppress(OSError):  # why: another process may have removed it
                found = path.stat()
                if path.match(CUBINS) and stat.S_ISREG(found.st_mode):
                    sizes.append(found.st_size)
    except FileNotFoundError:
        pass  # why: it is made for the first kernel
    except OSError as error:
        raise _unusable(folder, error) from error
    return folder, sizes


def find_in_cache(name: str) -> Path | None:
    """The sound file of this name in the cache folder."""
    try:
        path = _trusted_dir() / name
    except UnsupportedError:
        return None  # why no warning: it comes, with the reason, when the kernel is to be kept
    return path if is_sound(path) else None


def find(name: str) -> Path | None:
    """The sound file of this name in the cache folder, or among those of this process."""
    path = find_in_cache(name)
    if path is None and (folder := _scratch().folder) is not None and is_sound(folder / name):
        return folder / name
    return path


@contextmanager
def compiling(name: str) -> Iterator[None]:
    """Waits until no other process is inside for the same file of the cache. Then it is to be looked for once more."""
    try:
        folder = _made_dir()
    except UnsupportedError:
        yield  # why no warning: as in `find_in_cache`
        return
    with alone(folder / f"{name}.lock.tmp", WAIT_SECONDS):  # why .tmp: what killed processes leave is then removed
        yield


def keep(name: str, content: bytes) -> Path:
    """Writes a file to the cache, or where that is impossible to a folder of this process, and warns."""
    try:
        return _write_to_cache(name, content)
    except UnsupportedError as error:
        try:
            path = _scratch().made() / name
            write(path, content)
        except OSError as without:
            raise UnsupportedError(
                f"a compiled kernel can be kept nowhere: {error}. No temporary folder can be used either "
                f"({without.strerror or without})"
            ) from error
        _warn(str(error))
        return path


def prepared() -> Path:
    """The folder of cubins, which is there and can be written; raises UnsupportedError at once if it cannot."""
    folder = _made_dir()
    probe = folder / f"probe.cubin.{secrets.token_hex(8)}.tmp"  # why so called: if left behind, it is removed as others
    try:
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise _unusable(folder, error) from error
    return folder


def is_sound(path: Path) -> bool:
    """Whether a file holds, whole and unaltered, what was written under its name, by this user or by root."""
    try:
        with open(path, "rb", opener=_open_at_once) as file:
            found = os.fstat(file.fileno())
            if not stat.S_ISREG(found.st_mode) or _distrust(found):
                return False
            data = file.read()
    except OSError:
        return False
    return len(data) > DIGEST_BYTES and _digest(path, data[:-DIGEST_BYTES]) == data[-DIGEST_BYTES:]


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


def _made_dir() -> Path:
    """The folder of cubins, which now exists."""
    folder = cache_dir()
    try:
        folder.mkdir(mode=0o755 if _user() == ROOT else 0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise _unusable(folder, error) from error
    return _trusted_dir()


def _write_to_cache(name: str, content: bytes) -> Path:
    folder = _made_dir()
    path = folder / name
    try:
        write(path, content)
    except OSError as error:
        raise _unusable(folder, error) from error
    _remove_left_files(folder)
    return path


def _digest(path: Path, content: bytes) -> bytes:
    """What a file ends with. Its name tells the variant and the digest of all that its code depends on."""
    return hashlib.sha256(path.name.encode() + b"\0" + content).digest()


def _open_at_once(name: str, flags: int) -> int:
    """Opens a file without waiting, as to open a FIFO would wait for its writer."""
    return os.open(name, flags | getattr(os, "O_NONBLOCK", 0))


def _trusted_dir() -> Path:
    """The folder of cubins; raises UnsupportedError if nobody knows what it holds. It may not exist yet."""
    folder = cache_dir()
    try:
        reason = _distrust(folder.stat())
    except FileNotFoundError:
        return folder
    except OSError as error:
        raise _unusable(folder, error) from error
    if reason:
        raise UnsupportedError(f"the kernel cache {folder} is not trusted: {reason}; or {_WAY_OUT}")
    return folder


def _distrust(found: os.stat_result) -> str:
    """Why others may have written a file or a folder, and the way out; empty if this user or root wrote it."""
    user = _user()
    if user is None:
        return ""  # why: Windows protects the folders of a user by lists of its own, which the mode does not tell
    if found.st_uid not in (user, ROOT):
        return f"it belongs to user {found.st_uid}, neither to this user ({user}) nor to root; change its owner"
    return "others than its owner may write to it; run chmod go-w on it" if found.st_mode & _OTHERS_WRITE else ""


def _user() -> int | None:
    return None if sys.platform == "win32" else os.geteuid()


def _unusable(folder: Path, error: OSError) -> UnsupportedError:
    reason = error.strerror or type(error).__name__
    return UnsupportedError(f"the kernel cache {folder} cannot be used ({reason}); {_WAY_OUT}")


@cache
def _remove_left_files(folder: Path) -> None:
    """Removes, once in a process, what processes that were killed while they wrote have left."""
    with suppress(OSError):
        for path in folder.glob(f"{CUBINS}*.tmp"):
            with suppress(OSError):
                found = path.lstat()
                if stat.S_ISREG(found.st_mode) and time.time() - found.st_mtime > LEFT_SECONDS:
                    path.unlink()


def _scratch() -> ScratchFolder:
    with _lock:  # why: if two threads made one each, a kernel would be compiled twice
        return _scratch_of(os.getpid())


@cache
def _scratch_of(process: int) -> ScratchFolder:
    """That of a process. why a process: a child that fork made must leave its parent's files alone."""
    return ScratchFolder(process)


@cache
def _warn(problem: str) -> None:
    """Warns once that kernels are not kept, and says why."""
    warnings.warn(f"{problem}. Until then, kernels are compiled anew in every process", RuntimeWarning, stacklevel=2)
