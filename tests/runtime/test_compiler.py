"""The kernel cache, on disk and in memory, and the options of the compiler. Needs NVRTC but no GPU."""

from __future__ import annotations

import hashlib
import shutil
import struct
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from mod_variants import mod_variants
from variants import variants
from workers import run_python, run_threads

from cuflash.errors import CompileError, UnsupportedError
from cuflash.planning.variant import Variant
from cuflash.runtime import compiler
from cuflash.runtime.disk_cache import cache_dir as chosen_dir
from cuflash.runtime.disk_cache import read

try:
    NVRTC = compiler.nvrtc_version()
except UnsupportedError as error:
    pytest.skip(f"needs NVRTC: {error}", allow_module_level=True)

MERGE = Variant("merge", "portable/merge.cu", "sm_80", "float16", "float16")
OTHER = replace(MERGE, dtype="bfloat16", out_dtype="bfloat16")
CHECKOUT = Path(compiler.__file__).resolve().parents[2]
SOURCES = sorted(path.relative_to(compiler.source_root()).as_posix() for path in compiler.source_root().rglob("*.cu"))


@pytest.fixture(autouse=True)
def _private_cache(cache_dir: Path) -> Path:
    return cache_dir


@pytest.fixture
def compiles(monkeypatch: pytest.MonkeyPatch) -> list[Variant]:
    """Returns the list of compiled variants, in order."""
    compiled: list[Variant] = []
    compile_variant = compiler.compile_variant

    def counted(variant: Variant) -> tuple[bytes, str]:
        compiled.append(variant)
        return compile_variant(variant)

    monkeypatch.setattr(compiler, "compile_variant", counted)
    return compiled


