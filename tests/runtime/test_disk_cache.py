"""Trust in the kernel cache's files, and calls without a usable cache. Needs neither NVRTC nor a GPU."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from workers import ROOT, run_python

from cuflash.errors import UnsupportedError
from cuflash.runtime import disk_cache
from cuflash.tools import info

NAME, OTHER, CONTENT = "kernel.sm_80.0123.cubin", "kernel.sm_90.0123.cubin", b"\x7fELF of a kernel"
STRANGER = 54321  # a user without files or rights here
posix = pytest.mark.skipif(os.name != "posix", reason="users and permissions of POSIX")
as_root = pytest.mark.skipif(os.name != "posix" or os.geteuid() != 0, reason="only root can become another user")


@pytest.fixture(autouse=True)
def _private_cache(cache_dir: Path) -> Path:
    return cache_dir


@pytest.fixture
def shared() -> Iterator[Path]:
    """Returns a folder that every user reaches, unlike pytest's folders."""
    with tempfile.TemporaryDirectory() as name:
        Path(name).chmod(0o755)
        yield Path(name)


@pytest.fixture
def stranger() -> Iterator[None]:
    """Switches the process to another user than root."""
    info.text()  # first, as that user may lack the right to read Python's modules
    os.seteuid(STRANGER)
    yield
    os.seteuid(0)


def cached_file(folder: Path, name: str = NAME, content: bytes = CONTENT) -> Path:
    """Writes a file to the cache folder and returns it after finding it there."""
    disk_cache.keep(name, content)
    assert disk_cache.find(name) == disk_cache.find_in_cache(name) == disk_cache.read(folder / name) == content
    return folder / name


def is_kept_elsewhere(problem: str) -> bool:
    """Checks that a kernel is stored by this process alone, with one matching warning, and found again."""
    with pytest.warns(RuntimeWarning, match=problem) as caught:
        disk_cache.keep(NAME, CONTENT)
    assert len(caught) == 1
    assert "CUFLASH_CACHE_DIR" in str(caught[0].message)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        disk_cache.keep(OTHER, CONTENT[1:])
    contents = [disk_cache.find(x) for x in (NAME, OTHER)]
    return disk_cache.find_in_cache(NAME) is None and contents == [
        CONTENT,
        CONTENT[1:],
    ]


def test_a_file_is_sound_under_its_own_name_alone(cache_dir: Path) -> None:
    cached_file(cache_dir).rename(cache_dir / OTHER)
    assert disk_cache.find(NAME) is disk_cache.find(OTHER) is None
    cached_file(cache_dir, OTHER)


