"""Comparison of two versions' outputs on random problems, and their import, for `.ci/versus.py`."""

from __future__ import annotations

import contextlib
import importlib
import itertools
import math
import multiprocessing
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np

Array = np.ndarray[Any, Any]
Shape = tuple[int, int, int, int]


def inner(package: str, *names: str) -> Any:
    """Returns a function of the compiling module by its name in any version. No other internals are read."""
    for module, name in itertools.product(("jit", "runtime.compiler", "runtime.cache", "runtime.disk_cache"), names):
        with contextlib.suppress(ModuleNotFoundError):
            if function := getattr(importlib.import_module(f"{package}.{module}"), name, None):
                return function
    raise RuntimeError(f"{package} has no {' or '.join(names)} where its compiler is looked for: add the module here")


def compile_ahead(versions: list[ModuleType], trials: Iterable[Trial]) -> None:
    """Compiles the kernels of problems on all cores. Errors are ignored, as the calls raise them again."""
    for version in versions:
        variants: dict[Any, None] = {}
        for trial in trials:
            with contextlib.suppress(Exception):
                variants |= dict.fromkeys(launch.variant for plan in trial.plans(version) for launch in plan.launches)
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            for variant in variants:
                pool.submit(inner(version.__name__, "cubin", "cubin_path"), variant)


def process(tree: Path) -> ProcessPoolExecutor:
    """Starts a process that imports this tree's `cuflash`. Some names can be registered once in a process only."""
    return ProcessPoolExecutor(1, multiprocessing.get_context("spawn"), prefer, (str(tree),))


def prefer(folder: str) -> None:
    """Imports `cuflash` from this folder."""
    sys.path.insert(0, folder)
    import cuflash

    assert Path(str(cuflash.__file__)).resolve().parents[1] == Path(folder).resolve(), cuflash.__file__


# Outputs.

HEAD_DIMS = (64, 128, 256, 64, 128, 256, 32, 40, 80, 96, 160, 192)
# Lengths with which the last tile of some kernel is whole, or has one row, or lacks one.
SEQLENS = (0, 1, 2, 15, 16, 17, 63, 64, 65, 127, 128, 129, 191, 192, 193, 255, 256, 257, 383, 384, 385, 512, 640, 641)
MAX_SEQLEN = 700
# By layout: the shape of the memory, and the view of the array in it.
LAYOUTS: dict[str, tuple[Callable[..., tuple[int, ...]], Callable[[Any, Shape], Any]]] = {
    "dense": (lambda b, s, h, d: (b, s, h, d), lambda memory, shape: memory),
    "heads first": (lambda b, s, h, d: (b, h, s, d), lambda memory, shape: memory.transpose(0, 2, 1, 3)),
    "wide rows": (lambda b, s, h, d: (b, s, h, d + 8), lambda memory, shape: memory[..., : shape[3]]),
    "odd rows": (lambda b, s, h, d: (b, s, h, d + 1), lambda memory, shape: memory[..., 1:]),
    "unaligned": (lambda b, s, h, d: (b * s * h * d + 1,), lambda memory, shape: memory[1:].reshape(shape)),
    "gaps": (lambda b, s, h, d: (b, s, h, 2 * d), lambda memory, shape: memory[..., ::2]),
    "backwards": (lambda b, s, h, d: (b, s, h, d), lambda memory, shape: memory[:, ::-1]),
}
# One unit in the last place of 1; more for float32, whose sums may run in another order.
EPS = {"bfloat16": 2.0**-7, "float16": 2.0**-10, "float32": 2.0**-17}
ERROR_RATIO = 1.05  # most growth of an error, where bits may differ
NOISE = 1e-2  # Smaller results are rounding errors, as the inputs are about 1.


