"""Lists the kernels of two trees for `.ci/versus`, pairs those that correspond, and compares their cubins.

A kernel without score_mod, mask_mod, bias, sinks and dropout (*mods*) is paired by its name, where words that were
renamed count as equal (`RENAMED`). Names of kernels with mods hold a digest of generated text, which changes whenever
that text is renamed. They are paired by the call that launches them, their op, and their index among the call's kernels
of that op.
"""

from __future__ import annotations

import hashlib
import importlib
import os
import re
import struct
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import versus_checks as checks

ROOT = Path(__file__).resolve().parents[1]
# Words of kernel names in older trees, and the words that took their place. A key may join several by underscores.
RENAMED: dict[str, str] = {}
# Modules of tests/ and tests/support/ that list kernels, and their functions: the newest name first.
PLAIN_LISTS = (("variants", "variants"),)
MOD_LISTS = (("mod_variants", "mod_variants"), ("mod_variants", "mod_variants"))
# Calls with dropout: head dim, dtype, whether they are packed, and whether strides forbid Hopper's kernels.
DROPOUT_SHAPES = (
    *((64, "float16", packed, generic) for packed in (False, True) for generic in (False, True)),
    *((dim, "float16", packed, False) for dim in (128, 256) for packed in (False, True)),
    (64, "float32", False, False),
)
SYMBOL = "-DCUFLASH_KERNEL="  # the option that gives a kernel its name
ONE_SYMBOL = f"{SYMBOL}cuflash_kernel"
ERROR = "error "  # begins what stands in place of a digest where a kernel does not compile

Kernels = dict[str, Any]  # variants by label


def renamed(name: str, words: dict[str, str] = RENAMED) -> str:
    """Returns the name that a kernel of an older tree has today. The longest key that fits is replaced, once."""
    if not words:
        return name
    keys = "|".join(map(re.escape, sorted(words, key=len, reverse=True)))
    return re.sub(rf"(?<![^_])(?:{keys})(?![^_])", lambda found: words[found[0]], name)


# The kernels of a tree: in a process whose `cuflash` is the tree's.


def plain_kernels(archs: Iterable[str], is_older: bool) -> Kernels:
    """Lists all kernels without mods, by architecture and today's name."""
    variants = list_of(PLAIN_LISTS)[1]
    kernels = [(arch, variant) for arch in archs for variant in variants(arch)]
    return labelled((f"{arch} {today(variant.name, is_older)}", variant) for arch, variant in kernels)


def mod_kernels(archs: Iterable[str], is_older: bool) -> Kernels:
    """Lists the kernels that calls with mods launch, by architecture, call, op and index."""
    return labelled(of_calls(archs, is_older))


def of_calls(archs: Iterable[str], is_older: bool) -> Iterator[tuple[str, Any]]:
    """Yields these kernels, each with its label."""
    lists, variants = list_of(MOD_LISTS)
    for arch in archs:
        names = product(lists.CALLS, (False, True))
        calls = {f"{name}{' on any GPU' * generic}": variants(arch, generic, (name,)) for name, generic in names}
        for call, launched in (calls | {"few queries": lists.few_variants(arch)} | dropout_calls(arch)).items():
            counts: Counter[str] = Counter()
            for variant in launched:
                op = today(variant.op, is_older)
                yield f"{arch} {call}: {op} {counts[op]}", variant
                counts[op] += 1


def today(name: str, is_older: bool) -> str:
    """Returns today's name of what has this name in the older or in the newer tree."""
    return renamed(name) if is_older else name


def labelled(kernels: Iterable[tuple[str, Any]]) -> Kernels:
    """Returns kernels by label. A label of two kernels, which would hide one of them, is an error."""
    found: Kernels = {}
    for label, variant in kernels:
        if found.setdefault(label, variant) is not variant:
            raise RuntimeError(f"two kernels are {label!r}: give them different labels")
    return found


def list_of(candidates: Iterable[tuple[str, str]]) -> tuple[Any, Any]:
    """Imports the first of these modules that the tests of this process's tree have: the module and its function."""
    tree = this_tree()
    folders = [tree / "tests" / "support", tree / "tests"]
    ours = (ROOT, ROOT / "tests", ROOT / "tests" / "support")
    others = [folder for folder in sys.path if Path(folder or ".").resolve() not in ours]
    sys.path[:] = [str(tree), *(str(each) for each in folders if each.is_dir()), *others]
    for name, function in candidates:
        if any((folder / f"{name}.py").is_file() for folder in folders):
            module = importlib.import_module(name)
            check_origins(tree)
            return module, getattr(module, function)
    raise RuntimeError(f"{tree}/tests has none of {candidates}: add today's name of the module here")


