"""`flash_attn_with_kvcache` with new keys: they are written to the cache, rotated, and attended to."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
from libraries import torch_of
from tensors import assert_equal

from cuflash import ProblemError, UnsupportedError
from cuflash.frameworks.flash_attn import v2 as fa2
from cuflash.frameworks.flash_attn import v3 as fa3
from cuflash.testing.appends import ROTATIONS, WRITTEN, Arguments, drawn, expected

BOTH = pytest.mark.parametrize("module", [fa2, fa3], ids=["fa2", "fa3"])
CAUSAL, FULL = {"causal": True}, {"causal": False}
NAMES = {"seqused_k": "cache_seqlens", "cu_seqlens_k": "cu_seqlens_k_new"}


def call_of(module: Any, place: str = "rows", rotation: str = "halves", **changes: Any) -> Arguments:
    """Returns NumPy arguments of `append_kv`, with queries even if nothing is rotated."""
    call = {"dtype": "float32", "dims": (16, 16)} | ROTATIONS[rotation] | changes
    call = drawn(place=place, **call)
    if "q" not in call:
        call["q"] = drawn(**{"dims": (16, 16), "rotary_dim": 2} | changes)["q"]
        if "queries" in changes and not isinstance(changes["queries"], int):
            call["cu_seqlens_q"] = drawn(**{"rotary_dim": 2} | changes)["cu_seqlens_q"]
    for number, name in enumerate(WRITTEN):  # they hold NaN, which used keys must not
        call[name] = np.random.default_rng(number).standard_normal(call[name].shape).astype(call[name].dtype)
    return call


def theirs(module: Any, call: Arguments, device: str) -> Arguments:
    """Returns these arguments by flash-attn's names."""
    arguments = {NAMES.get(name, name): torch_of(x, device) for name, x in call.items() if isinstance(x, np.ndarray)}
    if module is fa2 and "page_table" in arguments:
        arguments["block_table"] = arguments.pop("page_table")
    return arguments | {"rotary_interleaved": call.get("rotary_interleaved", False)}


def check(module: Any, call: Arguments, device: str, same: bool, **options: Any) -> None:
    """Compares caches and results to a call whose cache already has the new rows."""
    arguments = theirs(module, call, device)
    bounds = call.get("cu_seqlens_q")
    if bounds is not None:
        arguments["max_seqlen_q"] = int(np.diff(bounds).max())
    rotated = "rotary_cos" in call
    turned = expected(call | {"q_same_position": same} if rotated else {n: x for n, x in call.items() if n != "q"})
    k_cache, v_cache, *q = (torch_of(x, device) for x in turned)
    results = module.flash_attn_with_kvcache(**arguments, **options, return_softmax_lse=True)
    assert_equal((arguments["k_cache"], arguments["v_cache"]), (k_cache, v_cache))
    added = call["k"].shape[1] if "cu_seqlens_k" not in call else np.diff(call["cu_seqlens_k"])
    lengths = torch_of(call["seqused_k"] + np.asarray(added, "i4"), device)
    written = arguments | {"k_cache": k_cache, "v_cache": v_cache, "cache_seqlens": lengths}
    written["q"] = q[0] if q else arguments["q"]
    written |= dict.fromkeys(("k", "v", "rotary_cos", "rotary_sin"))
    assert_equal(results[:2], module.flash_attn_with_kvcache(**written, **options, return_softmax_lse=True)[:2])
    assert not results[0].isnan().any()


@BOTH
@pytest.mark.parametrize("options", [CAUSAL, FULL], ids=["causal", "full"])
@pytest.mark.parametrize("rotation", ROTATIONS)
@pytest.mark.parametrize("place", ["rows", "indexed", "pages of 3"])
def test_new_keys_are_written_and_attended_to(
    module: Any, place: str, rotation: str, options: dict[str, Any], device: str
) -> None:
    check(module, call_of(module, place, rotation), device, not options["causal"], **options)


def test_version_3_writes_by_rows_of_a_table_of_pages(device: str) -> None:
    call = call_of(fa3, "pages of 3")
    expected, arguments = theirs(fa3, call, device), theirs(fa3, call, device)
    order = torch.tensor([1, 2, 0], dtype=torch.int32, device=device)
    table = torch.empty_like(arguments["page_table"])
    table[order.long()] = arguments["page_table"]  # sequence b has row order[b]
    out = fa3.flash_attn_with_kvcache(**arguments | {"page_table": table, "cache_batch_idx": order}, causal=True)
    assert_equal(out, fa3.flash_attn_with_kvcache(**expected, causal=True))
    assert_equal(*((x["k_cache"], x["v_cache"]) for x in (arguments, expected)))


@pytest.mark.parametrize("rotation", ["none", "pairs"])
@pytest.mark.parametrize(
    "counts",
    [{"new": (3, 0, 9)}, {"new": 4, "queries": (0, 5, 2)}, {"new": (3, 0, 9), "queries": (1, 12, 2)}],
    ids=["keys", "queries", "both"],
)
def test_version_3_takes_packed_rows(counts: dict[str, Any], rotation: str, device: str) -> None:
    if "queries" not in counts:
        counts = counts | {"queries": 2}
    check(fa3, call_of(fa3, "pages of 3", rotation, **counts), device, False, causal=True)


