"""Lists the kernels of two trees for `.ci/versus.py`, pairs them, and compares registers and cubins.

A kernel without score_mod, mask_mod, bias, sinks and dropout (*mods*) is paired by its name, after renaming old words
(`RENAMED`). Names of kernels with mods contain a digest of generated text, which changes with every renaming in it.
They are paired by the call that launches them, their op, and their index among the call's kernels of that op.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import math
import os
import re
import struct
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import chain, product, repeat
from pathlib import Path
from typing import Any

import numpy as np
import versus_checks as checks

ROOT = Path(__file__).resolve().parents[1]
# Words of kernel names in older trees, and their current names. A key may be several words with underscores.
RENAMED: dict[str, str] = {
    "backward_own": "backward_mods",
    "seen_counts": "tile_counts",
    "lengths": "varlen",
    "tells": "seqlens",
}
# Modules of tests/ or tests/support/ that list kernels by a function of the same name; newest name first.
PLAIN_LISTS = ("variants",)
MOD_LISTS = ("mod_variants", "own_variants")
# Calls with dropout: head dim, dtype, True if packed, and True if strides forbid sm90 kernels.
DROPOUT_SHAPES = (
    *((64, "float16", packed, generic) for packed in (False, True) for generic in (False, True)),
    *((dim, "float16", packed, False) for dim in (128, 256) for packed in (False, True)),
    (64, "float32", False, False),
)
SYMBOL = "-DCUFLASH_KERNEL="  # the option that gives a kernel its name
ONE_SYMBOL = f"{SYMBOL}cuflash_kernel"
ERROR = "error "  # prefix of an error text, which replaces the digest of a kernel that does not compile

Kernels = Iterator[tuple[str, Any]]  # labels and variants


def renamed(name: str, words: dict[str, str] = RENAMED) -> str:
    """Returns the current name of an older tree's kernel. Only the longest key that fits is replaced, once."""
    if not words:
        return name
    keys = "|".join(map(re.escape, sorted(words, key=len, reverse=True)))
    return re.sub(rf"(?<![^_])(?:{keys})(?![^_])", lambda match: words[match[0]], name)


# The kernels of a tree: in a process whose `cuflash` is the tree's.


def plain_kernels(archs: Iterable[str], is_older: bool) -> Kernels:
    """Yields all kernels without mods, by architecture and current name."""
    variants = list_of(PLAIN_LISTS)[1]
    for arch in archs:
        for variant in variants(arch):
            yield f"{arch} {renamed(variant.name) if is_older else variant.name}", variant


def mod_kernels(archs: Iterable[str], is_older: bool) -> Kernels:
    """Yields the kernels that calls with mods launch, by architecture, call, op and index."""
    lists, variants = list_of(MOD_LISTS)
    for arch in archs:
        names = product(lists.CALLS, (False, True))
        calls = {f"{name}{' on any GPU' * generic}": variants(arch, generic, (name,)) for name, generic in names}
        for call, launched in (calls | {"few queries": lists.few_variants(arch)} | dropout_calls(arch)).items():
            counts: Counter[str] = Counter()
            for variant in launched:
                op = renamed(variant.op) if is_older else variant.op
                yield f"{arch} {call}: {op} {counts[op]}", variant
                counts[op] += 1


def list_of(candidates: Iterable[str]) -> tuple[Any, Any]:
    """Imports the first of these modules that the tests of this process's tree have: the module and its function."""
    import cuflash

    tree = Path(str(cuflash.__file__)).resolve().parents[1]
    folders = [folder for folder in (tree / "tests" / "support", tree / "tests") if folder.is_dir()]
    ours = (ROOT, ROOT / "tests", ROOT / "tests" / "support")
    others = [folder for folder in sys.path if Path(folder or ".").resolve() not in ours]
    sys.path[:] = [str(tree), *map(str, folders), *others]
    for name in candidates:
        if any((folder / f"{name}.py").is_file() for folder in folders):
            module = importlib.import_module(name)
            files = [Path(file).resolve() for x in list(sys.modules.values()) if (file := getattr(x, "__file__", None))]
            for part in (ROOT / "cuflash", ROOT / "tests"):
                if tree != ROOT and (strange := [file for file in files if file.is_relative_to(part)]):
                    raise RuntimeError(f"{strange[0]} of the working tree was imported for {tree}")
            return module, getattr(module, name)
    raise RuntimeError(f"{tree}/tests has none of {candidates}: add today's name of the module here")