@pytest.fixture
def sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Replaces kernels_cu by a copy that a test may edit."""
    copy = tmp_path / "kernels_cu"
    shutil.copytree(compiler.source_root(), copy)
    monkeypatch.setattr(compiler, "source_root", lambda: copy)
    return copy


def cached_file(variant: Variant) -> Path:
    """Compiles a variant if needed; returns its file after comparing the cubin with it."""
    cubin, path = compiler.cubin(variant), chosen_dir() / compiler._file_name(variant)
    assert read(path) == cubin
    return path


def assert_sound(path: Path) -> None:
    """Checks that the file is a whole ELF image followed by the SHA-256 of its name and itself."""
    data = path.read_bytes()
    image, digest = data[:-32], data[-32:]
    assert hashlib.sha256(path.name.encode() + b"\0" + image).digest() == digest
    assert image[:4] == b"\x7fELF"
    section_headers, entry_bytes, entries = *struct.unpack_from("<Q", image, 40), *struct.unpack_from("<HH", image, 58)
    assert section_headers + entry_bytes * entries <= len(image)


def test_a_compiled_kernel_is_found_again(cache_dir: Path, compiles: list[Variant]) -> None:
    path = cached_file(MERGE)
    assert path.parent == cache_dir
    assert path.name.startswith(f"{MERGE.name}.sm_80.")
    assert_sound(path)
    assert cached_file(MERGE) == path
    assert compiles == [MERGE]
    assert list(cache_dir.iterdir()) == [path]  # no temporary file stays


def test_kernels_architectures_and_dtypes_have_files_of_their_own(compiles: list[Variant]) -> None:
    variants = [MERGE, OTHER, replace(MERGE, arch="sm_90"), replace(OTHER, arch="sm_90")]
    assert len({cached_file(variant) for variant in variants}) == len(compiles) == 4


DAMAGE: dict[str, Callable[[bytes], bytes]] = {
    "truncated": lambda data: data[:-7],
    "altered": lambda data: bytes([*data[:2000], data[2000] ^ 1, *data[2001:]]),
    "altered_digest": lambda data: data[:-1] + bytes([data[-1] ^ 1]),
    "longer": lambda data: data + b"\0",
    "empty": lambda data: b"",
    "only_a_digest": lambda data: hashlib.sha256(b"").digest(),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_file_is_noticed_and_rebuilt(damage: str, compiles: list[Variant]) -> None:
    path = cached_file(MERGE)
    sound = path.read_bytes()
    path.write_bytes(DAMAGE[damage](sound))
    assert cached_file(MERGE) == path
    assert compiles == [MERGE, MERGE]
    assert_sound(path)
    assert len(path.read_bytes()) == len(sound)


def test_another_kernels_file_under_a_kernels_name_is_noticed_and_rebuilt(compiles: list[Variant]) -> None:
    path, other = cached_file(MERGE), cached_file(OTHER)
    shutil.copyfile(other, path)
    assert not compiler.is_cached(MERGE)
    assert cached_file(MERGE) == path
    assert compiles == [MERGE, OTHER, MERGE]
    assert_sound(path)
    assert MERGE.name.encode() in path.read_bytes()
    other.rename(other.with_name("another.cubin"))
    assert read(other.with_name("another.cubin")) is None


def test_a_file_of_an_older_cuflash_is_rebuilt(compiles: list[Variant]) -> None:
    path = cached_file(MERGE)
    cubin = path.read_bytes()[:-32]
    path.write_bytes(cubin + hashlib.sha256(cubin).digest())
    assert cached_file(MERGE) == path
    assert compiles == [MERGE, MERGE]
    assert_sound(path)


def test_an_edited_header_is_a_new_kernel(sources: Path, compiles: list[Variant]) -> None:
    first = cached_file(MERGE)
    header = sources / "common" / "numeric.cuh"  # included by params.cuh's includer, not by merge.cu alone
    header.write_text(header.read_text("utf-8") + "// edited\n", "utf-8")
    second = cached_file(MERGE)
    assert second != first
    assert len(compiles) == 2
    (sources / "sm80" / "tile.cuh").write_text("not even C++", "utf-8")  # merge does not include it
    assert cached_file(MERGE) == second
    assert len(compiles) == 2


def test_the_options_and_the_compiler_are_part_of_the_key(monkeypatch: pytest.MonkeyPatch) -> None:
    names = {cached_file(MERGE).name}
    options = compiler.options
    monkeypatch.setattr(compiler, "options", lambda variant: (*options(variant), "-lineinfo"))
    names.add(cached_file(MERGE).name)
    monkeypatch.setattr(compiler, "options", options)
    monkeypatch.setattr(compiler, "nvrtc_version", lambda: (99, 0))
    names.add(cached_file(MERGE).name)
    assert len(names) == 3


def test_a_kernel_is_cached_while_its_file_is_sound(cache_dir: Path, compiles: list[Variant]) -> None:
    assert not compiler.is_cached(MERGE)
    assert not cache_dir.exists()
    path = cached_file(MERGE)
    assert compiler.is_cached(MERGE)
    assert not compiler.is_cached(OTHER)
    assert compiles == [MERGE]
    path.write_bytes(path.read_bytes()[:-1])
    assert not compiler.is_cached(MERGE)


def test_an_unwritable_folder_works_and_warns_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, compiles: list[Variant]
) -> None:
    file = tmp_path / "file"
    file.write_text("a folder cannot be made below a file", "utf-8")
    monkeypatch.setenv("CUFLASH_CACHE_DIR", str(file / "cache"))
    with pytest.warns(RuntimeWarning, match="cannot be used.*set CUFLASH_CACHE_DIR") as caught:
        cubin = compiler.cubin(MERGE)
    assert len(caught) == 1
    assert str(file / "cache") in str(caught[0].message)
    assert cubin.startswith(b"\x7fELF")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert compiler.cubin(MERGE) == cubin == compiler.cubin(MERGE)
        assert compiler.cubin(OTHER) == compiler.cubin(OTHER) != cubin
    assert compiles == [MERGE, OTHER]  # a kernel is still compiled once in the process
    assert file.read_text("utf-8") == "a folder cannot be made below a file"


def test_the_cache_is_where_the_variable_says_or_the_users_cache_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUFLASH_CACHE_DIR", str(tmp_path / "elsewhere"))
    assert cached_file(MERGE).parent == tmp_path / "elsewhere"
    for value in (None, ""):
        if value is None:
            monkeypatch.delenv("CUFLASH_CACHE_DIR")
        else:
            monkeypatch.setenv("CUFLASH_CACHE_DIR", value)
        assert chosen_dir().name == "cuflash"
        assert chosen_dir().is_absolute()


def test_threads_at_once_compile_and_load_a_kernel_once(
    monkeypatch: pytest.MonkeyPatch, compiles: list[Variant]
) -> None:
    def load(variant: Variant, ordinal: int) -> Any:
        time.sleep(0.05)
        return compiler.cubin(variant), object()

    monkeypatch.setattr(compiler, "_load", load)
    got: list[Any] = []
    run_threads(lambda index: got.append(compiler.load(MERGE, 0)), 8)
    assert len(got) == 8
    assert len(set(map(id, got))) == 1
    assert compiles == [MERGE]
    assert compiler.load(MERGE, 1) is not got[0]  # each GPU loads its own
    assert compiles == [MERGE]


def test_the_loaded_kernel_is_the_validated_one_after_a_file_swap(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    path, sound, loaded = cached_file(MERGE), compiler.cubin(MERGE), []
    kernel = SimpleNamespace(ptr=77)
    module = SimpleNamespace(load=loaded.append, get_function=lambda name: kernel)

    def find(name: str, find: Callable[[str], bytes | None] = compiler.find) -> bytes | None:
        content = find(name)
        path.write_bytes(b"of another process")
        return content

    monkeypatch.setattr(compiler, "find", find)
    monkeypatch.setattr(compiler, "current_device", lambda: 0)
    monkeypatch.setattr(compiler, "_modules", [])
    monkeypatch.setattr("cupy.cuda.Module", lambda: module)
    monkeypatch.setattr("cupy.cuda.driver.funcSetAttribute", lambda *args: loaded.append(args[::2]))
    assert compiler.load(MERGE, 0) is kernel
    assert loaded == [sound, (77, MERGE.smem_bytes)]


def test_threads_in_the_disk_cache_end_with_one_sound_file(cache_dir: Path) -> None:
    paths: list[Path] = []
    run_threads(lambda index: paths.append(cached_file((MERGE, OTHER)[index % 2])), 6)
    assert sorted(set(paths)) == sorted(cache_dir.iterdir())
    assert len(set(paths)) == 2
    for path in set(paths):
        assert_sound(path)


def test_processes_at_once_end_with_one_sound_file(cache_dir: Path) -> None:
    code = (
        "import sys\n"
        "from cuflash.runtime import compiler\n"
        "from cuflash.planning.variant import Variant\n"
        "print('ready', flush=True)\n"
        "sys.stdin.readline()\n"
        "sys.stdout.write(compiler.cubin(Variant('merge', 'portable/merge.cu', 'sm_80', 'float16', 'float16')).hex())\n"
    )
    command, pipe = [sys.executable, "-W", "error", "-c", code], subprocess.PIPE
    processes = [subprocess.Popen(command, cwd=CHECKOUT, stdin=pipe, stdout=pipe, text=True) for _ in range(3)]
    for process in processes:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
    for process in processes:
        assert process.stdin is not None
        process.stdin.write("go\n")
        process.stdin.flush()
    printed = {process.communicate(timeout=600)[0] for process in processes}
    assert [process.returncode for process in processes] == [0, 0, 0]
    assert printed == {compiler.cubin(MERGE).hex()}
    assert list(cache_dir.iterdir()) == [cached_file(MERGE)]
    assert_sound(cached_file(MERGE))


def test_a_compile_error_is_reported_in_full_and_leaves_nothing(sources: Path, cache_dir: Path) -> None:
    source = sources / "portable" / "merge.cu"
    text = source.read_text("utf-8")
    source.write_text(text + "\n#error broken on purpose\n", "utf-8")
    with pytest.raises(CompileError) as caught:
        compiler.cubin(MERGE)
    message = str(caught.value)
    version = ".".join(map(str, NVRTC))
    for words in (MERGE.name, "sm_80", f"NVRTC {version}", f"Source: {source}", "broken on purpose", "merge.cu("):
        assert words in message
    assert not list(cache_dir.glob("*"))
    source.write_text(text, "utf-8")
    assert_sound(cached_file(MERGE))


# Architectures that versions of NVRTC support, all but the oldest.
NVRTC_ARCHS = {
    (12, 8): (80, 86, 87, 89, 90, 100, 101, 120),
    (12, 9): (80, 86, 87, 89, 90, 100, 101, 103, 120, 121),
    (13, 0): (80, 86, 87, 88, 89, 90, 100, 103, 110, 120, 121),
}


@pytest.fixture
def support_archs(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., None]]:
    """Replaces NVRTC by one that supports these architectures."""

    def replace_archs(*numbers: int) -> None:
        monkeypatch.setattr("cupy.cuda.nvrtc.getSupportedArchs", lambda: (75, *numbers))
        compiler._supported_arch.cache_clear()

    yield replace_archs
    compiler._supported_arch.cache_clear()


@pytest.mark.parametrize(
    ("version", "archs"),
    [
        ((12, 8), {"sm_80": "sm_80", "sm_87": "sm_87", "sm_88": "sm_86", "sm_101": "sm_101", "sm_103": "sm_100",
                   "sm_109": "sm_100", "sm_110": "sm_101", "sm_121": "sm_120", "sm_90a": "sm_90a"}),
        ((12, 9), {"sm_88": "sm_86", "sm_103": "sm_103", "sm_109": "sm_103", "sm_110": "sm_101", "sm_121": "sm_121"}),
        ((13, 0), {"sm_88": "sm_88", "sm_101": "sm_110", "sm_109": "sm_103", "sm_110": "sm_110", "sm_129": "sm_121"}),
    ],
)  # fmt: skip
def test_an_unknown_architecture_gets_the_newest_whose_code_runs_there(
    support_archs: Callable[..., None], version: tuple[int, int], archs: dict[str, str]
) -> None:
    support_archs(*NVRTC_ARCHS[version])
    for arch, compiled_for in archs.items():
        assert f"-arch={compiled_for}" in compiler.options(replace(MERGE, arch=arch))


@pytest.mark.parametrize("arch", ["sm_110", "sm_130", "sm_87"])
def test_an_architecture_that_runs_no_known_code_is_unsupported(support_archs: Callable[..., None], arch: str) -> None:
    support_archs(80, 86, 90, 100, 103, 120)
    with pytest.raises(
        UnsupportedError, match=rf"NVRTC {NVRTC[0]}\.{NVRTC[1]} cannot compile for {arch}; .*pip install"
    ):
        compiler.cubin(replace(MERGE, arch=arch))


def test_an_architecture_newer_than_the_compiler_compiles() -> None:
    path = cached_file(replace(MERGE, arch="sm_129"))
    assert ".sm_12" in path.name
    assert ".sm_129." not in path.name
    assert_sound(path)


@pytest.mark.parametrize("source", SOURCES)
def test_the_included_files_are_all_that_a_kernel_needs(
    source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = compiler.source_root()
    known_variants = (*variants("sm_90"), *mod_variants("sm_90"), *mod_variants("sm_90", True))
    variant = next(variant for variant in known_variants if variant.source == source)
    files = compiler.files_of(variant)
    assert files[0] == root / source
    assert len(set(files)) == len(files) > 2
    assert root / "common" / "config.cuh" in files
    for path in files:
        target = tmp_path / "few" / path.relative_to(root)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, target)
    monkeypatch.setattr(compiler, "source_root", lambda: tmp_path / "few")
    # The front end reads all headers, in a tenth of the time. test_compile.py compiles each kernel to its end.
    options = (*compiler.options(variant), "-fdevice-syntax-only")
    monkeypatch.setattr(compiler, "options", lambda variant: options)
    compiler.compile_variant(variant)
    (tmp_path / "few" / files[-1].relative_to(root)).unlink()
    with pytest.raises(CompileError, match=files[-1].name):
        compiler.compile_variant(variant)


def test_the_sources_are_found_beside_the_package() -> None:
    assert compiler.source_root() in (CHECKOUT / "kernels_cu", CHECKOUT / "cuflash" / "kernels_cu")
    assert (compiler.source_root() / MERGE.source).is_file()


def test_where_cupy_cannot_make_its_folder_the_error_names_its_variable(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    folder = tmp_path / "file" / "cupy"
    printed = run_python("-m", "cuflash", "info", CUPY_CACHE_DIR=str(folder))
    assert f"which cannot use {folder} (Not a directory); set CUPY_CACHE_DIR to a folder" in printed
