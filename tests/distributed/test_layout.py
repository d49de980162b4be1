"""Layouts: every row is on one rank, shards join to the whole, positions count within documents."""

from __future__ import annotations

import pickle
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from workers import run_python

from cuflash import ProblemError
from cuflash.distributed import Layout
from cuflash.distributed.layout import KINDS

LENGTHS = st.lists(st.integers(0, 60), min_size=1, max_size=8)


def bounds_of(lengths: list[int]) -> list[int]:
    return [0, *np.cumsum(lengths).tolist()]


@given(LENGTHS, st.integers(1, 9), st.sampled_from(KINDS), st.integers(1, 30))
def test_every_row_is_on_one_rank_in_ascending_order(lengths: list[int], ranks: int, kind: Any, chunk: int) -> None:
    layout = Layout(bounds_of(lengths), ranks, kind, chunk=chunk)
    rows = [layout.indices(rank) for rank in range(ranks)]
    assert sorted(np.concatenate(rows).tolist()) == list(range(sum(lengths)))
    positions = np.concatenate([np.arange(length) for length in lengths])
    for rank, mine in enumerate(rows):
        assert (np.diff(mine) > 0).all()
        assert len(mine) == layout.num_rows(rank)
        np.testing.assert_array_equal(layout.positions(rank), positions[mine])
        local = np.concatenate([np.arange(span.local, span.local + span.size) for span in layout.spans[rank]] or [[]])
        np.testing.assert_array_equal(local, np.arange(len(mine)))
        documents = np.repeat(np.arange(len(lengths)), lengths)[mine]
        borders = [0, *(np.flatnonzero(np.diff(documents)) + 1).tolist(), len(mine)]
        assert layout.local_bounds(rank) == tuple(borders if len(mine) else [0])


@given(LENGTHS, st.integers(1, 5), st.sampled_from(KINDS))
def test_runs_of_a_kind_make_its_layout(lengths: list[int], ranks: int, kind: Any) -> None:
    layout = Layout(bounds_of(lengths), ranks, kind, chunk=7)
    runs = [[(span.begin, span.end) for span in spans] + [(3, 3)] for spans in layout.spans]
    copied = Layout(bounds_of(lengths), ranks, runs=runs)
    assert (copied.spans, copied.kind) == (layout.spans, "runs")
    assert copied != layout
    assert repr(copied).startswith("Layout(runs, ")
    joined = layout.joined(ranks)
    assert (joined.kind, joined.rows, joined) == ("runs", (layout.seqlen,), copied.joined(ranks))


@given(LENGTHS, st.integers(1, 5), st.sampled_from(KINDS), st.integers(0, 2))
def test_shards_join_to_the_whole(lengths: list[int], ranks: int, kind: Any, dim: int) -> None:
    layout = Layout(bounds_of(lengths), ranks, kind, chunk=7)
    shape = [2, 3, 4]
    shape[dim] = layout.seqlen
    x = np.random.default_rng(0).standard_normal(shape)
    shards = [layout.shard(x, dim - 3, rank) for rank in range(ranks)]
    assert all(not np.shares_memory(shard, x) for shard in shards)
    np.testing.assert_array_equal(layout.join(shards, dim), x)


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_zigzag_balances_causal_work(ranks: int) -> None:
    layout = Layout(ranks * 1000, ranks)
    work = [int((layout.indices(rank) + 1).sum()) for rank in range(ranks)]
    assert max(work) - min(work) <= layout.seqlen


def test_balanced_chunks_balance_the_work_of_documents() -> None:
    lengths = np.random.default_rng(0).lognormal(7.8, 1.0, 200).astype(int) + 1
    worst = {}
    for kind in KINDS:
        layout = Layout(bounds_of(lengths.tolist()), 16, kind, chunk=2048)
        work = [int((layout.positions(rank) + 1).sum()) for rank in range(16)]
        worst[kind] = max(work) / (sum(work) / 16)
    assert worst["balanced"] < 1.15 < min(worst["zigzag"], worst["contiguous"])


def test_rows_of_ranks_differ_by_few_where_they_do_not_divide() -> None:
    for ranks in (1, 3, 7, 8):
        for rows in (0, 1, ranks - 1, ranks + 1, 1001):
            counts = [Layout(rows, ranks).num_rows(rank) for rank in range(ranks)]
            assert max(counts) - min(counts) <= 2


def test_layouts_are_pickled_compared_and_printed() -> None:
    layout = Layout([0, 5, 12], 2, "balanced", rank=1, chunk=3)
    assert hash(layout) == hash(layout.key)
    copied = pickle.loads(pickle.dumps(layout))
    assert copied._hash is None  # another process hashes strings to other numbers
    assert copied == layout
    assert hash(copied) == hash(layout)
    assert copied.rank == 1
    assert layout != Layout([0, 6, 12], 2, "balanced", chunk=3)
    assert repr(layout) == "Layout(balanced, 12 rows of 2 documents, 2 ranks of 6 rows, rank 1)"


