"""The seam of array libraries: a new library is one file and one line, and other modules name no library."""

from __future__ import annotations

import ast
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from drivers import Array, Gpus
from libraries import cupy_of
from workers import ROOT

import cuflash
from cuflash import arrays as adapters
from cuflash.arrays import find
from cuflash.arrays.library import Library
from cuflash.arrays.packages import PACKAGES
from cuflash.errors import ProblemError, UnsupportedError
from cuflash.problem.array_spec import ArraySpec

PACKAGE = '''
"""An array library that cuflash knows by its adapter alone: its arrays have neither DLPack nor NumPy's protocols."""
import numpy as np
class Array:
    def __init__(self, values):
        self.values = values
    shape = property(lambda self: self.values.shape)
    dtype = property(lambda self: self.values.dtype)
    def __getitem__(self, index):
        return Array(self.values[index])
    def __floordiv__(self, divisor):
        return Array(self.values // divisor)
    def reshape(self, *shape):
        return Array(self.values.reshape(*shape))
    def swapaxes(self, *axes):
        return Array(self.values.swapaxes(*axes))
def tanh(array):
    raise TypeError("takes arrays alone")
'''
ADAPTER = '''
"""Its adapter."""
from functools import cache
from .library import Library, element_strides
from ..problem.array_spec import ArraySpec
class FancyLibrary(Library):
    name = "fancy"
    def on_gpu(self, array):
        return False
    def spec(self, name, array):
        return ArraySpec(array.shape, element_strides(array.values), array.dtype.name, "cpu", self.name)
    def to_numpy(self, array):
        return array.values
    def from_numpy(self, array, like):
        return type(like)(array)
library = cache(FancyLibrary)
'''


@pytest.fixture
def fancy(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """Yields the package of a new array library, whose adapter is one file of arrays/, registered by one line."""
    for folder, text in (("packages", PACKAGE), ("arrays", ADAPTER)):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "fancy.py").write_text(text, "utf-8")
    monkeypatch.setattr(adapters, "__path__", [*adapters.__path__, str(tmp_path / "arrays")])
    monkeypatch.syspath_prepend(tmp_path / "packages")
    monkeypatch.setitem(PACKAGES, "fancy", "Array")
    monkeypatch.setattr(find, "_libraries", dict(find._libraries))
    monkeypatch.setattr(find, "_singletons", dict(find._singletons))
    yield import_module("fancy")
    for name in ("fancy", "cuflash.arrays.fancy"):
        sys.modules.pop(name, None)


def test_a_library_of_one_file_and_one_line_takes_part_in_every_call(fancy: Any) -> None:
    """Calls forward, lse, backward, mods with the library's functions, dropout, caches, varlen and triangles."""
    rng = np.random.default_rng(0)
    q, k, v, dout = (rng.standard_normal((2, 9, 2, 8)).astype("f4") for _ in range(4))
    slopes, used = np.array([0.5, 0.25], "f4"), np.array([4, 7], "i4")
    bias = rng.standard_normal((2, 9, 9)).astype("f4")
    pairs, pair_bias = rng.standard_normal((2, 3, 2, 9, 8)).astype("f4"), rng.standard_normal((2, 2, 9, 9)).astype("f4")
    shown = rng.random((2, 3, 9)) < 0.7

    def calls(as_array: Any, tanh: Any) -> list[Any]:
        x, y, z, upstream, table, added, lengths = map(as_array, (q, k, v, dout, slopes, bias, used))
        out, lse = cuflash.forward(x, y, z, causal=True, return_lse=True)
        functions = {
            "score_mod": lambda s, b, h, i, j: tanh(s) - table[h] * abs(i - j),
            "mask_mod": lambda b, h, i, j: (i + j) % 3 > 0,
            "bias": added,
        }
        states = cuflash.forward(x, y, z, return_lse=True, **functions)
        caches = [as_array(np.zeros((2, 20, 2, 8), "f4")) for _ in range(2)]
        cuflash.append_kv(*caches, y, z, lengths)
        target = as_array(np.empty_like(q))
        assert cuflash.forward(x, y, z, out=target) is target
        mask = cuflash.create_block_mask(functions["mask_mod"], 1, 1, 9, 9, like=x)
        *gradients, of_arrays = cuflash.backward(upstream, x, y, z, *states, captured_grads=(table, added), **functions)
        packed = [as_array(np.concatenate(each)) for each in (q, k, v)]
        offsets = as_array(np.array([0, 9, 18], "i4"))
        return [
            out, lse, *states, *caches, target, cuflash.lse(x, y, softcap=2.0),
            *cuflash.backward(upstream, x, y, z, out, lse, causal=True),
            *gradients, *of_arrays,
            cuflash.forward(x, y, z, dropout_p=0.5, dropout_seed=2**63 + 5),
            cuflash.forward(x, y, z, block_mask=mask),
            cuflash.forward(x, *caches, seqused_k=lengths),
            cuflash.forward(*packed, cu_seqlens_q=offsets, cu_seqlens_k=offsets),
            *cuflash.merge_states([out, out], [lse, lse]),
            cuflash.triangle_attention(*[as_array(pairs)] * 3, as_array(pair_bias), as_array(shown)),
        ]  # fmt: skip

    results, expected = calls(fancy.Array, fancy.tanh), calls(np.asarray, np.tanh)
    assert {type(x) for x in results} == {fancy.Array}
    for result, like in zip(results, expected, strict=True):
        np.testing.assert_array_equal(result.values, like)
    spec = cuflash.plan(*map(fancy.Array, (q, k, v))).problem.specs[0]
    assert spec is not None
    assert (spec.library, spec.device) == ("fancy", "cpu")
    with pytest.raises(ProblemError, match="k is a numpy array, but q is a fancy array"):
        cuflash.forward(fancy.Array(q), k, fancy.Array(v))


