"""The folder of kernels of one process: who removes it, and when. Needs neither NVRTC nor a GPU."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest
from workers import ROOT, run_threads

from cuflash.runtime.scratch_folder import PREFIX, ScratchFolder, remove_left_folders

# Keeps a kernel where there is no cache, prints its path, and does what the arguments say.
KEEPS = """
import os, sys, time
from cuflash.runtime import cache
path = cache.keep("kernel.cubin", b"parent")
print(path, flush=True)
"""
FORKS = """
child = os.fork()
if child == 0:
    assert cache.find("kernel.cubin") is None
    print(cache.keep("kernel.cubin", b"child"), flush=True)
    sys.exit()  # as a child ends that runs what was registered for the end
assert os.waitpid(child, 0)[1] == 0
assert cache.find("kernel.cubin") == path and path.read_bytes().startswith(b"parent")
"""
posix = pytest.mark.skipif(os.name != "posix", reason="fork, signals and locks of POSIX")


@pytest.fixture(autouse=True)
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of temporary files, with nothing in it."""
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setenv("TMPDIR", str(folder))
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    (tmp_path / "file").touch()
    monkeypatch.setenv("CUFLASH_CACHE_DIR", str(tmp_path / "file" / "cache"))
    return folder


def start(code: str) -> subprocess.Popen[str]:
    command, pipe = [sys.executable, "-W", "ignore", "-c", code], subprocess.PIPE
    return subprocess.Popen(command, cwd=ROOT, stdin=pipe, stdout=pipe, text=True)


def age(folder: Path) -> None:
    yesterday = time.time() - 25 * 3600
    os.utime(folder, (yesterday, yesterday))


@posix
def test_a_child_by_fork_has_its_own_folder_and_leaves_its_parents(temporary: Path) -> None:
    with start(KEEPS + FORKS) as process:
        printed, _ = process.communicate(timeout=60)
    assert process.returncode == 0
    parents, childs = map(Path, printed.split())
    assert parents.parent != childs.parent
    assert {path.parent.parent for path in (parents, childs)} == {temporary}
    assert not list(temporary.iterdir())  # each removed its own


@posix
def test_a_killed_processs_folder_is_removed_after_a_day_and_a_living_ones_never(temporary: Path) -> None:
    waits = KEEPS + "time.sleep(300)\n"
    with start(waits) as killed, start(waits) as living:
        try:
            assert killed.stdout is not None
            assert living.stdout is not None
            left, held = (Path(process.stdout.readline().strip()).parent for process in (killed, living))
            killed.send_signal(signal.SIGKILL)
            killed.wait(timeout=60)
            remove_left_folders()
            assert left.exists()  # it is not old enough
            for folder in (left, held):
                age(folder)
            remove_left_folders()
            assert not left.exists()
            assert (held / "kernel.cubin").exists()
        finally:
            for process in (killed, living):
                process.kill()
    ScratchFolder(os.getpid()).made()  # as by the next process that needs one
    assert not held.exists()


@posix
def test_only_what_cuflash_wrote_is_removed(temporary: Path) -> None:
    others = temporary / "cuflash-notes", temporary / f"{PREFIX}notes"
    for folder in others:
        folder.mkdir()
        (folder / "notes.txt").touch()
        age(folder)
    (temporary / f"{PREFIX}file").touch()
    age(temporary / f"{PREFIX}file")
    remove_left_folders()
    assert all((folder / "notes.txt").exists() for folder in others)
    assert (temporary / f"{PREFIX}file").exists()


def test_threads_share_one_private_folder_that_is_made_again_if_it_is_removed(temporary: Path) -> None:
    scratch = ScratchFolder(os.getpid())
    assert scratch.folder is None
    made: list[Path] = []
    run_threads(lambda _: made.append(scratch.made()), 6)
    (folder,) = set(made)
    assert list(temporary.iterdir()) == [folder]
    if os.name == "posix":
        assert folder.stat().st_mode & 0o777 == 0o700
    shutil.rmtree(folder)
    again = scratch.made()
    assert again.is_dir()
    assert scratch.folder == again == scratch.made()
