"""Plans of distributed calls, beside counts over all pairs; and the choice of a scheme."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from doctests import run_examples
from hypothesis import given
from hypothesis import strategies as st

from cuflash import ProblemError
from cuflash.distributed import Layout, plan
from cuflash.distributed.choice import INDEXED, bias_lacks, choose
from cuflash.distributed.layout import KINDS
from cuflash.distributed.rectangles import Window

SIDES = st.one_of(st.none(), st.integers(0, 50))


@given(st.lists(st.integers(0, 40), min_size=1, max_size=5), st.integers(1, 5), st.sampled_from(KINDS), SIDES, SIDES)
def test_work_and_bytes_are_the_counts_over_all_pairs(
    lengths: list[int], ranks: int, kind: Any, left: int | None, right: int | None
) -> None:
    layout = Layout([0, *np.cumsum(lengths).tolist()], ranks, kind, chunk=9)
    rows = np.arange(layout.seqlen)
    documents, distance = np.searchsorted(layout.cu_seqlens, rows, "right"), rows[:, None] - rows
    mask = (documents[:, None] == documents) & (distance <= (99 if left is None else left))
    mask &= -distance <= (99 if right is None else right)
    heads_q, heads_kv = 2 * ranks, 2
    total = 2 * int(mask.sum()) * heads_q * (8 + 16)
    for scheme in ("ring", "ulysses", "gather"):
        parts = plan(layout, heads_q, heads_kv, 8, 16, scheme=scheme, window_size=(left, right)).ranks
        assert [part.rows for part in parts] == [layout.num_rows(rank) for rank in range(ranks)]
        assert sum(part.flops for part in parts) == total
        if scheme != "ulysses":
            assert [part.flops * mask.sum() for part in parts] == [
                mask[layout.indices(rank)].sum() * total for rank in range(ranks)
            ]
        if ranks == 1:
            assert parts[0].bytes_received == 0
    visible = [mask[layout.indices(rank)].any(0) for rank in range(ranks)]
    for rank, part in enumerate(parts):  # of "gather": at least what is seen, at most 127 keys a document more
        fetched = part.bytes_received // (2 * heads_kv * (8 + 16))
        missing = int(np.delete(visible[rank], layout.indices(rank)).sum())
        assert missing <= fetched <= layout.seqlen - layout.num_rows(rank)


def test_a_plan_is_printed_by_ranks() -> None:
    run_examples(plan)


def test_the_bytes_of_a_window_do_not_grow_with_the_ranks() -> None:
    received = [
        max(
            each.bytes_received for each in plan(Layout(n * 4096, n), 8, 2, 64, causal=True, window_size=(512, 0)).ranks
        )
        for n in (4, 16, 64)
    ]
    assert len(set(received)) == 1


@pytest.mark.parametrize(("call", "scheme"), [
    ({}, "ulysses"), ({"heads_q": 6}, "ring"), ({"heads_q": 16, "heads_kv": 1}, "ring"),
    ({"window": Window(100, 0)}, "gather"), ({"mods": ("score_mod",)}, "ulysses"),
    ({"mods": ("score_mod",), "heads_q": 6}, "gather"), ({"mods": ("bias",), "bias_shape": (1024, 4096)}, "gather"),
    ({"mods": ("bias",), "bias_shape": (1, 4096)}, "ulysses"),
    ({"mods": ("sinks",), "heads_q": 6}, "ring"), ({"mods": ("dropout_p",), "heads_q": 6}, "ring"),
    ({"mods": ("dropout_p",), "heads_q": 6, "not_by_ring": INDEXED}, "gather"),
    ({"mods": ("dropout_p",), "heads_q": 16, "heads_kv": 1}, "ulysses"),
])  # fmt: skip
def test_a_scheme_is_chosen_by_options_and_bytes(call: dict[str, Any], scheme: str) -> None:
    arguments = {"window": Window(None, 0), "heads_q": 8, "heads_kv": 8} | call
    assert choose(Layout(4096, 4), **arguments) == scheme


SHORT, LONG, LONGER = [*range(0, 65537, 512)], [0, 10, 65536], [0, 10, 1 << 20]


@pytest.mark.parametrize(("bounds", "call", "scheme"), [
    (SHORT, {}, "gather"), (SHORT, {"kind": "zigzag"}, "gather"), (SHORT, {"heads_q": 6, "heads_kv": 1}, "gather"),
    (SHORT, {"mods": ("score_mod",)}, "ulysses"), (SHORT, {"mods": ("bias",), "bias_shape": (1, 65536)}, "gather"),
    (SHORT, {"mods": ("bias",), "bias_shape": (8, 1, 1)}, "ulysses"),
    (SHORT, {"mods": ("dropout_p",), "heads_q": 6, "not_by_ring": INDEXED}, "gather"),
    (LONG, {}, "ulysses"), (LONG, {"heads_q": 6, "heads_kv": 1}, "gather"),
    (LONGER, {"heads_q": 6, "heads_kv": 1}, "ring"), (LONGER, {"heads_q": 16, "heads_kv": 1}, "ring"),
    ([0, 16384, *range(16384, 65537, 4096)], {"kind": "contiguous"}, "ulysses"),  # one rank has most of the work
])  # fmt: skip
def test_packed_documents_are_fetched_where_that_takes_less_time(
    bounds: list[int], call: dict[str, Any], scheme: str
) -> None:
    call = {"window": Window(None, 0), "heads_q": 8, "heads_kv": 8, "kind": "balanced"} | call
    assert choose(Layout(bounds, 4, call.pop("kind"), chunk=2048), **call) == scheme


@pytest.mark.parametrize(("seqlen", "ranks"), [(4, 4), (3, 2), (12, 8), (2, 4)])
def test_all_ranks_choose_alike_with_rows_of_a_bias(seqlen: int, ranks: int) -> None:
    layout = Layout(seqlen, ranks)
    shapes = [(rows, seqlen) for rows in layout.rows]
    assert {choose(layout, Window(), 8, 8, ("bias",), shape) for shape in shapes} == {"gather"}
    assert all(bias_lacks(layout, shape) for shape in shapes)


def test_bad_plans_are_refused() -> None:
    with pytest.raises(ProblemError, match="layout is an int; give a Layout"):
        plan(4096, 8, 2, 128)  # type: ignore[arg-type]
    with pytest.raises(ProblemError, match="6 query heads are no multiple of 4 kv heads"):
        plan(Layout(64, 2), 6, 4, 8)
    with pytest.raises(ProblemError, match="6 query heads are no multiple of 4 ranks; give scheme='gather'"):
        plan(Layout(64, 4), 6, 2, 64, scheme="ulysses")
    with pytest.raises(ProblemError, match="scheme='rings' is unknown"):
        plan(Layout(64, 4), 8, 2, 64, scheme="rings")  # type: ignore[arg-type]
    with pytest.raises(ProblemError, match=r"heads_q=8\.0 is a float; give an integer"):
        plan(Layout(64, 4), 8.0, 2, 64)  # type: ignore[arg-type]


def test_a_mesh_of_two_axes_adds_its_axes() -> None:
    layout = Layout([0, 100, 4096], 8)
    both = plan(layout, 16, 2, 64, causal=True, inner=4)
    pairs = plan(layout, 16, 2, 64, causal=True, scheme="ring").ranks
    outer = plan(layout.joined(4), 4, 1, 64, causal=True, scheme="ring").ranks  # 2 kv heads for 4 ranks: copies
    assert sum(each.flops for each in both.ranks) == sum(each.flops for each in pairs)
    heads_for_rows = 2 * (3 * 512 * (4 * 64 + 1 * 128) + 512 * 12 * 64)
    for rank, each in enumerate(both.ranks):
        assert each.bytes_received == outer[rank // 4].bytes_received + heads_for_rows
        assert each.calls == outer[rank // 4].calls
    assert str(both).startswith("scheme 'ring' of 2 x 4 ranks over Layout(zigzag, 4096 rows of 2 documents, 8 ranks")
    for options, text in (({"inner": 3}, "no divisor"), ({"inner": 4, "scheme": "gather"}, "give inner=1")):
        with pytest.raises(ProblemError, match=text):
            plan(layout, 16, 2, 64, **options)  # type: ignore[arg-type]