class Handle:
    """A GPU array of a library that reaches kernels only through CuPy."""

    def __init__(self, array: Any) -> None:
        self.array = array


class Crossing(Library):
    """A GPU library that is neither a GpuLibrary nor a DLPack producer."""

    name = "crossing"

    def on_gpu(self, array: Any) -> bool:
        return True

    def spec(self, name: str, array: Any) -> ArraySpec:
        return find.library_of(name, array.array).spec(name, array.array)._replace(library=self.name)

    def to_cupy(self, array: Any) -> Any:
        return array.array

    def from_cupy(self, array: Any) -> Any:
        return Handle(array)


class ReadOnly(Crossing):
    def check_writable(self, name: str, array: Any, otherwise: str = "") -> None:
        raise ProblemError(f"{name} cannot be written to{otherwise}")


class OnTheCpuAlone(Crossing):
    to_cupy = Library.to_cupy


def test_arrays_of_other_libraries_on_a_gpu_cross_over_to_cupy_and_back(monkeypatch: pytest.MonkeyPatch) -> None:
    gpus = Gpus(monkeypatch)  # its arrays replace CuPy's
    monkeypatch.setitem(find._libraries, Handle, Crossing())
    q, k, v, target = (Handle(Array.contiguous((2, 300, 4, 64), 2**30 * n)) for n in range(1, 5))
    out, lse = cuflash.forward(q, k, v, return_lse=True)
    assert (type(out), type(lse)) == (Handle, Handle)
    assert (out.array.shape, lse.array.dtype) == ((2, 300, 4, 64), "float32")
    assert cuflash.forward(q, k, v, out=target) is target
    cuflash.forward(*(x.array for x in (q, k, v)), out=target.array)
    assert gpus.launched[-1] == gpus.launched[-2] != gpus.launched[-3]
    dq, dk, dv = Handle(Array.contiguous((2, 300, 4, 64), 2**41)), None, None
    grads = cuflash.backward(out, q, k, v, out, lse, grads_out=(dq, dk, dv))
    assert grads[0] is dq
    assert {type(x) for x in grads} == {Handle}
    caches = [Handle(Array.contiguous((2, 900, 4, 64), 2**42 * n)) for n in (1, 2)]
    lengths = Handle(Array.contiguous((2,), 2**45, "int32"))
    cuflash.append_kv(*caches, k, v, lengths)
    count = len(gpus.launched)
    monkeypatch.setitem(find._libraries, Handle, ReadOnly())
    for call in (
        lambda: cuflash.forward(q, k, v, out=target),
        lambda: cuflash.backward(out, q, k, v, out, lse, grads_out=(dq, None, None)),
        lambda: cuflash.append_kv(*caches, k, v, lengths),
    ):
        with pytest.raises(ProblemError, match=r"^(out|dq|k_cache) cannot be written to"):
            call()
    monkeypatch.setitem(find._libraries, Handle, OnTheCpuAlone())
    with pytest.raises(UnsupportedError, match="crossing arrays on a GPU are not supported; move them to the CPU"):
        cuflash.forward(q, k, v)
    assert len(gpus.launched) == count


