"""Attention over caches in the interfaces of flash-attn 2 and 3: `flash_attn_with_kvcache` and its schedules."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

torch = pytest.importorskip("torch")
from tensors import arguments_of, assert_results, assert_sequences, assert_vjp
from tensors import random_qkv as dense

from cuflash import ProblemError, UnsupportedError
from cuflash.frameworks.flash_attn import v2 as fa2
from cuflash.frameworks.flash_attn import v3 as fa3
from cuflash.testing.sequences import Sequences, VarlenArrays, varlen_arrays

WHOLE = Sequences("whole", (2,) * 3, (19,) * 3, "rectangle", "rectangle", causal=True, dims=(16, 24), dtype="float32")
CASES = [
    WHOLE,
    replace(WHOLE, name="used", keys=(4, 19, 0), used_k=True),
    replace(WHOLE, name="decoding", queries=(1,) * 3, keys=(4, 19, 0), used_k=True, heads=(8, 1), dtype="bfloat16"),
    replace(WHOLE, name="rows", keys=(12, 30, 0), place_k="cache", used_k=True),
    replace(WHOLE, name="paged", keys=(40, 17, 5), place_k="paged", used_k=True, page_size=3),
    replace(WHOLE, name="whole_pages", keys=(12,) * 3, place_k="paged", page_size=4, causal=False, window_size=(5, -1)),
    replace(WHOLE, name="capped", keys=(12, 30, 1), used_k=True, softcap=2.0, softmax_scale=0.4),
]
PACKED = [
    replace(WHOLE, name="packed", queries=(3, 1, 0), keys=(20, 7, 5), place_q="packed", used_k=True),
    replace(WHOLE, name="packed_paged", queries=(3, 1, 20), keys=(40, 17, 20), place_q="packed", place_k="paged",
            used_k=True, bounded=True),
]  # fmt: skip
BOTH = pytest.mark.parametrize("module", [fa2, fa3], ids=["fa2", "fa3"])


def each(cases: list[Sequences]) -> Any:
    return pytest.mark.parametrize("case", cases, ids=lambda case: case.name)


def arguments_for(module: Any, inputs: VarlenArrays, device: str = "cpu") -> dict[str, Any]:
    """Returns the arguments of `flash_attn_with_kvcache`."""
    arguments = arguments_of(inputs, device)
    for ours, theirs in (("k", "k_cache"), ("v", "v_cache"), ("seqused_k", "cache_seqlens")):
        if ours in arguments:
            arguments[theirs] = arguments.pop(ours)
    if module is fa2 and "page_table" in arguments:
        arguments["block_table"] = arguments.pop("page_table")
    return {name: x for name, x in arguments.items() if name not in ("diagonal_offset", "max_seqlen_k")}


@BOTH
@each(CASES)
def test_results(module: Any, case: Sequences, device: str) -> None:
    inputs = varlen_arrays(case)
    arguments = arguments_for(module, inputs, device)
    out, lse, *rest = module.flash_attn_with_kvcache(**arguments, return_softmax_lse=True)
    assert_sequences(inputs, out, lse)
    assert lse.dtype == torch.float32
    assert [x.numel() for x in rest] == [0] * (2 * (module is fa3))
    assert_sequences(inputs, *module.flash_attn_with_kvcache(**arguments, num_splits=1, return_softmax_lse=True)[:2])


@each(PACKED)
def test_version_3_takes_packed_queries(case: Sequences, device: str) -> None:
    inputs = varlen_arrays(case)
    arguments = arguments_for(fa3, inputs, device)
    new = arguments["cu_seqlens_q"]
    out, lse, *_ = fa3.flash_attn_with_kvcache(**arguments, cu_seqlens_k_new=new, return_softmax_lse=True)
    assert lse.shape == (4, len(out))
    assert_sequences(inputs, out, lse)


def test_max_seqlen_q_of_dense_queries_has_no_effect() -> None:
    arguments = arguments_for(fa3, varlen_arrays(WHOLE))
    expected = fa3.flash_attn_with_kvcache(**arguments)
    assert torch.equal(fa3.flash_attn_with_kvcache(**arguments, max_seqlen_q=1), expected)


@BOTH
@each([WHOLE, CASES[3], CASES[4]])
def test_cache_seqlens_may_be_a_number(module: Any, case: Sequences, device: str) -> None:
    case = replace(case, keys=(12,) * 3, spare_k=(4,) * 3, used_k=True)
    inputs = varlen_arrays(case)
    arguments = arguments_for(module, inputs, device) | {"cache_seqlens": 12}
    assert_sequences(inputs, *module.flash_attn_with_kvcache(**arguments, return_softmax_lse=True)[:2])
    for wrong in (-1, 1000):
        with pytest.raises(ProblemError, match=f"cache_seqlens={wrong}, but the cache has room for"):
            module.flash_attn_with_kvcache(**arguments | {"cache_seqlens": wrong})
    for wrong in (True, 3.0):
        with pytest.raises(ProblemError, match="cache_seqlens"):
            module.flash_attn_with_kvcache(**arguments | {"cache_seqlens": wrong})


def test_gradients_flow_through_dense_caches() -> None:
    q, k, v = dense("cpu", torch.float32)
    out, lse = fa2.flash_attn_with_kvcache(q, k, v, cache_seqlens=12, causal=True, return_softmax_lse=True)
    assert_results((q, k, v), out, lse, causal=True)
    dout = torch.ones_like(out)
    assert_vjp(torch.autograd.grad(out, (q, k, v), dout), (q, k, v), dout, causal=True)


@BOTH
@each([CASES[3], CASES[4]])
def test_cached_keys_refuse_gradients_in_backward_alone(module: Any, case: Sequences, device: str) -> None:
    inputs = varlen_arrays(case)
    arguments = arguments_for(module, inputs, device)
    out, lse, *_ = module.flash_attn_with_kvcache(
        **arguments | {"q": arguments["q"].requires_grad_()}, return_softmax_lse=True
    )
    assert_sequences(inputs, out, lse)
    with pytest.raises(UnsupportedError, match=r"(page_table|cache_batch_idx) was given, but cached keys have no"):
        out.sum().backward()


def test_schedules_are_copied_and_passed_back() -> None:
    arguments = arguments_for(fa3, varlen_arrays(CASES[1]))
    lengths = arguments["cache_seqlens"]
    schedule = fa3.get_scheduler_metadata(3, 2, 19, 4, 2, 16, lengths, causal=True, window_size=(-1, -1), num_splits=4)
    assert schedule.dtype == torch.int32
    buffer = torch.zeros(8, dtype=torch.int32)
    buffer[: len(schedule)] = schedule
    expected = fa3.flash_attn_with_kvcache(**arguments)
    for metadata in (schedule, buffer):
        hints = {"scheduler_metadata": metadata, "num_splits": 4, "pack_gqa": False, "sm_margin": 2}
        assert torch.equal(fa3.flash_attn_with_kvcache(**arguments, **hints), expected)
    with pytest.raises(ProblemError, match="cache_seqlens is an int"):
        fa3.get_scheduler_metadata(3, 2, 19, 4, 2, 16, 5)


@pytest.mark.parametrize(
    ("module", "name", "words"),
    [
        *((module, "cache_leftpad", "first row of its cache") for module in (fa2, fa3)),
        (fa3, "rotary_seqlens", "rotates at positions in the cache"),
        *((fa3, name, "8-bit") for name in ("qv", "q_descale", "k_descale", "v_descale")),
    ],
    ids=lambda x: x.__name__.split(".")[-1] if hasattr(x, "__name__") else x.replace(" ", "_"),
)
def test_unsupported_arguments_are_refused_by_name(module: Any, name: str, words: str) -> None:
    with pytest.raises(UnsupportedError, match=f"{name}.*{words}"):
        module.flash_attn_with_kvcache(**arguments_for(module, varlen_arrays(WHOLE)), **{name: torch.ones(1)})


@BOTH
def test_invalid_arguments_are_refused(module: Any) -> None:
    table = "block_table" if module is fa2 else "page_table"
    arguments = arguments_for(module, varlen_arrays(CASES[4]))
    for changes, words in (
        ({"q": arguments["q"][0]}, r"q has shape \(2, 4, 16\)"),
        ({"k_cache": arguments["k_cache"][0]}, r"k_cache has shape \(3, 2, 16\)"),
        ({"v_cache": None}, "v_cache is a NoneType"),
        ({"cache_seqlens": arguments["cache_seqlens"].long()}, "cache_seqlens has dtype torch.int64"),
        ({table: arguments[table].long()}, f"{table} has dtype torch.int64"),
        ({"cache_batch_idx": torch.zeros(3)}, "cache_batch_idx has dtype torch.float32"),
        ({"return_softmax_lse": None}, "return_softmax_lse=None"),
        ({"num_splits": -1}, "num_splits=-1 is negative"),
    ):
        with pytest.raises(ProblemError, match=words):
            module.flash_attn_with_kvcache(**arguments | changes)
    rows = torch.zeros(3, dtype=torch.int32)
    words = "block_table and cache_batch_idx place" if module is fa2 else r"page_table has shape \(.*\(3, 1\) on cpu"
    with pytest.raises(ProblemError, match=words):
        module.flash_attn_with_kvcache(**arguments, cache_batch_idx=rows if module is fa2 else rows[:, None])


@each([CASES[4], PACKED[1]])
def test_version_3_takes_rows_of_a_table_of_pages(case: Sequences, device: str) -> None:
    inputs = varlen_arrays(case)
    arguments = arguments_for(fa3, inputs, device)
    order = torch.tensor([2, 0, 1], dtype=torch.int32, device=device)
    table = arguments.pop("page_table")
    shuffled = torch.empty_like(table)
    shuffled[order.long()] = table  # sequence b has row order[b]
    arguments |= {"page_table": shuffled, "cache_batch_idx": order}
    before = shuffled.clone()
    assert_sequences(inputs, *fa3.flash_attn_with_kvcache(**arguments, return_softmax_lse=True)[:2])
    lengths = {"seqused_k": arguments["cache_seqlens"], "cu_seqlens_q": arguments.get("cu_seqlens_q")}
    private = {"page_table": shuffled, "kv_batch_idx": order, "causal": case.causal, "max_seqlen_q": 20, **lengths}
    tensors = arguments["q"], arguments["k_cache"], arguments["v_cache"]
    assert_sequences(inputs, *fa3._flash_attn_forward(*tensors, **private)[:2])
    assert torch.equal(shuffled, before)


@pytest.mark.usefixtures("unchecked_integers")
def test_a_row_of_a_table_may_serve_several_sequences_and_may_be_missing(device: str) -> None:
    arguments = arguments_for(fa3, varlen_arrays(replace(CASES[4], keys=(40, 40, 40))), device)
    table = arguments.pop("page_table")
    twice, there = (table[[1, 1, 0]], [0, 1, 2]), (table[[1, 0, 0]], [0])
    for rows, (expected_table, visible) in (([1, 1, 0], twice), ([1, -1, 3], there)):
        order = torch.tensor(rows, dtype=torch.int32, device=device)
        out, lse, *_ = fa3.flash_attn_with_kvcache(
            **arguments, page_table=table, cache_batch_idx=order, return_softmax_lse=True
        )
        expected = fa3.flash_attn_with_kvcache(**arguments, page_table=expected_table)
        assert torch.equal(out[visible], expected[visible])
        hidden = [each for each in range(3) if each not in visible]
        assert not out[hidden].any()
        assert (lse[hidden] == -torch.inf).all()


def test_host_page_table_without_a_row_is_an_error() -> None:
    arguments = arguments_for(fa3, varlen_arrays(replace(CASES[4], keys=(40, 40, 40))), "cpu")
    order = torch.tensor([1, -1, 3], dtype=torch.int32)
    with pytest.raises(ProblemError, match=r"^cache_batch_idx\[1\] is -1, but page_table has 3 rows"):
        fa3.flash_attn_with_kvcache(**arguments, cache_batch_idx=order)
