"""The cache of kernels on disk.

A cubin is found by a digest of its variant, the options, the NVRTC version and the content of every file it includes,
so an edited header leads to a new cubin. It ends with its SHA-256, so a truncated or altered file is noticed and
rebuilt. Files are written under a temporary name and renamed, so any number of processes may share the folder.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
import threading
import warnings
from functools import cache
from pathlib import Path

from platformdirs import user_cache_path

DIGEST_BYTES = 32
_lock = threading.Lock()


def cache_dir() -> Path:
    """The folder of cubins: `CUFLASH_CACHE_DIR`, or the user's cache folder."""
    chosen = os.environ.get("CUFLASH_CACHE_DIR")
    return Path(chosen) if chosen else user_cache_path("cuflash", appauthor=False)


def is_sound(path: Path) -> bool:
    """Whether a file holds a whole and unaltered cubin."""
    try:
        data = path.read_bytes()
    except OSError:
        return False
    return len(data) > DIGEST_BYTES and hashlib.sha256(data[:-DIGEST_BYTES]).digest() == data[-DIGEST_BYTES:]


def write(path: Path, cubin: bytes) -> None:
    """Writes a cubin in one step: a reader sees all of it or nothing."""
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=path.name, suffix=".tmp")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(cubin + hashlib.sha256(cubin).digest())
        os.replace(name, path)
    except OSError:
        Path(name).unlink(missing_ok=True)
        raise


@cache
def _scratch() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="cuflash-")


def scratch_dir() -> Path:
    """A private folder of this process, for when the cache folder cannot be written."""
    with _lock:  # why: if two threads made a folder each, one would be dropped and deleted with its files
        folder = Path(_scratch().name)
    folder.mkdir(mode=0o700, exist_ok=True)  # why: a program that cleans temporary files may have removed it
    return folder


@cache
def warn_unwritable(folder: str, reason: str) -> None:
    """Warns once that kernels are not kept, and says why."""
    warnings.warn(
        f"the kernel cache {folder} cannot be written ({reason}); kernels are compiled anew in every process. "
        "Set CUFLASH_CACHE_DIR to a folder that can.",
        RuntimeWarning,
        stacklevel=2,
    )
