"""Compiles a `Variant` to a cubin by NVRTC and loads its kernel, with a cache on disk and one in the process."""

from __future__ import annotations

import hashlib
import re
import time
from collections.abc import Collection
from contextlib import nullcontext, suppress
from functools import cache
from pathlib import Path
from threading import Thread
from typing import Any

from ..arrays.library import cupy_module
from ..errors import INSTALL_HINT, CompileError, UnsupportedError
from ..locks import Lock, uninterrupted
from ..log import logger
from ..planning.device import code_runs
from ..planning.variant import Variant
from .disk_cache import compiling, find, find_in_cache, keep
from .driver import current_device, on_device
from .kernel_launch import has_room_for_cluster
from .structs import size_of

MOD_FUNCTIONS = "common/mod_functions.cuh"  # included ahead of the generated text of mods
# Suffix of a cache file that marks a kernel as spilling, so that no process compiles it again.
SPILLED = ".spilled"
_SPILLS = re.compile(r"\b[1-9]\d* bytes (?:stack frame|spill)")
_INCLUDE = re.compile(r'^\s*#include\s+"([^"]+)"', re.MULTILINE)
_lock = Lock()
_locks: dict[Any, Lock] = {}
_kernels: dict[tuple[Variant, int], Any] = {}
_unusable: set[Variant] = set()


class UnusableError(CompileError):
    """The error of a kernel that must not run. Planning then takes another one, as `unusable` has this one."""

    def __init__(self, variant: Variant, reason: str) -> None:
        super().__init__(f"{variant.name} {reason}, and does not run for that reason")
        self.variant = variant
        _unusable.add(variant)


class SpilledError(UnusableError):
    """The error of a Hopper kernel that spills registers, with mods or in clusters.

    With setmaxnreg, ptxas has let such a kernel write to memory at a wrong address.
    """

    def __init__(self, variant: Variant) -> None:
        super().__init__(variant, "spills registers")


@cache
def source_root() -> Path:
    """Returns the folder `kernels_cu`: inside the package in a wheel, beside it in a checkout or editable install."""
    package = Path(__file__).resolve().parents[1]
    for root in (package / "kernels_cu", package.parent / "kernels_cu"):
        if (root / "common" / "config.cuh").is_file():
            return root
    raise CompileError(f"kernels_cu was found neither in {package} nor beside it; reinstall cuflash")


def included_files(source: Path) -> list[Path]:
    """Returns the source and all files that it includes, directly or not, in the order of inclusion."""
    files: dict[Path, None] = {}
    pending = [source.resolve()]
    while pending:
        path = pending.pop(0)
        if path not in files:
            files[path] = None
            pending += [(path.parent / name).resolve() for name in _INCLUDE.findall(path.read_text("utf-8"))]
    return list(files)


def files_of(variant: Variant) -> list[Path]:
    """Returns all files that a variant is compiled from."""
    files = included_files(source_root() / variant.source)
    if variant.mod_code is not None:
        files += [path for path in included_files(source_root() / MOD_FUNCTIONS) if path not in files]
    return files


def nvrtc_version() -> tuple[int, int]:
    """Returns the version of the NVRTC that compiles here; raises UnsupportedError if it is missing."""
    with _lock:  # NVRTC lacks its builtins library if two threads make CuPy's first search for it
        return _nvrtc_version()


@cache
def _nvrtc_version() -> tuple[int, int]:
    cupy_module()
    try:
        from cupy.cuda import nvrtc

        return tuple(nvrtc.getVersion())
    except Exception as error:
        # CuPy searches for NVRTC at its first use, and reports its absence by an exception of another package.
        raise UnsupportedError(f"GPU arrays need NVRTC, which CuPy could not load ({error}): {INSTALL_HINT}") from error


def options(variant: Variant) -> tuple[str, ...]:
    """Returns the NVRTC options of a variant, without the include path."""
    mod_words = 0 if variant.mod_code is None else variant.mod_code.words
    constants = variant.constants | {"PARAMS_BYTES": size_of(variant.params, mod_words)}
    defines = tuple(f"-DCUFLASH_{key}={value}" for key, value in constants.items())
    return (f"-arch={_supported_arch(variant.arch)}", "-std=c++17", "--ptxas-options=-v", *defines)


def program_text(variant: Variant) -> str:
    """Returns the text to compile: the source, or mods and the source."""
    source = source_root() / variant.source
    if variant.mod_code is None:
        return source.read_text("utf-8")
    up = "../" * variant.source.count("/")
    return f'#include "{up}{MOD_FUNCTIONS}"\n\n{variant.mod_code.text}\n#include "{source.name}"\n'


def compile_variant(variant: Variant) -> tuple[bytes, str]:
    """Returns (cubin, compiler log). Needs NVRTC but no GPU."""
    nvrtc_version()
    from cupy.cuda import nvrtc

    source = source_root() / variant.source
    begin = time.perf_counter()
    program = nvrtc.createProgram(program_text(variant), str(source), (), ())
    try:
        with uninterrupted:
            nvrtc.compileProgram(program, (*options(variant), f"-I{source.parent}"))
        # CuPy's getCUBIN cuts off the last byte, a zero, as if it ended a string.
        cubin, log = nvrtc.getCUBIN(program) + b"\0", nvrtc.getProgramLog(program)
    except nvrtc.NVRTCError as error:
        raise CompileError(
            f"{variant.name} does not compile for {variant.arch} with NVRTC {'.'.join(map(str, nvrtc_version()))} "
            f"({error}).\nSource: {source}\n{nvrtc.getProgramLog(program)}"
        ) from error
    finally:
        nvrtc.destroyProgram(program)
    logger.debug("compiled %s for %s in %.2f s", variant.name, variant.arch, time.perf_counter() - begin)
    return cubin, log


