"""Arrays that are written to: overlap with themselves or with other arrays is refused before any work."""

from __future__ import annotations

import itertools
import time
from typing import Any

import numpy as np
import pytest
from drivers import Array, Gpus
from numpy.lib.stride_tricks import as_strided
from refusals import backward_with, base

import cuflash
from cuflash.errors import ProblemError
from cuflash.problem.array_spec import ArraySpec, repeats_memory
from cuflash.problem.checks import check_output

# Strides, in elements, of arrays of 16 x 16 x 16 x 16 for which NumPy searches for minutes. The first repeats nothing.
HARD = (160145596, 10008923, 623110, 35805), (97056184, 111475673, 44648488, 39211558)
OVERLAPPING = {  # strides of (2, 5, 4, 6), in elements
    "rows": (100, 4, 24, 1),
    "heads": (120, 24, 5, 1),
    "batches": (119, 24, 6, 1),
    "elements": (120, 24, 6, 0),
    "rows_of_gaps": (200, 12, 50, 3),
    "rows_backward": (100, -4, 24, 1),
    "rows_and_heads": (200, 24, 24, 1),
}


def view(shape: tuple[int, ...], strides: tuple[int, ...]) -> Any:
    """Returns a view of zeros."""
    return as_strided(np.zeros(2000, np.float32)[800:], shape, [stride * 4 for stride in strides])


@pytest.mark.usefixtures("nothing_runs")
@pytest.mark.parametrize("strides", OVERLAPPING.values(), ids=OVERLAPPING)
def test_host_arrays_that_overlap_themselves_are_refused(strides: tuple[int, ...]) -> None:
    out = view((2, 5, 4, 6), strides)
    with pytest.raises(ProblemError, match=r"out has shape .* strides .*: rows share memory; give a dense out"):
        cuflash.forward(**base(), out=out)
    dq = view((2, 5, 4, 8), strides)
    with pytest.raises(ProblemError, match=r"dq has shape .* strides .*: rows share memory; give a dense dq"):
        cuflash.backward(**backward_with({}), grads_out=(dq, None, None))


@pytest.mark.parametrize("strides", OVERLAPPING.values(), ids=OVERLAPPING)
def test_gpu_arrays_that_overlap_themselves_are_refused(strides: tuple[int, ...], monkeypatch: Any) -> None:
    gpus = Gpus(monkeypatch)
    q, k, v = (Array.contiguous((2, 5, 4, 6), 2**30 * n) for n in (1, 2, 3))
    with pytest.raises(ProblemError, match=r"out has shape .* strides .*: rows share memory; give a dense out"):
        cuflash.forward(q, k, v, out=Array((2, 5, 4, 6), strides, "bfloat16", 2**40))
    assert not gpus.launched


def test_strides_that_cross_without_meeting_are_written_to() -> None:
    expected = cuflash.forward(**base())
    out = view((2, 5, 4, 6), (5 * 24 * 2, 24 * 2, 2, 9))  # elements 0, 9, 18 … of one head, 2, 11, 20 … of the next
    assert cuflash.forward(**base(), out=out) is out
    np.testing.assert_array_equal(out, expected)


@pytest.mark.drawn(200)
def test_an_array_repeats_memory_if_two_indices_have_one_offset(seed: int) -> None:
    rng = np.random.default_rng(seed)
    shape = tuple(rng.integers(0 if seed % 10 == 0 else 1, 6, int(rng.integers(1, 5))).tolist())
    strides = tuple(rng.choice([0, 1, 2, 3, 5, 6, 7, 24, 25, 120, -2, -24], len(shape)).tolist())
    offsets = [sum(map(int.__mul__, index, strides)) for index in itertools.product(*map(range, shape))]
    assert repeats_memory(shape, strides) == (len({*offsets}) < len(offsets))


def test_hostile_strides_are_refused_in_seconds() -> None:
    begin = time.process_time()
    shape = (16, 16, 16, 16)
    k, pool = np.zeros(shape, np.float16), np.zeros(2, np.float16)  # most elements of the views lie outside any array
    out, q = (as_strided(pool[n:], shape, [2 * stride for stride in strides]) for n, strides in enumerate(HARD))
    # Any input may be named: the views span most of memory, perhaps k and v, too.
    with pytest.raises(ProblemError, match=r"out, .*too long to tell whether it shares memory with [qkv]; give out"):
        cuflash.forward(q, k, k, out=out)
    far = (3000, 3000, 3002, 3003), (81532297952, 75497829363, 80858651486, 60664362978)
    with pytest.raises(ProblemError, match=r"dq has shape .* too long to tell whether rows share memory; give a dense"):
        check_output("dq", ArraySpec(*far, "float16", "cuda:0", "cupy"))
    assert time.process_time() - begin < 5


def test_hostile_strides_on_a_gpu_are_refused(monkeypatch: Any) -> None:
    gpus = Gpus(monkeypatch)
    q = Array.contiguous((16,) * 4, 2**30)
    out, v = (Array((16,) * 4, (*strides[:3], 1), "bfloat16", 2**40 + 2 * n) for n, strides in enumerate(HARD))
    with pytest.raises(ProblemError, match="takes too long to tell whether they share elements; give each memory"):
        cuflash.forward(q, q, v, out=out)
    assert not gpus.launched


def test_steps_of_a_part_of_an_element_are_not_written_to() -> None:
    records = np.zeros((2, 5, 4, 6), [("tag", "i2"), ("value", "f4")])
    with pytest.raises(ProblemError, match=r"out has strides of .* bytes, no multiples of the 4 of an element"):
        cuflash.forward(**base(), out=records["value"])