def dropout_calls(arch: str) -> dict[str, list[Any]]:
    """Returns the kernels of calls with dropout, which the tests' lists lack, by public names alone."""
    import cuflash

    heads, seqlen = 4, 300
    slopes, sinks = (np.linspace(0.05, 0.8, heads).astype(np.float32) for _ in range(2))
    bias = np.zeros((1, heads, 1, seqlen), np.float32)
    dropout: dict[str, Any] = {"dropout_p": 0.3, "dropout_seed": np.array(7, np.int64)}
    masks = {"mask_mod": cuflash.mods.document(np.array([0, 40, seqlen], np.int32))}
    everything = {"score_mod": cuflash.mods.alibi(slopes), **masks, "bias": bias, "sinks": sinks, **dropout}
    kinds = ("dropout", dropout, ()), ("all mods", everything, (slopes, bias, sinks))
    calls: dict[str, list[Any]] = {}
    for (dim, dtype, packed, generic), (name, mods, grads) in product(DROPOUT_SHAPES, kinds):
        shape = (2 * seqlen,) if packed else (2, seqlen)
        q, k, v = (np.zeros((*shape, count, dim), dtype) for count in (heads, 2, 2))
        q = q[::-1] if generic and packed else q[:, ::-1] if generic else q  # sm90 kernels cannot read this
        lengths: dict[str, Any] = {}
        if packed:
            lengths = dict.fromkeys(("cu_seqlens_q", "cu_seqlens_k"), np.array([0, seqlen, 2 * seqlen], np.int32))
            lengths |= dict.fromkeys(("max_seqlen_q", "max_seqlen_k"), seqlen)
        backward = {"op": "backward", "captured_grads": grads}
        launched: dict[Any, None] = {}
        for way in ({"op": "forward"}, backward, {**backward, "deterministic": True}):
            plan = cuflash.plan(q, k, v, **lengths, **mods, **way, causal=True, device=arch)
            launched |= dict.fromkeys(launch.variant for launch in plan.launches)
        words = [name, dtype, f"d {dim}", *["packed"] * packed, *["on any GPU"] * generic]
        calls[", ".join(words)] = list(launched)
    return calls


# Figures and digests of kernels: computed in a process for each tree.


def run(part: str, trees: list[Path], archs: list[str], folder: Path, text: str) -> dict[str, Any]:
    """Counts kernels of both trees, and returns pairs that differ or do not compile, with None where one is missing."""
    of_one, lists = (figures_of, (plain_kernels,)) if part == "registers" else (digest_of, (plain_kernels, mod_kernels))
    by_tree = []
    for is_older, tree in zip((True, False), trees, strict=True):
        with checks.process(tree) as of_tree:
            by_tree.append(of_tree.submit(of_all, is_older, of_one, lists, archs, folder, text).result())
    pairs = {label: [each.get(label) for each in by_tree] for label in dict.fromkeys((*by_tree[0], *by_tree[1]))}
    differ = {label: pair for label, pair in pairs.items() if pair[0] != pair[1] or str(pair[0]).startswith(ERROR)}
    return {"kernels": len(pairs), "differ": differ}


def of_all(is_older: bool, of_one: Any, lists: Any, archs: list[str], folder: Path, text: str) -> dict[str, Any]:
    """Returns `of_one` of all listed kernels of this process's tree whose label contains the text."""
    checks.inner("cuflash", "nvrtc_version")()  # In one thread: CuPy's first search for NVRTC is not safe in several.
    folder.mkdir(parents=True, exist_ok=True)
    chosen: dict[str, Any] = {}
    for label, variant in chain.from_iterable(kernels(archs, is_older) for kernels in lists):
        if text in label and chosen.setdefault(label, variant) is not variant:
            raise RuntimeError(f"two kernels are {label!r}: give them different labels")
    distinct = list(dict.fromkeys(chosen.values()))
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        results = dict(zip(distinct, pool.map(of_one, distinct, repeat(folder)), strict=True))
    return {label: results[variant] for label, variant in chosen.items()}


def cached(file: Path, make: Callable[[], str]) -> str:
    """Returns the text of a file, or of `make`, which is then written to the file atomically unless it is an error."""
    if file.is_file():
        return file.read_text("utf-8")
    text = make()
    if not text.startswith(ERROR):
        written = file.with_name(f"{file.name}.{os.getpid()}")
        written.write_text(text, "utf-8")
        written.replace(file)
    return text


def failures(part: str, result: dict[str, Any]) -> Iterator[str]:
    """Yields a line for each kernel that got worse or that one tree lacks, and one if there are no kernels."""
    if not result["kernels"]:
        yield f"{part}: no kernel was compared"
    for label, (old, new) in result["differ"].items():
        if old is None or new is None:
            yield f"{part}: {label} is in the {'newer' if old is None else 'older'} tree alone"
        elif texts := list((worse_cubin if part == "cubins" else worse_figures)(old, new)):
            yield f"{part}: {label}: {'; '.join(texts)}"


# Registers.

# Warps, blocks and KiB of shared memory of an SM. Source: CUDA C++ Programming Guide, "Compute Capabilities".
LIMITS = {"sm_80": (64, 32, 164), "sm_86": (48, 16, 100), "sm_89": (48, 24, 100), "sm_90": (64, 32, 228)}
LIMITS |= {"sm_100": (64, 32, 228), "sm_120": (48, 24, 100)}


