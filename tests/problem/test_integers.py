"""Integers in host memory: lengths out of range, and missing pages or rows, raise an error before any work."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from refusals import refused

import cuflash
from cuflash.errors import ProblemError

FAR = 2**31 - 1


def zeros(*shape: int) -> Any:
    return np.zeros((*shape, 2, 8), "f4")


def integers(values: Any) -> Any:
    return np.array(values, "i4")


PACKED = {"q": zeros(64), "k": zeros(64), "v": zeros(64)}
CACHE = {"q": zeros(2, 3), "k": zeros(4, 16), "v": zeros(4, 16), "cache_batch_idx": [3, 0], "seqused_k": [16, 5]}
PAGES = {"q": zeros(2, 3), "k": zeros(5, 4), "v": zeros(5, 4), "page_table": [[4, 0, -1], [1, 2, FAR]],
         "seqused_k": [5, 8]}  # fmt: skip
# Arguments of a legal call, changes that make it bad, and texts of the error.
BAD: list[tuple[dict[str, Any], dict[str, Any], tuple[str, ...]]] = [
    (PACKED, {"cu_seqlens_q": [30, 34], "cu_seqlens_k": [0, 64]},
     ("cu_seqlens_q is [30, 34]", "begins with 30", "running sum of the lengths", "of such lengths [0, 30, 64]")),
    (PACKED, {"cu_seqlens_q": [0, 64], "cu_seqlens_k": [2, 60]}, ("cu_seqlens_k is [2, 60]", "begins with 2")),
    (PACKED, {"cu_seqlens_q": [-1, 64], "cu_seqlens_k": [0, 64]}, ("begins with -1",)),
    (PACKED, {"cu_seqlens_q": [0, 40, 30], "cu_seqlens_k": [0, 40, 64]}, ("decreases from 40 to 30 at element 2",)),
    (PACKED, {"cu_seqlens_q": [0, 30, 64], "cu_seqlens_k": [0, 30, 65]}, ("ends with 65, but k has 64 rows",)),
    (PACKED, {"cu_seqlens_q": list(range(1, 12)), "cu_seqlens_k": [0] * 11}, ("[1, 2, 3, 4, 5, 6, 7, 8, …]",)),
    (PACKED, {"cu_seqlens_q": [0, 64], "cu_seqlens_k": [0, 60], "seqused_k": [61]}, ("seqused_k[0] is 61", "60 rows")),
    (PACKED, {"cu_seqlens_q": [0, 9, 64], "cu_seqlens_k": [0, 9, 64], "seqused_q": [9, -1]}, ("seqused_q[1] is -1",)),
    (CACHE, {"seqused_k": [17, 5]}, ("seqused_k[0] is 17", "sequence 0 has 16 rows", "give 0 to 16")),
    (CACHE, {"cache_batch_idx": [3, 4]}, ("cache_batch_idx[1] is 4", "k has 4 rows")),
    (CACHE, {"cache_batch_idx": [-1, 0]}, ("cache_batch_idx[0] is -1",)),
    (PAGES, {"seqused_k": [5, 13]}, ("seqused_k[1] is 13", "12 rows")),
    (PAGES, {"seqused_k": [9, 8]}, ("page_table[0, 2] is -1", "k has 5 pages", "keys 8 to 8 of sequence 0")),
    (PAGES, {"seqused_k": [5, 9]}, (f"page_table[1, 2] is {FAR}",)),
    (PAGES, {"seqused_k": None, "page_table": [[4, 0, 1], [1, 5, 2]]}, ("page_table[1, 1] is 5", "keys 4 to 7")),
]  # fmt: skip


def arguments_of(call: dict[str, Any], make: Callable[[Any], Any]) -> dict[str, Any]:
    """Returns the arguments with their arrays in a library; lists become int32."""
    pairs = {name: integers(x) if isinstance(x, list) else x for name, x in call.items() if x is not None}
    return {name: make(x) if isinstance(x, np.ndarray) else x for name, x in pairs.items()}


@pytest.mark.usefixtures("nothing_runs")
@pytest.mark.parametrize(("call", "wrong", "texts"), BAD)
def test_integers_out_of_range_are_refused(call: Any, wrong: Any, texts: tuple[str, ...]) -> None:
    arguments = arguments_of(call | wrong, np.asarray)
    with refused(ProblemError, *texts):
        cuflash.forward(**arguments)
    del arguments["v"]
    with refused(ProblemError, *texts):
        cuflash.lse(**arguments)


@pytest.mark.usefixtures("nothing_runs")
@pytest.mark.parametrize(("call", "wrong", "texts"), [row for row in BAD if row[0] is PACKED])
def test_backward_refuses_integers_out_of_range(call: Any, wrong: Any, texts: tuple[str, ...]) -> None:
    lse = np.zeros((2, 64), "f4")
    with refused(ProblemError, *texts):
        cuflash.backward(call["q"], out=call["q"], lse=lse, **arguments_of(call | wrong, np.asarray))


@pytest.mark.parametrize(("call", "wrong", "texts"), BAD)
def test_torch_tensors_on_the_cpu_are_checked(call: Any, wrong: Any, texts: tuple[str, ...]) -> None:
    torch = pytest.importorskip("torch")
    from cuflash.frameworks.torch import attention

    arguments = arguments_of(call | wrong, torch.from_numpy)
    for function in (cuflash.forward, attention):
        with refused(ProblemError, *texts):
            function(**arguments)


@pytest.mark.parametrize(("call", "more"), [
    (PACKED, {"cu_seqlens_q": [0, 30, 60], "cu_seqlens_k": [0, 0, 64]}),
    (PACKED, {"cu_seqlens_q": [0, 30, 64], "cu_seqlens_k": [0, 20, 64], "seqused_q": [0, 34], "seqused_k": [20, 0]}),
    (PACKED, {"cu_seqlens_q": [0], "cu_seqlens_k": [0]}),
    (PACKED, {"cu_seqlens_q": [3, 30, 64], "cu_seqlens_k": [0, 20, 64], "seqused_q": [20, 34]}),
    (PACKED, {"cu_seqlens_q": [0, 64, 64], "cu_seqlens_k": [9, 30, 64], "seqused_k": [20, FAR]}),
    (CACHE, {}), (CACHE, {"seqused_k": [0, 16], "cache_batch_idx": [-1, 3]}),
    (CACHE, {"seqused_q": [0, 3], "cache_batch_idx": [-1, 3]}),
    (PAGES, {}), (PAGES, {"seqused_k": [12, 8], "max_seqlen_k": 8}),
    (PAGES, {"seqused_k": [5, 12], "page_table": [[4, 0, -1], [-1, -1, 3]], "window_size": (0, 0)}),
    (PAGES, {"seqused_k": [5, 12], "page_table": [[4, 0, -1], [2, 3, -1]], "causal": True, "diagonal_offset": 5}),
])  # fmt: skip
def test_integers_that_no_visible_key_depends_on_may_be_anything(call: Any, more: Any) -> None:
    assert np.isfinite(cuflash.forward(**arguments_of(call | more, np.asarray))).all()


def test_lengths_are_those_of_the_present_call() -> None:
    used, cache = integers([3]), zeros(1, 4)
    call = {"q": zeros(1, 1), "k": cache, "v": cache, "seqused_k": used}
    cuflash.forward(**call)
    used[0] = 5
    with refused(ProblemError, "seqused_k[0] is 5"):
        cuflash.forward(**call)


APPEND = {"k_cache": zeros(2, 8), "v_cache": zeros(2, 8), "k": zeros(2, 3), "v": zeros(2, 3), "seqused_k": [0, 5]}
APPENDED_PAGES = APPEND | {"k_cache": zeros(3, 4), "v_cache": zeros(3, 4), "page_table": [[0, 9], [1, 2]]}
APPENDED_ROWS = APPEND | {"k_cache": zeros(3, 8), "v_cache": zeros(3, 8), "cache_batch_idx": [2, 0]}
BAD_APPENDS: list[tuple[dict[str, Any], dict[str, Any], tuple[str, ...]]] = [
    (APPEND, {"seqused_k": [0, 8]}, ("sequence 1 has 8 used keys and 3 new ones", "room for 8")),
    (APPEND, {"seqused_k": [6, 0]}, ("sequence 0 has 6 used keys and 3 new ones",)),
    (APPEND, {"seqused_k": [9, 0]}, ("seqused_k[0] is 9",)),
    (APPEND, {"seqused_k": [0, -1]}, ("seqused_k[1] is -1",)),
    (APPEND, {"k": zeros(6), "v": zeros(6), "cu_seqlens_k": [3, 3, 6]}, ("cu_seqlens_k is [3, 3, 6]", "begins with 3")),
    (APPENDED_PAGES, {"seqused_k": [2, 0]}, ("page_table[0, 1] is 9", "k_cache has 3 pages", "keys 4 to 4")),
    (APPENDED_ROWS, {"cache_batch_idx": [3, 0]}, ("cache_batch_idx[0] is 3", "k_cache has 3 rows")),
]


@pytest.mark.parametrize(("call", "wrong", "texts"), BAD_APPENDS)
def test_append_kv_refuses_keys_without_room_and_writes_none(call: Any, wrong: Any, texts: tuple[str, ...]) -> None:
    arguments = arguments_of(call | wrong, np.array)
    arguments["k"] = arguments["k"] + 1
    with refused(ProblemError, *texts):
        cuflash.append_kv(**arguments)
    assert not arguments["k_cache"].any()


@pytest.mark.parametrize(("call", "more"), [
    (APPEND, {}), (APPENDED_PAGES, {"seqused_k": [1, 5]}), (APPENDED_ROWS, {}),
    (APPENDED_ROWS, {"k": zeros(3), "v": zeros(3), "cu_seqlens_k": [0, 0, 3], "seqused_k": [FAR, 5]}),
    (APPENDED_ROWS, {"k": zeros(3), "v": zeros(3), "cu_seqlens_k": [0, 0, 3], "cache_batch_idx": [-1, 0]}),
])  # fmt: skip
def test_append_kv_takes_keys_that_have_room(call: Any, more: Any) -> None:
    assert cuflash.append_kv(**arguments_of(call | more, np.array)) is None


def test_create_block_mask_refuses_bounds_that_are_lengths() -> None:
    with refused(ProblemError, "cu_seqlens_q is [30, 34]", "begins with 30"):
        cuflash.create_block_mask(
            lambda b, h, i, j: i >= j, 1, 1, 64, 64, like=zeros(1), cu_seqlens_q=integers([30, 34])
        )