@posix
@pytest.mark.parametrize("root", [False, True])
def test_a_folder_is_private_unless_root_makes_it_for_all(
    root: bool, cache_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    user = os.geteuid()
    monkeypatch.setattr(disk_cache, "ROOT", user if root else user + 1)
    umask = os.umask(0)
    try:
        path = cached_file(cache_dir)
    finally:
        os.umask(umask)
    assert cache_dir.stat().st_mode & 0o777 == (0o755 if root else 0o700)
    assert path.stat().st_mode & 0o777 == 0o644


@posix
@pytest.mark.parametrize("mode", [0o720, 0o702, 0o777])
def test_a_folder_that_others_may_write_is_refused(mode: int, cache_dir: Path) -> None:
    disk_cache.keep(NAME, CONTENT)
    cache_dir.chmod(mode)
    assert disk_cache.find(NAME) is None
    assert is_kept_elsewhere(f"the kernel cache {cache_dir} is not trusted: others than its owner.*chmod go-w")
    assert [path.name for path in cache_dir.iterdir()] == [NAME]  # nothing was added
    cache_dir.chmod(0o755)
    assert disk_cache.find_in_cache(NAME) == CONTENT


@posix
@pytest.mark.parametrize(("mode", "is_owner"), [(0o1777, True), (0o777, False), (0o1777, False)])
def test_chmod_is_advised_to_the_owner_of_a_folder_that_is_not_for_all(
    mode: int, is_owner: bool, cache_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache_dir.mkdir()
    cache_dir.chmod(mode)
    monkeypatch.setattr(disk_cache, "ROOT", os.geteuid())
    monkeypatch.setattr(disk_cache, "_user", lambda: os.geteuid() + (not is_owner))
    reason = "others than its owner may write to it"
    advice = "set CUFLASH_CACHE_DIR to a folder of your own that can be written"
    assert cache_line() == f"cache     none: the kernel cache {cache_dir} is not trusted: {reason}; {advice}"


@posix
@pytest.mark.parametrize("name", ["/dev/null", "file"])
def test_a_cache_that_is_no_folder_is_named_so(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / name
    if name == "file":
        path.touch(0o666)
    monkeypatch.setenv("CUFLASH_CACHE_DIR", str(path))
    message = f"the kernel cache {path} cannot be used (Not a directory); set CUFLASH_CACHE_DIR to a folder of your own"
    assert cache_line().startswith(f"cache     none: {message}")


@posix
@pytest.mark.parametrize("mode", [0o620, 0o602])
def test_a_file_that_others_may_write_is_rebuilt(mode: int, cache_dir: Path) -> None:
    path = cached_file(cache_dir)
    path.chmod(mode)
    assert disk_cache.find(NAME) is None
    assert not cached_file(cache_dir).stat().st_mode & 0o022


@posix
def test_a_folder_of_another_user_is_refused(cache_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disk_cache.keep(NAME, CONTENT)
    owner = os.geteuid()
    monkeypatch.setattr(disk_cache, "ROOT", owner + 1)
    monkeypatch.setattr(disk_cache, "_user", lambda: owner + 2)  # neither created it
    assert disk_cache.find_in_cache(NAME) is None
    with pytest.raises(UnsupportedError, match=f"belongs to user {owner}, neither to this user"):
        disk_cache.contents()
    monkeypatch.setattr(disk_cache, "ROOT", owner)  # root created it
    assert disk_cache.find_in_cache(NAME) == CONTENT
    cache_dir.chmod(0o777)
    assert disk_cache.find_in_cache(NAME) is None


@as_root
def test_a_file_of_another_user_is_rebuilt(cache_dir: Path) -> None:
    os.chown(cached_file(cache_dir), STRANGER, STRANGER)
    assert disk_cache.find(NAME) is None
    cached_file(cache_dir)
    os.chown(cache_dir, STRANGER, STRANGER)
    assert disk_cache.find(NAME) is None
    assert is_kept_elsewhere(f"belongs to user {STRANGER}, neither to this user .* nor to root")


@as_root
def test_a_cache_of_roots_serves_other_users_who_cannot_write_it(
    shared: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    monkeypatch.setenv("CUFLASH_CACHE_DIR", str(shared / "made"))
    cached_file(shared / "made")
    request.getfixturevalue("stranger")
    assert disk_cache.contents() == (shared / "made", [len(CONTENT) + disk_cache.DIGEST_BYTES])
    message = (
        r"1 kernels, 48 B; no more can be kept: .*/made cannot be written \(Permission denied\); set CUFLASH_CACHE"
    )
    assert re.match(f"cache     {shared / 'made'}: {message}", cache_line())
    with pytest.warns(RuntimeWarning, match=f"{shared / 'made'} cannot be used .Permission denied"):
        disk_cache.keep(OTHER, CONTENT)
    assert disk_cache.find_in_cache(OTHER) is None
    assert disk_cache.find(OTHER) == disk_cache.find_in_cache(NAME) == CONTENT


@as_root
def test_an_unreadable_parent_is_reported(
    shared: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    (shared / "closed").mkdir(mode=0o700)
    monkeypatch.setenv("CUFLASH_CACHE_DIR", str(shared / "closed" / "cache"))
    request.getfixturevalue("stranger")
    assert is_kept_elsewhere("closed/cache cannot be used .Permission denied")
    assert "closed/cache cannot be used (Permission denied)" in cache_line()


@as_root
def test_an_unreadable_folder_is_reported(
    shared: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    (shared / "closed").mkdir(mode=0o700)
    monkeypatch.setenv("CUFLASH_CACHE_DIR", str(shared / "closed"))
    request.getfixturevalue("stranger")
    assert is_kept_elsewhere("closed cannot be used .Permission denied")
    assert "closed cannot be used (Permission denied)" in cache_line()


@posix
@pytest.mark.parametrize("has_writer", [False, True])
def test_a_fifo_under_a_files_name_is_replaced(has_writer: bool, cache_dir: Path) -> None:
    cache_dir.mkdir(mode=0o700)
    os.mkfifo(cache_dir / NAME)
    writer = os.open(cache_dir / NAME, os.O_RDWR) if has_writer else -1
    code = f"from cuflash.runtime import disk_cache; print(disk_cache.find({NAME!r}), disk_cache.contents()[1])"
    command = [sys.executable, "-c", code]
    process = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True, timeout=600)  # no wait
    assert process.stdout == "None []\n"
    cached_file(cache_dir)
    if has_writer:
        os.close(writer)


def test_a_folder_under_a_files_name_is_reported(cache_dir: Path) -> None:
    (cache_dir / NAME).mkdir(parents=True)
    with pytest.warns(RuntimeWarning, match="cannot be used .*; set CUFLASH_CACHE_DIR"):
        disk_cache.keep(NAME, CONTENT)
    assert disk_cache.find(NAME) == CONTENT
    assert [each.name for each in cache_dir.iterdir()] == [NAME]  # no temporary file stays
    assert disk_cache.contents() == (cache_dir, [])


def test_a_tilde_is_the_home_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("USERPROFILE", str(tmp_path))
    monkeypatch.setenv("CUFLASH_CACHE_DIR", "~/cubins")
    cached_file(tmp_path / "cubins")


def cache_line() -> str:
    """Returns the line of `python -m cuflash info` on the cache."""
    (line,) = [line for line in info.text().splitlines() if line.startswith("cache ")]
    return line


def no_home(monkeypatch: pytest.MonkeyPatch) -> None:
    """Removes the home folder, as in a container whose user has no entry in the list of users."""
    pwd = pytest.importorskip("pwd")
    info.text()  # first, as importing CuPy creates a folder in the home, or without one in the current folder

    def unknown(_: object) -> None:
        raise KeyError("no such user")

    for name in ("HOME", "XDG_CACHE_HOME", "CUFLASH_CACHE_DIR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(pwd, "getpwuid", unknown)
    monkeypatch.setattr(pwd, "getpwnam", unknown)


@pytest.mark.parametrize("chosen", [None, "~/cubins", "~no-user-of-this-name/cubins"])
def test_without_a_home_kernels_are_kept_by_the_process(chosen: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    no_home(monkeypatch)
    if chosen is not None:
        monkeypatch.setenv("CUFLASH_CACHE_DIR", chosen)
    assert is_kept_elsewhere("the kernel cache has no folder: no home folder is known.*set CUFLASH_CACHE_DIR")
    assert cache_line().startswith("cache     none: the kernel cache has no folder: no home folder is known")


@as_root
@pytest.mark.usefixtures("stranger")
def test_a_home_at_the_root_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUFLASH_CACHE_DIR")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv("HOME", "/")
    assert is_kept_elsewhere("/.cache/cuflash cannot be used .Permission denied")
    message = r"none: the kernel cache /.cache/cuflash cannot be made \(/\S* cannot be written\); set CUFLASH_CACHE_DIR"
    assert re.match(f"cache     {message}", cache_line())


@as_root
@pytest.mark.parametrize("name", ["", "cache", "a/deeper/cache"])
def test_a_folder_that_takes_no_file_is_no_cache_and_none_is_created(
    name: str, shared: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    monkeypatch.setenv("CUFLASH_CACHE_DIR", str(shared / name))
    assert cache_line() == f"cache     {shared / name}: 0 kernels, 0 B"
    request.getfixturevalue("stranger")
    why = f"made ({shared} cannot be written)" if name else "written (Permission denied)"
    message = f"none: the kernel cache {shared / name} cannot be {why}; set CUFLASH_CACHE_DIR"
    assert cache_line().startswith(f"cache     {message}")
    assert not list(shared.iterdir())


@pytest.mark.parametrize("name", ["there", "not/yet"])
def test_info_about_the_cache_writes_nowhere_else(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "there").mkdir()
    monkeypatch.setenv("CUFLASH_CACHE_DIR", str(tmp_path / name))
    written: list[Path] = []
    write = Path.write_bytes
    monkeypatch.setattr(Path, "write_bytes", lambda path, data: written.append(path.parent) or write(path, data))
    assert cache_line() == f"cache     {tmp_path / name}: 0 kernels, 0 B"
    assert written == [tmp_path / name]
    assert [*tmp_path.rglob("*")] == [tmp_path / "there"]


@pytest.mark.skipif(sys.platform != "linux", reason="Linux' /proc")
def test_a_folder_that_root_cannot_create_is_no_cache(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("CUFLASH_CACHE_DIR", "/proc/cuflash/cache")
    assert re.match(
        "cache     none: the kernel cache /proc/cuflash/cache cannot be .*; set CUFLASH_CACHE_", cache_line()
    )
    assert is_kept_elsewhere("/proc/cuflash/cache cannot be used")


@posix
@pytest.mark.parametrize("name", ["there", "not/yet"])
def test_a_folder_without_room_for_a_kernel_is_no_cache(name: str, tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    limit = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))"
    code = f"{limit}; from cuflash.tools import info; print(info.cache())"
    printed = run_python("-c", code, CUFLASH_CACHE_DIR=str(tmp_path / name))
    assert printed.startswith(
        f"none: the kernel cache {tmp_path / name} cannot be written (File too large); set CUFLASH"
    )
    assert [*tmp_path.rglob("*")] == [tmp_path / "there"]  # nothing is left behind


def test_a_link_above_it_that_leads_nowhere_is_no_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    monkeypatch.setenv("CUFLASH_CACHE_DIR", str(tmp_path / "link" / "cache"))
    message = (
        f"none: the kernel cache {tmp_path / 'link' / 'cache'} cannot be made ({tmp_path / 'link'} cannot be written)"
    )
    assert cache_line().startswith(f"cache     {message}")
    assert is_kept_elsewhere("link/cache cannot be used")


@posix
def test_a_folder_that_the_file_system_makes_writable_for_all_is_no_cache(
    cache_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make = Path.mkdir

    def mkdir(path: Path, *arguments: Any, **keywords: Any) -> None:
        make(path, *arguments, **keywords)
        path.chmod(0o777)  # as on a file system without modes

    monkeypatch.setattr(Path, "mkdir", mkdir)
    assert cache_line().startswith(
        f"cache     none: the kernel cache {cache_dir} is not trusted: others than its owner"
    )
    assert not cache_dir.exists()


def test_a_link_that_leads_nowhere_is_no_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    monkeypatch.setenv("CUFLASH_CACHE_DIR", str(tmp_path / "link"))
    message = f"none: the kernel cache {tmp_path / 'link'} cannot be written (No such file"
    assert cache_line().startswith(f"cache     {message}")


def test_a_process_keeps_the_latest_kernels_up_to_a_bound(cache_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache_dir.write_bytes(b"no folder")
    monkeypatch.setattr(disk_cache, "MOST_BYTES", 10)
    monkeypatch.setattr(disk_cache, "_warn", lambda problem: None)
    for name in "abc":
        disk_cache.keep(name, name.encode() * 4)
    assert [disk_cache.find(name) for name in "abc"] == [None, b"bbbb", b"cccc"]


# Stores kernels without a cache, in a process and in its child, which finds the kernels that its parent stored before.
FORKS = f"""
import os, sys, warnings
from cuflash.runtime import disk_cache
warnings.simplefilter("ignore")
disk_cache.keep({NAME!r}, b"parent")
child = os.fork()
assert disk_cache.find({NAME!r}) == b"parent"
disk_cache.keep({OTHER!r}, b"child" if child == 0 else b"parent")
if child:
    assert os.waitpid(child, 0)[1] == 0
    assert disk_cache.find({OTHER!r}) == b"parent"
os._exit(0)
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="fork of POSIX")
def test_without_a_cache_a_process_and_its_children_leave_nothing_behind(tmp_path: Path) -> None:
    temporary, nowhere = tmp_path / "temporary", tmp_path / "file" / "cache"
    nowhere.parent.touch()
    temporary.mkdir()
    run_python("-c", FORKS, CUFLASH_CACHE_DIR=str(nowhere), TMPDIR=str(temporary))
    assert not list(temporary.iterdir())


def test_a_file_larger_than_any_kernel_is_rebuilt_unread(cache_dir: Path) -> None:
    path = cached_file(cache_dir)
    os.truncate(path, 2**40)  # a sparse file, one page on disk
    assert disk_cache.find(NAME) is None
    assert cached_file(cache_dir).stat().st_size == len(CONTENT) + disk_cache.DIGEST_BYTES


def test_what_killed_writers_left_is_removed_after_a_day(cache_dir: Path) -> None:
    cache_dir.mkdir(mode=0o700)
    code = (
        "import os, sys\n"
        "from pathlib import Path\n"
        "from cuflash.runtime import disk_cache\n"
        "os.replace = lambda *_: os._exit(9)\n"
        f"disk_cache.write(Path(sys.argv[1]) / {NAME!r}, {CONTENT!r})\n"
    )
    for _ in range(2):
        assert subprocess.run([sys.executable, "-c", code, str(cache_dir)], cwd=ROOT, check=False).returncode == 9
    old, recent = left = list(cache_dir.iterdir())
    assert all(path.name.startswith(NAME) for path in left)
    strange = cache_dir / "of another process.tmp"
    strange.touch()
    yesterday = time.time() - 25 * 3600
    for path in (old, strange):
        os.utime(path, (yesterday, yesterday))
    path = cached_file(cache_dir)
    os.utime(path, (yesterday, yesterday))
    assert set(cache_dir.iterdir()) == {path, recent, strange}
    disk_cache.keep(OTHER, CONTENT)
    assert disk_cache.find(NAME) == CONTENT  # kernels stay, however old


def test_info_counts_the_kernels(cache_dir: Path) -> None:
    for name in (NAME, OTHER):
        disk_cache.keep(name, bytes(512 - disk_cache.DIGEST_BYTES))
    (cache_dir / "gone.cubin").symlink_to("nowhere")
    assert cache_line() == f"cache     {cache_dir}: 2 kernels, 1 KiB"


def test_info_runs_where_nothing_can_be_kept(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    printed = run_python("-m", "cuflash", "info", CUFLASH_CACHE_DIR=str(tmp_path / "file" / "cache"))
    assert f"cache     none: the kernel cache {tmp_path / 'file' / 'cache'} cannot be used" in printed