def is_cached(variant: Variant) -> bool:
    """Returns True if the disk cache holds a sound cubin of the variant."""
    return find_in_cache(_file_name(variant)) is not None


def cubin(variant: Variant) -> bytes:
    """Returns the variant's cubin, from the disk cache if it is sound there, else compiled and stored there."""
    name = _file_name(variant)
    content = _find(variant, name)
    if content is None:
        with uninterrupted, compiling(name):
            content = _find(variant, name) or _compile(variant, name)
    return content


def compile_together(variants: Collection[Variant], ordinal: int) -> None:
    """Compiles the kernels of a call side by side, if several are in no cache. Their errors are left to `load`."""
    missing = [variant for variant in dict.fromkeys(variants) if (variant, ordinal) not in _kernels]
    if len(missing) > 1:  # the disk is not searched for one alone, as `load` does that
        missing = [variant for variant in missing if not is_cached(variant)]
    if len(missing) < 2:
        return
    nvrtc_version()
    threads = [Thread(target=_compile_quietly, args=(variant,)) for variant in missing[1:]]
    with suppress(RuntimeError):  # no thread starts while Python ends
        for thread in threads:
            thread.start()
    _compile_quietly(missing[0])
    for thread in threads:
        if thread.ident is not None:
            thread.join()


def _compile_quietly(variant: Variant) -> None:
    with suppress(Exception):
        cubin(variant)


def _is_allowed_to_spill(variant: Variant) -> bool:
    return not variant.of_warpgroups or (variant.mod_code is None and variant.num_in_cluster == 1)


def _find(variant: Variant, name: str) -> bytes | None:
    content = find(name)
    if content is None and not _is_allowed_to_spill(variant) and find(name + SPILLED) is not None:
        raise SpilledError(variant)
    return content


def _compile(variant: Variant, name: str) -> bytes:
    cubin, log = compile_variant(variant)
    if not _is_allowed_to_spill(variant) and _SPILLS.search(log):
        logger.debug("%s spills registers; the next kernel is taken", variant.name)
        keep(name + SPILLED, variant.name.encode())
        raise SpilledError(variant)
    keep(name, cubin)
    return cubin


def unusable() -> frozenset[Variant]:
    """Returns the kernels that must not run, of those that this process has met."""
    return frozenset(_unusable)


def load(variant: Variant, ordinal: int) -> Any:
    """Returns the kernel as a `cupy.cuda.Function` of the GPU `ordinal`."""
    key = (variant, ordinal)
    kernel = _kernels.get(key)
    if kernel is None:
        with _lock:
            lock = _locks.setdefault(key, Lock())
        with lock:
            kernel = _kernels.get(key)
            if kernel is None:
                kernel = _kernels[key] = _load(variant, ordinal)
    return kernel


def _load(variant: Variant, ordinal: int) -> Any:
    nvrtc_version()
    from cupy.cuda import Module, driver

    with nullcontext() if current_device() == ordinal else on_device(ordinal):
        module = Module()
        # RawModule takes a path, and its file may have changed since it was validated.
        module.load(cubin(variant))
        kernel = module.get_function(variant.name)
        # Set for every kernel: the default of 48 KiB includes the kernel's static shared memory.
        most = driver.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        driver.funcSetAttribute(kernel.ptr, most, variant.smem_bytes)
        _modules.append(module)
        if variant.num_in_cluster > 1 and not has_room_for_cluster(
            kernel.ptr, variant.num_in_cluster, variant.num_threads, variant.smem_bytes
        ):
            raise UnusableError(variant, f"finds no {variant.num_in_cluster} SMs of a cluster on this GPU")
        return kernel


# CuPy unloads a module with its Python object, but a captured graph may outlive all other references to it.
_modules: list[Any] = []


@cache
def _supported_arch(arch: str) -> str:
    """Returns `arch`, or if NVRTC lacks it, the newest supported one whose code runs there."""
    nvrtc_version()
    from cupy.cuda import nvrtc

    numbers = {int(number) for number in nvrtc.getSupportedArchs()}
    number, suffix = int(arch[3:].rstrip("a")), "a" if arch.endswith("a") else ""
    if number in numbers or suffix:
        return arch
    running = [code for code in numbers if code_runs(code, number)]
    if not running:
        raise UnsupportedError(
            f"NVRTC {'.'.join(map(str, nvrtc_version()))} cannot compile for {arch}; "
            f"install a newer one: {INSTALL_HINT}"
        )
    return f"sm_{max(running)}"


def _file_name(variant: Variant) -> str:
    """Returns the variant's file name, with a digest of everything that its code depends on."""
    return f"{variant.name}.{_supported_arch(variant.arch)}.{_digest(variant)}.cubin"


def _digest(variant: Variant) -> str:
    digest = hashlib.sha256(repr((options(variant), nvrtc_version())).encode())
    root = source_root()
    if variant.mod_code is not None:
        digest.update(variant.mod_code.text.encode())
    for path in files_of(variant):
        digest.update(path.relative_to(root).as_posix().encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:32]