@pytest.mark.parametrize(
    ("module", "window", "same"),
    [
        (fa2, (-1, -1), True),
        (fa2, (3, -1), False),
        (fa2, (-1, 2), False),
        (fa2, (32, 32), False),
        (fa2, (33, 40), True),
        (fa3, (31, -1), False),
        (fa3, (32, -1), True),
        (fa3, torch.tensor([32, -1]), True),
        (fa3, (-1, 3), False),
        (fa3, (-1, 4), True),
        (fa3, (torch.tensor(2), torch.tensor(2)), False),
    ],
)
def test_queries_without_a_mask_share_one_rotary_position(module: Any, window: Any, same: bool) -> None:
    check(module, call_of(module, capacity=33), "cpu", same, window_size=window)
    check(module, call_of(module, capacity=33), "cpu", False, window_size=window, causal=True)


@BOTH
@pytest.mark.parametrize("place", ["rows", "indexed", "pages of 3"])
def test_cache_seqlens_may_be_a_number(module: Any, place: str, device: str) -> None:
    call = call_of(module, place, lengths=(7, 7, 7))
    arguments = theirs(module, call, device)
    again = theirs(module, call, device)
    reference = module.flash_attn_with_kvcache(**again, causal=True)
    assert torch.allclose(
        module.flash_attn_with_kvcache(**arguments | {"cache_seqlens": 7}, causal=True), reference, atol=1e-5
    )
    assert_equal((arguments["k_cache"], arguments["v_cache"]), (again["k_cache"], again["v_cache"]))
    capacity = 33
    for wrong in (-1, capacity - 4):
        with pytest.raises(ProblemError, match=f"cache_seqlens={wrong} and 5 new keys were given, but the cache has"):
            module.flash_attn_with_kvcache(**arguments | {"cache_seqlens": wrong})


def test_a_number_and_packed_new_keys() -> None:
    call = call_of(fa3, new=(3, 0, 9), queries=2, lengths=(7, 7, 7))
    arguments, again = theirs(fa3, call, "cpu"), theirs(fa3, call, "cpu")
    result = fa3.flash_attn_with_kvcache(**arguments | {"cache_seqlens": 7}, causal=True)
    assert_equal(result, fa3.flash_attn_with_kvcache(**again, causal=True))


def test_rotary_seqlens_may_be_cache_seqlens() -> None:
    call = call_of(fa3)
    arguments, again = theirs(fa3, call, "cpu"), theirs(fa3, call, "cpu")
    result = fa3.flash_attn_with_kvcache(**arguments, rotary_seqlens=arguments["cache_seqlens"])
    assert_equal(result, fa3.flash_attn_with_kvcache(**again))
    with pytest.raises(UnsupportedError, match="rotary_seqlens was given"):
        fa3.flash_attn_with_kvcache(**arguments, rotary_seqlens=arguments["cache_seqlens"].clone())


def test_compiled_is_eager() -> None:
    torch._dynamo.reset()

    def step(**kwargs: Any) -> Any:
        return fa2.flash_attn_with_kvcache(**kwargs, causal=True)

    for rotation in ("halves", "none"):
        call = call_of(fa2, rotation=rotation)
        arguments, again = theirs(fa2, call, "cpu"), theirs(fa2, call, "cpu")
        assert_equal(torch.compile(step, fullgraph=True, backend="aot_eager")(**arguments), step(**again))
        assert_equal(arguments["k_cache"], again["k_cache"])


@BOTH
def test_refused_calls_write_nothing(module: Any) -> None:
    arguments = theirs(module, call_of(module), "cpu")
    before, short_table = arguments["k_cache"].clone(), arguments["rotary_cos"][:32]
    wanting = arguments["q"].clone().requires_grad_()
    for changes, error, words in (
        ({"v": None}, ProblemError, "k was given, but not both of k and v"),
        ({"k": None}, ProblemError, "v was given, but not both of k and v"),
        ({"k": None, "v": None}, ProblemError, "rotary_cos was given, but not both of k and v"),
        ({"rotary_sin": None}, ProblemError, "rotary_sin is a NoneType"),
        ({"rotary_cos": short_table}, ProblemError, r"rotary_cos has shape \(32, 6\).*room for 33 keys"),
        ({"cache_seqlens": None}, ProblemError, "but not cache_seqlens"),
        ({"cache_seqlens": arguments["cache_seqlens"].long()}, ProblemError, "cache_seqlens has dtype torch.int64"),
        ({"k": arguments["k"][0]}, ProblemError, r"k has shape \(5, 2, 16\)"),
        ({"v": arguments["v"][:, :3]}, ProblemError, "v"),
        ({"q": arguments["q"][0]}, ProblemError, r"q has shape \(5, 4, 16\)"),
        ({"q": wanting}, UnsupportedError, r"q requires grad.*torch.no_grad\(\)"),
        ({"window_size": (1, -2)}, ProblemError, "window_size"),
        ({"softcap": None}, ProblemError, "softcap"),
        ({"num_splits": -1}, ProblemError, "num_splits=-1 is negative"),
        ({"causal": None}, ProblemError, "causal=None"),
        ({"return_softmax_lse": None}, ProblemError, "return_softmax_lse=None"),
        ({"rotary_interleaved": 1}, ProblemError, "rotary_interleaved=1"),
        ({"cache_leftpad": arguments["cache_seqlens"]}, UnsupportedError, "cache_leftpad was given"),
    ):
        with pytest.raises(error, match=words):
            module.flash_attn_with_kvcache(**arguments | changes)
    assert_equal(arguments["k_cache"], before)
    with torch.no_grad():
        module.flash_attn_with_kvcache(**arguments | {"q": wanting})