@pytest.mark.gpu
def test_results_of_arrays_that_cross_over_are_those_of_cupy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(find._libraries, Handle, Crossing())
    rng = np.random.default_rng(0)
    q, k, v = (cupy_of(rng.standard_normal((2, 70, 4, 64)).astype("f2")) for _ in range(3))
    handles = [Handle(x) for x in (q, k, v)]
    target = Handle(q + 0)
    states, expected = (cuflash.forward(*x, causal=True, return_lse=True) for x in (handles, (q, k, v)))
    assert cuflash.forward(*handles, causal=True, out=target) is target
    grads = cuflash.backward(states[0], *handles, *states, causal=True, deterministic=True)
    expected_grads = cuflash.backward(expected[0], q, k, v, *expected, causal=True, deterministic=True)
    pairs = zip((*states, target, *grads), (*expected, expected[0], *expected_grads), strict=True)
    assert all(bool((x.array == y).all()) for x, y in pairs)
    assert cuflash.plan(*handles).kernel == cuflash.plan(q, k, v).kernel


# Layers that handle array libraries, and modules that name one for another reason.
KNOWING = ("arrays", "frameworks", "testing", "tools")
BINDING = {"cupy"}  # CuPy as the binding of CUDA: the driver, NVRTC, modules, launches, memory
ALLOWED = {
    **dict.fromkeys(("runtime/compiler", "runtime/driver", "runtime/structs", "runtime/device_memory",
                     "planning/device"), BINDING),
    # Functions of libraries with one name and two meanings.
    "mods/tracing/functions": {"jax", "numpy"},
    "mods/tracing/jaxpr": {"jax", "jaxlib"},
    "mods/tracing/stand_ins": {"jax"},
    "mods/tracing/tracers": {"torch", "numpy"},
    "mods/tracing/capture": {"torch"},
    # Context parallelism is that of torch.distributed and of JAX.
    **{f"distributed/{name}": {"torch"} for name in ("assembly", "calls", "exchange", "gather", "ops", "regions")},
    **{f"distributed/{name}": {"torch"} for name in ("permutation", "ring", "scheme", "torch", "ulysses")},
    "distributed/__init__": {"torch"}, "distributed/layout": {"torch"},
    **{f"distributed/jax/{name}": {"jax"} for name in ("__init__", "call", "gather", "ring", "ulysses")},
    "problem/array_spec": {"numpy"},  # default of a spec without an array
}  # fmt: skip


def named_in(path: Path) -> set[str]:
    """Returns the array libraries that a file imports (except NumPy), or names in a string or as an adapter."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value in PACKAGES:
            names.add(node.value)
        elif isinstance(node, ast.Import):
            names |= {alias.name.partition(".")[0] for alias in node.names} & (set(PACKAGES) - {"numpy"})
        elif isinstance(node, ast.ImportFrom):
            *folders, module = (node.module or "").split(".")
            package = module if folders[-1:] == ["arrays"] else (node.module or "").partition(".")[0]
            names |= {package} & (set(PACKAGES) | {"dlpack"}) - ({"numpy"} if not node.level else set())
    return names


def test_no_array_library_is_named_outside_of_its_adapter() -> None:
    package = ROOT / "cuflash"
    paths = {path.relative_to(package).with_suffix("").as_posix(): path for path in package.rglob("*.py")}
    named = {name: named_in(path) for name, path in paths.items() if not name.startswith(KNOWING)}
    assert {name: names for name, names in named.items() if names} == ALLOWED
    assert named_in(paths["arrays/jax"]) == {"jax", "dlpack"}  # strings and imports are shown
    assert named_in(paths["frameworks/torch/tensors"]) == {"torch"}
    files = {path.stem for path in (package / "arrays").glob("*.py")}
    assert {name for name, array_class in PACKAGES.items() if array_class is not None} <= files