def resident_blocks(arch: str, registers: int, threads: int, shared: int) -> int:
    """Returns the number of blocks that fit an SM. Registers are allocated to four warps, in units of 256 a warp."""
    warps, blocks, kib = LIMITS[arch.rstrip("a")]
    of_block = -(-threads // 128) * 4
    by_registers = 65536 // (-(-registers * 32 // 256) * 256) // 4 * 4 // of_block
    by_shared = kib * 1024 // (-(-(shared + 1024) // 128) * 128)  # The system takes 1 KiB for each block.
    return min(blocks, warps // of_block, by_registers, by_shared)


def figures_of(variant: Any, folder: Path) -> dict[str, Any]:
    """Returns the figures of a kernel, cached in a file named by a digest of everything that they depend on."""
    options, version = checks.inner("cuflash", "options")(variant), checks.inner("cuflash", "nvrtc_version")()
    digest = hashlib.sha256(repr((options, version, variant.smem_bytes, variant.num_threads)).encode())
    for path in checks.inner("cuflash", "included_files")(checks.inner("cuflash", "source_root")() / variant.source):
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    text = cached(folder / f"{digest.hexdigest()}.json", partial(compiled_figures, variant))
    return {"error": text.removeprefix(ERROR)} if text.startswith(ERROR) else dict(json.loads(text))


def compiled_figures(variant: Any) -> str:
    """Returns the figures of a kernel as JSON, or the error of its compilation."""
    try:
        log = checks.inner("cuflash", "compile_variant")(variant)[1]
    except Exception as error:
        return f"{ERROR}{error}"
    registers = max(map(int, re.findall(r"Used (\d+) registers", log)))
    frames = re.findall(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", log)
    stack, stores, loads = (max(map(int, figures)) for figures in zip(*frames, strict=True))
    shared = variant.smem_bytes + max(map(int, re.findall(r"(\d+) bytes smem", log)), default=0)
    figures = {"registers": registers, "spill": stores + loads, "stack": stack, "shared": shared}
    return json.dumps(figures | {"blocks": resident_blocks(variant.arch, registers, variant.num_threads, shared)})


def worse_figures(before: dict[str, Any], after: dict[str, Any]) -> Iterator[str]:
    """Yields a text for each figure of a kernel that got worse."""
    if "error" in after and "error" not in before:
        yield f"does not compile: {after['error']}"
    if after.get("spill", 0) > before.get("spill", 0):
        yield f"spills {after['spill']} bytes, before {before.get('spill', 0)}"
    if after.get("blocks", math.inf) < before.get("blocks", 0):
        yield f"fits {after['blocks']} times, before {before['blocks']}"


# Cubins.


SECTION = struct.Struct("<IIQQQQIIQQ")  # name, type, flags, address, offset, size, link, info, alignment, entry size
SYMBOLS, STRINGS, NO_BITS = 2, 3, 8  # types of sections


def without_names(cubin: bytes) -> bytes:
    """Returns the sections of a cubin without symbol and string tables, which hold names of constants.

    Code, constants, registers and relocations remain; a section without bytes counts by its size.
    """
    offset, count, names = struct.unpack_from("<Q12xHH", cubin, 40)
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
    """Returns the SHA-256 of a kernel's cubin with `ONE_SYMBOL` and without names, or the error of its compilation.

    It is cached in a file named by a digest of options, NVRTC's version, text and included files.
    """
    options, text, files = (checks.inner("cuflash", name)(variant) for name in ("options", "program_text", "files_of"))
    root = checks.inner("cuflash", "source_root")()
    named = [ONE_SYMBOL if option.startswith(SYMBOL) else option for option in options]
    if named.count(ONE_SYMBOL) != 1:
        raise RuntimeError(f"not one of {options} begins with {SYMBOL}: put the option's new name here")
    key = hashlib.sha256(repr(("without names", named, checks.inner("cuflash", "nvrtc_version")(), text)).encode())
    for path in sorted(files):
        key.update(str(path.relative_to(root)).encode() + path.read_bytes())
    return cached(folder / key.hexdigest(), partial(compiled_digest, root / variant.source, text, named))


def compiled_digest(source: Path, text: str, options: list[str]) -> str:
    """Returns the digest of a program's cubin, or the error of its compilation."""
    from cupy.cuda import nvrtc

    # A text that includes its source needs another name: NVRTC would include the program itself.
    is_whole = text == source.read_text("utf-8")
    program = nvrtc.createProgram(text, source.name if is_whole else "with_mods.cu", (), ())
    try:
        nvrtc.compileProgram(program, (*options, f"-I{source.parent}"))
        return hashlib.sha256(without_names(nvrtc.getCUBIN(program))).hexdigest()
    except nvrtc.NVRTCError as error:
        lines = [line for line in nvrtc.getProgramLog(program).splitlines() if "error" in line]
        return f"{ERROR}{error}: {'; '.join(lines[:1])}"
    finally:
        nvrtc.destroyProgram(program)


def worse_cubin(before: str, after: str) -> Iterator[str]:
    """Yields an error for each cubin that does not compile, or else that the cubins differ."""
    texts = {"the older one": before, "the newer one": after}
    wrong = [f"{which}: {text}" for which, text in texts.items() if text.startswith(ERROR)]
    yield from wrong or ["the cubins differ"]