class Trial(NamedTuple):
    """A problem. `seed` determines a random one, and the values of its arrays."""

    op: str  # "forward", "lse" or "backward"
    dtype: str
    batch: int
    seqlens: tuple[int, int]
    heads: tuple[int, int]
    dims: tuple[int, int]
    arguments: dict[str, Any]  # the mask, the scale and the softcap
    deterministic: bool = False
    with_dlse: bool = False
    gives_out: bool = False  # True if forward writes to the caller's array, which holds NaN before
    algorithm: str = "flash2"
    out_dtype: str | None = None
    layouts: dict[str, str] = {}  # layouts of arrays that are not dense  # noqa: RUF012
    seed: int = 0

    @classmethod
    def drawn(cls, seed: int) -> Trial:
        """Returns the random problem of a seed."""
        from cuflash.testing.draw import Draw

        draw = Draw(seed)
        rng, pick, often = draw.random, draw.one_of, draw.chance
        op = pick("forward", "forward", "forward", "lse", "backward", "backward", "backward")
        dtype = pick("bfloat16", "bfloat16", "float16", "float16", "float32")
        seqlens = tuple(pick(*SEQLENS) if often(0.5) else int(rng.integers(MAX_SEQLEN + 1)) for _ in range(2))
        d, dv = (pick(*HEAD_DIMS) if often(0.7) else int(rng.integers(1, 257)) for _ in range(2))
        heads_kv = pick(1, 1, 2, 3)
        heads = heads_kv * (pick(1, 1, 2, 4, 7) if heads_kv == 1 else pick(1, 2)), heads_kv
        window = tuple(pick(-1, 0, int(rng.integers(40)), int(rng.integers(400))) for _ in range(2))
        arguments = {
            "causal": often(0.5),
            "window_size": window if often(0.3) else (-1, -1),
            # Large offsets leave some rows, or all, without a key.
            "diagonal_offset": pick(None, None, None, 0, int(rng.integers(-300, 300)), -1000, 1000),
            "softmax_scale": pick(None, None, 0.31, 1.0),
            "softcap": pick(1.5, 15.0, 30.0) if often(0.2) else 0.0,
        }
        layouts = {name: "dense" if often(0.5) else pick(*LAYOUTS) for name in ("q", "k", "v", "dout", "out")}
        algorithm = pick("flash2", "flash2", "flash2", "flash1", "flashd")
        out_dtype = "float32" if often(0.15) and dtype != "float32" and op == "forward" else None
        shape = pick(1, 1, 1, 2, 2, 3), seqlens, heads, (d, pick(d, d, dv))
        # No given out with softcap: its results are compared with exact ones, which have no memory around them.
        flags = often(0.5), often(0.5), often(0.5) and op == "forward" and not arguments["softcap"]
        return cls(op, dtype, *shape, arguments, *flags, algorithm, out_dtype, layouts, seed)

    @property
    def shapes(self) -> dict[str, Shape]:
        """The shapes of q, k, v, out and dout."""
        q, k = ((self.batch, n, h, self.dims[0]) for n, h in zip(self.seqlens, self.heads, strict=True))
        out = (*q[:3], self.dims[1])
        return {"q": q, "k": k, "v": (*k[:3], self.dims[1]), "out": out, "dout": out}

    @property
    def keywords(self) -> dict[str, Any]:
        """The keyword arguments of the op, except arrays."""
        more = {"forward": {"algorithm": self.algorithm, "out_dtype": self.out_dtype}}
        more["backward"] = {"deterministic": self.deterministic}
        return self.arguments | more.get(self.op, {})

    def plans(self, package: ModuleType) -> Iterator[Any]:
        """Yields the plans of the calls on the first GPU."""
        # A plan has strides but no addresses. Odd rows stand in for unaligned arrays, as the same kernels take both;
        # dense arrays stand in for arrays with gaps, as a call copies these.
        stand_in = {"gaps": "dense", "unaligned": "odd rows"}
        layouts = {name: stand_in.get(layout, layout) for name, layout in self.layouts.items()}
        arrays = [self.array(x, np.empty, layouts.get(x, "dense"))[1] for x in ("qk" if self.op == "lse" else "qkv")]
        if self.op == "backward":
            yield package.plan(*arrays, device="cuda:0", **self.arguments)
        yield package.plan(*arrays, op=self.op, device="cuda:0", **self.keywords)

    def array(self, name: str, make: Callable[..., Array], layout: str) -> tuple[Array, Array]:
        """Returns memory from `make`, and the array of this name and layout within it."""
        shape, dtype = self.shapes[name], self.out_dtype if name == "out" else None
        memory = make(LAYOUTS[layout][0](*shape), dtype=numpy_dtype(dtype or self.dtype))
        return memory, LAYOUTS[layout][1](memory, shape)

    def keeps_an_order(self, package: ModuleType) -> bool:
        """Returns True if the GPU sums in a fixed order; gradients: deterministic, or of a kernel for each."""
        if self.deterministic or self.op != "backward":
            return True
        *_, plan = self.plans(package)
        suits_hopper = self.layouts.get("dout") not in ("odd rows", "unaligned", "backwards")
        return suits_hopper and plan.launches[-1].variant.source.endswith("backward_dq_dkv.cu")