def this_tree() -> Path:
    """Returns the folder that holds this process's `cuflash`."""
    import cuflash

    return Path(str(cuflash.__file__)).resolve().parents[1]


def check_origins(tree: Path) -> None:
    """Raises an error if a module of the working tree stands in for one of the older tree."""
    files = [
        Path(file).resolve() for module in list(sys.modules.values()) if (file := getattr(module, "__file__", None))
    ]
    parts = [ROOT / "cuflash", ROOT / "tests"]
    if tree != ROOT and (strange := [file for file in files if any(file.is_relative_to(part) for part in parts)]):
        raise RuntimeError(f"{strange[0]} was imported for {tree}")


def dropout_calls(arch: str) -> dict[str, list[Any]]:
    """Returns the kernels of calls with dropout, which the tests' lists lack, by public names alone."""
    import cuflash

    heads, seqlen = 4, 300
    slopes, sinks = (np.linspace(0.05, 0.8, heads).astype(np.float32) for _ in range(2))
    bias = np.zeros((1, heads, 1, seqlen), np.float32)
    dropout = {"dropout_p": 0.3, "dropout_seed": np.array(7, np.int64)}
    document = cuflash.mods.document(np.array([0, 40, seqlen], np.int32))
    everything = {
        "score_mod": cuflash.mods.alibi(slopes),
        "mask_mod": document,
        "bias": bias,
        "sinks": sinks,
        **dropout,
    }
    calls: dict[str, list[Any]] = {}
    for dim, dtype, packed, generic in DROPOUT_SHAPES:
        shape = (2 * seqlen,) if packed else (2, seqlen)
        q, k, v = (np.zeros((*shape, count, dim), dtype) for count in (heads, 2, 2))
        q = q[::-1] if generic and packed else q[:, ::-1] if generic else q  # no kernel of Hopper's reads this
        lengths: dict[str, Any] = {}
        if packed:
            bounds = np.array([0, seqlen, 2 * seqlen], np.int32)
            lengths = dict.fromkeys(("cu_seqlens_q", "cu_seqlens_k"), bounds)
            lengths |= dict.fromkeys(("max_seqlen_q", "max_seqlen_k"), seqlen)
        for name, mods in (("dropout", dropout), ("all mods", everything)):
            grads = (slopes, bias, sinks) if name == "all mods" else ()
            ways: tuple[dict[str, Any], ...] = ({"op": "forward"}, {"op": "backward", "captured_grads": grads})
            launched: dict[Any, None] = {}
            for way in (*ways, {**ways[1], "deterministic": True}):
                plan = cuflash.plan(q, k, v, **lengths, **mods, **way, causal=True, device=arch)
                launched |= dict.fromkeys(launch.variant for launch in plan.launches)
            words = [name, dtype, f"d {dim}", *["packed"] * packed, *["on any GPU"] * generic]
            calls[", ".join(words)] = list(launched)
    return calls


# Cubins.


SECTION = struct.Struct("<IIQQQQIIQQ")  # name, type, flags, address, offset, size, link, info, alignment, entry size
SYMBOLS, STRINGS, NO_BITS = 2, 3, 8  # types of sections


def without_names(cubin: bytes) -> bytes:
    """Returns the sections of a cubin without symbol and string tables, which hold names of constants.

    Code, constants, registers and relocations remain; a section without bytes counts by its size.
    """
    offset, count, names = (struct.unpack_from(form, cubin, at)[0] for form, at in (("<Q", 40), ("<H", 60), ("<H", 62)))
    headers = [SECTION.unpack_from(cubin, offset + SECTION.size * number) for number in range(count)]
    parts = []
    for name, kind, _, _, begin, size, *_ in headers:
        start = headers[names][4] + name
        title = cubin[start : cubin.index(b"\0", start)]
        if kind in (SYMBOLS, STRINGS):
            continue
        parts.append(b"%s %d\0" % (title, size) + (b"" if kind == NO_BITS else cubin[begin : begin + size]))
    if not any(part.startswith(b".text.") for part in parts):
        raise RuntimeError("a cubin has no section of code")
    return b"".join(sorted(parts))


