"""`grads_out` of `cuflash.backward`, on NumPy and on a GPU: strides, rows of no sequence, refusals."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from libraries import MAKERS, Producer, as_numpy

from cuflash.errors import ProblemError
from cuflash.problem.array_spec import ArraySpec, share_memory
from cuflash.testing import sequences
from cuflash.testing.cases import Case
from cuflash.testing.gradients import BackwardArgs, backward, backward_args, check
from cuflash.testing.layouts import host, identical, laid_out
from cuflash.testing.sequences import Sequences, varlen_arrays

CASE = Case("grads_out", 2, 65, 65, 4, 4, 64, 64, "float16", causal=True)
DETERMINISTIC = pytest.mark.parametrize("deterministic", [False, True], ids=["any_order", "deterministic"])
LAYOUTS: dict[str, dict[str, Any]] = {
    "surrounded": {"before": (1, 1, 1, 1)},
    "vectors": {"before": (1, 1, 1, 8)},
    "heads_first": {"axis_order": (0, 2, 1, 3)},
    "reversed": {"steps": (-1, -1, -1, 1)},
    "every_second": {"steps": (2, 2, 2, 1)},
    "gaps": {"steps": (1, 1, 1, 2)},
}


@DETERMINISTIC
@pytest.mark.parametrize("dims", [(64, 64), (60, 60), (40, 72), (256, 256)], ids=str)
@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_parts_of_one_packed_array_are_written_and_nothing_beside_them(
    dtype: str, dims: tuple[int, int], deterministic: bool, xp: Any
) -> None:
    case = Case("packed", 2, 65, 65, 4, 4, *dims, dtype, causal=True)
    args = backward_args(case, xp)
    # If all rows begin at multiples of 16 bytes, Hopper's kernels take any head dim.
    wide = {
        name: laid_out(x, after=(0, 0, 0, 8 + -x.shape[3] % 8)) for name, x in args._asdict().items() if x.ndim == 4
    }
    for inputs in (args, args._replace(**{name: wide[name] for name in ("dout", "q", "k", "v")})):
        packed = xp.full((2, 65, 4, 4, max(dims) + 8 + -max(dims) % 8), 7.0, dtype)
        parts = (0, dims[0]), (1, 0), (2, dims[0]), (3, dims[1])
        targets = tuple(packed[:, :, i, :, :dim] for i, dim in parts if dim)
        for x in targets:
            x[...] = xp.nan
        got = backward(case, inputs, deterministic=deterministic, grads_out=targets)
        assert all(x is y for x, y in zip(got, targets, strict=True))
        check(case, args, got)
        assert all(bool((packed[:, :, i, :, dim:] == 7.0).all()) for i, dim in parts)


@DETERMINISTIC
@pytest.mark.parametrize("layout", LAYOUTS)
def test_gradients_of_any_strides_equal_new_arrays(layout: str, deterministic: bool, xp: Any) -> None:
    case = Case("layout", 2, 65, 129, 4, 2, 40, 64, "float16", window_size=(40, 9))
    args = backward_args(case, xp)
    for fill in (0.0, np.nan):
        targets = [laid_out(xp.full_like(x, fill), fill=5.0, **LAYOUTS[layout]) for x in (args.q, args.k, args.v)]
        check(case, args, backward(case, args, deterministic=deterministic, grads_out=targets))
        assert not any(np.isnan(host(x)).any() for x in targets)
    if xp is np:
        assert identical(targets, backward(case, args))


@pytest.mark.parametrize("which", range(3))
def test_a_gradient_that_is_none_is_new(which: int, xp: Any) -> None:
    args = backward_args(CASE, xp)
    outs: list[Any] = [None] * 3
    outs[which] = laid_out(xp.full_like(args.q, xp.nan), before=(1, 1, 1, 1))
    for grads_out in (outs, [None] * 3):
        got = backward(CASE, args, deterministic=True, grads_out=grads_out)
        check(CASE, args, got)
        assert [x is y for x, y in zip(got, grads_out, strict=True)] == [x is not None for x in grads_out]


LENGTHS = (5, 0, 1, 17, 30), (9, 3, 0, 17, 31)
VARLEN_OPS = [
    Sequences("packed", *LENGTHS, causal=True),
    Sequences("used", *LENGTHS, used_q=True, used_k=True, spare_q=(1, 4, 0, 2, 0), spare_k=(0, 3, 2, 0, 1)),
    Sequences("rectangle", (9, 2, 0), (4, 11, 3), "rectangle", "rectangle", True, True, dtype="float32"),
]


@DETERMINISTIC
@pytest.mark.parametrize("layout", ["vectors", "every_second", "gaps"])
@pytest.mark.parametrize("case", VARLEN_OPS, ids=lambda case: case.name)
def test_rows_of_no_sequence_become_0_in_grads_out(case: Sequences, layout: str, deterministic: bool, xp: Any) -> None:
    args = varlen_arrays(case)
    arguments = args.arguments(xp)
    targets = [laid_out(xp.full_like(arguments[name], xp.nan), fill=5.0, **LAYOUTS[layout]) for name in "qkv"]
    got = sequences.gradients(args, xp, deterministic=deterministic, grads_out=targets)
    assert all(x is y for x, y in zip(got, targets, strict=True))
    sequences.check_gradients(args, got)


def test_tensors_are_written_where_they_are() -> None:
    pytest.importorskip("torch")
    args = backward_args(CASE, np)
    packed = MAKERS["torch"](np.full((2, 65, 3, 4, 64), np.nan, np.float16))
    theirs = BackwardArgs(*map(MAKERS["torch"], args))
    backward(CASE, theirs, grads_out=packed.unbind(2))
    assert identical([as_numpy(packed)], [np.stack(backward(CASE, args), axis=2).astype("f4")])


def overlapping(xp: Any, args: BackwardArgs) -> dict[str, tuple[Any, ...]]:
    """Returns bad gradient arrays, by the text of the error."""
    dq, dk, dv = (xp.zeros_like(x) for x in args[1:4])
    pool = xp.zeros((2, 65, 4, 192), "f2")
    separate = "memory of its own"
    return {
        f"dq, which is written to, shares memory with dk; give dq {separate}": (dq, dq, dv),
        f"dk, which is written to, shares memory with dv; give dk {separate}": (
            pool[..., :64], pool[..., 64:128], pool[..., 127:191]),
        f"dv, which is written to, shares memory with v; give dv {separate}": (dq, dk, args.v),
        f"dk, which is written to, shares memory with dout; give dk {separate}": (None, args.dout[:, ::-1], None),
        r"dv has shape \(2, 65, 2, 64\); this problem needs \(2, 65, 4, 64\)": (dq, dk, dv[:, :, :2]),
        "dk has dtype float32; this problem needs float16": (dq, dk.astype("f4"), dv),
        "dq has shape .* rows share memory; give a dense dq": (xp.broadcast_to(dq[:1], dq.shape), dk, dv),
        r"grads_out is a tuple of 2; give \(dq, dk, dv\), each an array or None": (dq, dk),
        "dq is a list; give a CuPy, PyTorch": ([0.0], dk, dv),
        "dv is a libraries array": (dq, dk, Producer(dv)),
    }  # fmt: skip


def test_gradients_that_do_not_fit_are_refused_and_nothing_is_written(xp: Any) -> None:
    args = backward_args(CASE, xp)
    for words, grads_out in overlapping(xp, args).items():
        arrays = [*args, *(x for x in grads_out if isinstance(x, xp.ndarray))]
        before = [host(x).copy() for x in arrays]
        with pytest.raises(ProblemError, match=words):
            backward(CASE, args, grads_out=grads_out)
        assert identical(arrays, before)
    with pytest.raises(ProblemError, match=r"grads_out is an ndarray; give \(dq, dk, dv\)"):
        backward(CASE, args, grads_out=args.q)


def test_host_arrays_that_cannot_be_written_to_are_refused() -> None:
    args = backward_args(CASE, np)
    frozen = np.zeros_like(args.q)
    frozen.flags.writeable = False
    with pytest.raises(ProblemError, match="dk is read-only; give a writable array or None"):
        backward(CASE, args, grads_out=(None, frozen, None))
    pytest.importorskip("jax")
    theirs = BackwardArgs(*map(MAKERS["jax"], args))
    with pytest.raises(ProblemError, match=r"dv is a jax array, which cannot be written to here; .* or None"):
        backward(CASE, theirs, grads_out=(None, None, theirs.v))


@pytest.mark.drawn(100)
def test_arrays_share_memory_where_numpy_says_so(seed: int) -> None:
    rng = np.random.default_rng(seed)
    memory = np.zeros(4096, np.float16)

    def drawn() -> tuple[Any, int]:
        shape = rng.integers(1, 5, 3)
        strides = rng.choice([1, 2, 3, 8, 24, 48, -2, -24], 3)
        begin = 2048 + int(rng.integers(0, 60))
        view = np.lib.stride_tricks.as_strided(memory[begin:], shape, strides * 2)
        return view, 2 * begin

    (x, begin_x), (y, begin_y) = drawn(), drawn()
    first, second = (ArraySpec(v.shape, tuple(s // 2 for s in v.strides), "float16", "cpu", "numpy") for v in (x, y))
    assert share_memory(first, second, begin_y - begin_x) == np.shares_memory(x, y)
    addresses = (np.indices(x.shape) * np.reshape(x.strides, (3, 1, 1, 1))).sum(axis=0)
    assert first.span == (addresses.min(), addresses.max() + 2)
    assert first._replace(shape=(4, 0, 1)).span == (0, 0)