def numpy_dtype(name: str) -> np.dtype[Any]:
    """Returns the NumPy dtype of a name. Importing ml_dtypes registers bfloat16."""
    importlib.import_module("ml_dtypes")
    return np.dtype(name)


nans = partial(np.full, fill_value=np.nan)  # returns an array of NaN


class Inputs:
    """The arrays of a problem: `host` has their values, and `inputs` the arrays that both versions take."""

    def __init__(self, trial: Trial, before: ModuleType, on_gpu: bool) -> None:
        self.trial, self.put, self.get = trial, np.array, np.array
        if on_gpu:
            import cupy

            self.put, self.get = cupy.asarray, cupy.asnumpy
        rng = np.random.default_rng((trial.seed, 1))
        self.host: dict[str, Array] = {}
        self.inputs: dict[str, Any] = {}
        for name in {"lse": ("q", "k"), "forward": ("q", "k", "v"), "backward": ("q", "k", "v", "dout")}[trial.op]:
            memory, array = trial.array(name, nans, trial.layouts[name])
            array[...] = rng.standard_normal(array.shape, dtype=np.float32).astype(array.dtype)
            self.host[name], self.inputs[name] = array, LAYOUTS[trial.layouts[name]][1](self.put(memory), array.shape)
        if trial.op == "backward":
            if trial.with_dlse:
                shape = trial.batch, trial.heads[0], trial.seqlens[0]
                self.host["dlse"] = rng.standard_normal(shape, dtype=np.float32)
                self.inputs["dlse"] = self.put(self.host["dlse"])
            # Both versions get the older version's out and lse, so that a change of forward shows in forward alone.
            state = before.forward(*(self.inputs[name] for name in "qkv"), return_lse=True, **trial.arguments)
            self.inputs["out"], self.inputs["lse"] = state

    def call(self, package: ModuleType) -> dict[str, Any] | Exception:
        """Returns the results of one version by name, or its error. A given `out` includes the memory around it."""
        trial, inputs, keywords = self.trial, self.inputs, self.trial.keywords
        q, k, v = (inputs.get(name) for name in "qkv")
        try:
            if trial.op == "lse":
                return {"lse": package.lse(q, k, **keywords)}
            if trial.op == "backward":
                arrays = inputs["dout"], q, k, v, inputs["out"], inputs["lse"]
                gradients = package.backward(*arrays, dlse=inputs.get("dlse"), **keywords)
                return dict(zip(("dq", "dk", "dv"), gradients, strict=True))
            if trial.gives_out:
                layout = trial.layouts["out"]
                memory = self.put(trial.array("out", nans, layout)[0])
                keywords["out"] = LAYOUTS[layout][1](memory, trial.shapes["out"])
            out, lse = package.forward(q, k, v, return_lse=True, **keywords)
            return {"out": memory if trial.gives_out else out, "lse": lse}
        except Exception as error:
            return error


def run_outputs(versions: list[ModuleType], trials: Iterable[Trial], on_gpu: bool) -> dict[str, Any]:
    """Counts the problems of each op that are "equal", "close" (within a tolerance), "refused" by both, "different"."""
    counts: dict[str, Counter[str]] = {}
    differences = []
    for trial in trials:
        try:
            verdict, text = validate(trial, versions, on_gpu)
        except Exception as error:  # The other problems are still compared.
            verdict, text = "different", f"no comparison: {error!r}"
        counts.setdefault(trial.op, Counter())[verdict] += 1
        if verdict == "different":
            differences.append({"seed": trial.seed, "problem": str(trial), "difference": text})
            print(f"DIFFERENT (--parts outputs --problems 1 --seed {trial.seed}): {text}\n  {trial}", flush=True)
    return {"on_gpu": on_gpu, "counts": counts, "differences": differences}