def digest_of(variant: Any, folder: Path) -> str:
    """Returns the SHA-256 of a kernel's cubin with `ONE_SYMBOL` and without names, or what is wrong with the kernel.

    A file keeps it, whose name is a digest of all that is compiled: options, NVRTC's version, text and included files.
    """
    from cupy.cuda import nvrtc

    options, text, files = (checks.inner("cuflash", name)(variant) for name in ("options", "program_text", "files_of"))
    root = checks.inner("cuflash", "source_root")()
    named = [ONE_SYMBOL if option.startswith(SYMBOL) else option for option in options]
    if named.count(ONE_SYMBOL) != 1:
        raise RuntimeError(f"not one of {options} begins with {SYMBOL}: put the option's new name here")
    key = hashlib.sha256(repr(("without names", named, nvrtc.getVersion(), text)).encode())
    for path in sorted(files):
        key.update(str(path.relative_to(root)).encode() + path.read_bytes())
    kept = folder / key.hexdigest()
    if kept.is_file() and re.fullmatch("[0-9a-f]{64}", digest := kept.read_text("utf-8")):
        return digest
    source = root / variant.source
    # A text that includes its source has a name of its own: NVRTC would take the program itself for the source.
    is_whole = text == source.read_text("utf-8")
    program = nvrtc.createProgram(text, source.name if is_whole else "with_mods.cu", (), ())
    try:
        nvrtc.compileProgram(program, (*named, f"-I{source.parent}"))
        digest = hashlib.sha256(without_names(nvrtc.getCUBIN(program))).hexdigest()
    except nvrtc.NVRTCError as error:
        lines = [line for line in nvrtc.getProgramLog(program).splitlines() if "error" in line]
        return f"{ERROR}{error}: {'; '.join(lines[:1])}"
    finally:
        nvrtc.destroyProgram(program)
    keep(kept, digest)
    return digest


def keep(file: Path, text: str) -> None:
    """Writes a file that other processes find whole or not at all."""
    written = file.with_name(f"{file.name}.{os.getpid()}")
    written.write_text(text, "utf-8")
    written.replace(file)


def digests_of_all(archs: list[str], folder: Path, text: str, is_older: bool) -> dict[str, str]:
    """Returns the digests of all kernels of this process's tree whose label holds this text, by label."""
    checks.inner("cuflash", "nvrtc_version")()  # In one thread: CuPy's first search for NVRTC is not safe in several.
    folder.mkdir(parents=True, exist_ok=True)
    kernels = plain_kernels(archs, is_older) | mod_kernels(archs, is_older)
    chosen = {label: variant for label, variant in kernels.items() if text in label}
    distinct = list(dict.fromkeys(chosen.values()))
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        digests = dict(zip(distinct, pool.map(lambda variant: digest_of(variant, folder), distinct), strict=True))
    return {label: digests[variant] for label, variant in chosen.items()}


def run_cubins(trees: list[Path], archs: list[str], folder: Path, text: str) -> dict[str, Any]:
    """Returns the digests of kernels that differ or do not compile, and None where a tree has no such kernel."""
    digests = []
    for number, tree in enumerate(trees):
        with checks.process(tree) as of_tree:
            digests.append(of_tree.submit(digests_of_all, archs, folder, text, number == 0).result())
    return paired(digests, lambda old, new: old != new or old.startswith(ERROR))


def paired(found: list[dict[str, Any]], differ: Any) -> dict[str, Any]:
    """Counts the kernels of both trees, and returns the pairs that differ and those of which one is missing."""
    labels = list(dict.fromkeys((*found[0], *found[1])))
    pairs = {label: [each.get(label) for each in found] for label in labels}
    return {"kernels": len(labels), "differ": {x: pair for x, pair in pairs.items() if None in pair or differ(*pair)}}


def without_partner(part: str, found: dict[str, Any]) -> Iterator[str]:
    """Yields a line for each kernel that one tree alone has, and one if there is no kernel at all."""
    if not found["kernels"]:
        yield f"{part}: no kernel was compared"
    for label, (old, new) in found["differ"].items():
        if old is None or new is None:
            yield f"{part}: {label} is in the {'newer' if old is None else 'older'} tree alone"


def cubin_failures(found: dict[str, Any]) -> Iterator[str]:
    """Yields a line for each kernel whose cubins differ, or which does not compile, or which has no partner."""
    yield from without_partner("cubins", found)
    for label, pair in found["differ"].items():
        if None not in pair:
            wrong = [
                f"the {when} one: {text}"
                for when, text in zip(("older", "newer"), pair, strict=True)
                if text.startswith(ERROR)
            ]
            yield f"cubins: {label}: " + ("; ".join(wrong) or "the cubins differ")