class Group:
    """A stand-in for a ProcessGroup."""

    def __init__(self, ranks: int, rank: int) -> None:
        self.size, self.rank = lambda: ranks, lambda: rank


def test_layouts_are_described_alike_on_all_ranks_and_by_their_rows() -> None:
    runs = [[(0, 3), (5, 8)], [(3, 5), (8, 12)]], [[(0, 4), (6, 8)], [(4, 6), (8, 12)]]
    first, second = (Layout(12, 2, rank=0, runs=each) for each in runs)
    assert repr(first) == repr(second)
    assert first.described() != second.described()
    assert first.described() == Layout(12, 2, rank=1, runs=runs[0]).described()
    assert first.described().startswith("Layout(runs, 12 rows, 2 ranks of 6 rows) with digest ")


def test_a_group_gives_ranks_and_rank() -> None:
    layout = Layout(12, Group(4, 2))
    assert (layout.ranks, layout.rank) == (4, 2)
    np.testing.assert_array_equal(layout.indices(), layout.indices(2))
    with pytest.raises(ProblemError, match="no member of the group"):
        Layout(12, Group(4, -1))


@pytest.mark.parametrize(("arguments", "options", "text"), [
    ((12, 0), {}, "ranks=0 is below 1; give the number of processes"),
    ((12, 2.0), {}, "ranks=2.0 is a float; give an integer"),
    ((12, None), {}, "ranks is None, as torch.distributed.group.WORLD is before init_process_group; call that first"),
    ((-1, 2), {}, "seqlen=-1 is negative"),
    ((1.5, 2), {}, "seqlen=1.5 is a float"),
    (([3, 5], 2), {}, r"cu_seqlens is \(3, 5\); give 0, then the running sum"),
    (([0, 5, 3], 2), {}, "cu_seqlens is .* give 0, then the running sum"),
    (([0], 2), {}, "give 0, then the running sum"),
    ((12, 2, "striped"), {}, "kind='striped' is no layout; give one of 'zigzag', 'contiguous', 'balanced'"),
    ((12, 2), {"rank": 2}, "rank=2 is outside a group of 2; give 0 to 1"),
    ((12, 2), {"chunk": 0}, "chunk=0 is below 1"),
    ((12, 2), {"runs": [[(0, 12)]]}, "runs are for 1 ranks, but ranks=2"),
    ((12, 2), {"runs": [[(0, 6)], [(6, 11)]]}, "runs do not hold each of 12 rows once"),
    ((12, 2), {"runs": [[(0, 7)], [(6, 12)]]}, "runs do not hold each of 12 rows once"),
    ((12, 2), {"runs": [[(6, 12), (0, 2)], [(2, 6)]]}, "or do not ascend within a rank"),
    ((3, 1), {"runs": [[(0, 5), (5, 3)]]}, "runs do not hold each of 3 rows once"),
    ((3, 1), {"runs": [[(0, 3.0)]]}, "runs=3.0 is a float"),
])  # fmt: skip
def test_bad_layouts_are_refused(arguments: tuple[Any, ...], options: dict[str, Any], text: str) -> None:
    with pytest.raises(ProblemError, match=text):
        Layout(*arguments, **options)


def test_bad_arrays_are_refused() -> None:
    layout = Layout(12, 2)
    with pytest.raises(ProblemError, match="no rank of this process; give rank="):
        layout.shard(np.zeros((1, 12)))
    with pytest.raises(ProblemError, match="x has 11 rows along axis 1, but the layout has 12"):
        layout.shard(np.zeros((1, 11)), rank=0)
    with pytest.raises(ProblemError, match="without an axis 2"):
        layout.shard(np.zeros((1, 12)), 2, rank=0)
    with pytest.raises(ProblemError, match="1 shards are given for 2 ranks"):
        layout.join([np.zeros((1, 6))])
    with pytest.raises(ProblemError, match="shard 1 has 5 rows along axis 1, but the layout has 6"):
        layout.join([np.zeros((1, 6)), np.zeros((1, 5))])


def test_cuts_are_even() -> None:
    layout = Layout(103, 4, "contiguous")
    sizes = [span.size for (span,) in layout.spans]
    assert sum(sizes) == 103
    assert all(abs(a - b) <= 1 for a, b in pairwise(sizes))


def test_layouts_import_neither_pytorch_nor_jax() -> None:
    code = "import sys; from cuflash.distributed import Layout; print({'torch', 'jax'} & set(sys.modules))"
    assert run_python("-c", code).split() == ["set()"]