def validate(trial: Trial, versions: list[ModuleType], on_gpu: bool) -> tuple[str, str]:
    """Returns the verdict on one problem, and a text about the differences."""
    inputs = Inputs(trial, versions[0], on_gpu)
    # The older version's results stay in memory until the newer version has run. Otherwise newer results could reuse
    # that memory, and an element that they skip would have the right value.
    before, after = (inputs.call(package) for package in versions)
    if isinstance(before, Exception) or isinstance(after, Exception):
        kinds = {type(before).__name__, type(after).__name__}
        refused = len(kinds) == 1 and kinds <= {"ProblemError", "UnsupportedError"}
        outcomes = [repr(outcome) if isinstance(outcome, Exception) else "a result" for outcome in (before, after)]
        return ("refused", "") if refused else ("different", f"before: {outcomes[0]}; after: {outcomes[1]}")
    old, new = ({name: inputs.get(array) for name, array in results.items()} for results in (before, after))
    unequal = [name for name in old if not same_bits(old[name], new[name])]
    exact: dict[str, Array] = {}
    if unequal and trial.arguments["softcap"] > 0.0:
        exact = attention64(trial, inputs.host)
    elif unequal and on_gpu and not trial.keeps_an_order(versions[0]):
        exact = {name: array.astype(np.float64) for name, array in old.items()}
    texts = {name: difference(old[name], new[name], exact.get(name)) for name in unequal}
    worse = "; ".join(f"{name}: {text}" for name, text in texts.items() if text)
    return ("different", worse) if worse else ("close" if unequal else "equal", "")


def same_bits(old: Array, new: Array) -> bool:
    """Returns True if two arrays are equal, including the bits of NaN and of zero."""
    return (old.shape, old.dtype) == (new.shape, new.dtype) and np.array_equal(bits(old), bits(new))


def bits(array: Array) -> Array:
    """Returns a view of the elements as integers."""
    return np.ascontiguousarray(array).view(f"u{array.dtype.itemsize}")


def difference(old: Array, new: Array, exact: Array | None) -> str:
    """Returns a text about the difference, "" for none. With `exact`, the new result may differ if it is as exact."""
    if (old.shape, old.dtype) != (new.shape, new.dtype):
        return f"{old.dtype}{old.shape} before, {new.dtype}{new.shape} after"
    odd = [np.where(np.isfinite(x), 0.0, x) for x in (old.astype(np.float64), new.astype(np.float64))]
    if exact is None or not np.array_equal(*odd, equal_nan=True):
        differ = np.argwhere(bits(old) != bits(new))
        first = tuple(map(int, differ[0]))
        return f"{len(differ)} of {old.size} elements, the first at {first}: {old[first]} before, {new[first]} after"
    floor = EPS[old.dtype.name] / 16
    both = zip(("norm", "largest"), errors(old, exact), errors(new, exact), (floor, 8 * floor), strict=True)
    worse = [(kind, a, b) for kind, a, b, room in both if b > ERROR_RATIO * a + room]
    return ", ".join(f"{kind} of the error {a:.3e} before, {b:.3e} after" for kind, a, b in worse)


def errors(result: Array, exact: Array) -> tuple[float, float]:
    """Returns the norm and the largest element of the error, relative to the exact result, where both are finite."""
    finite = np.isfinite(exact) & np.isfinite(result.astype(np.float64))
    result, exact = (np.where(finite, x.astype(np.float64), 0.0) for x in (result, exact))
    off, size = result - exact, NOISE * math.sqrt(max(exact.size, 1))
    largest = np.abs(off).max(initial=0.0) / np.abs(exact).max(initial=NOISE)
    return float(np.linalg.norm(off) / max(np.linalg.norm(exact), size)), float(largest)


def attention64(trial: Trial, host: dict[str, Array]) -> dict[str, Array]:
    """Returns the results of a problem in float64, by the oracle of the tests."""
    from cuflash.testing import oracle

    q, k, v = (trial.shapes[name] for name in "qkv")
    case = oracle.Case("", *(q[0], q[1], k[1], q[2], k[2], q[3], v[3]), trial.dtype, **trial.arguments)
    if "dout" in host:
        gradients = oracle.gradients64(case, host["dout"], *(host[name] for name in "qkv"), host.get("dlse"))
        return dict(zip(("dq", "dk", "dv"), gradients, strict=True))
    v = host["v"] if "v" in host else np.zeros(trial.shapes["v"])
    out, lse = oracle.attention64(case, host["q"], host["k"], v)
    return {"out": out, "lse": lse}
