"""Walks: the work of each thread block of a plan, computed on the host as in the kernels.

`tests/planning/test_walks.py` compares the functions named as in `kernels_cu/common/tile_scheduler.cuh` with that
header. The walks below mirror the `*scheduler.cuh` headers of both families, `portable/delta.cu` and
`portable/convert.cu`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from cuflash.planning.decoding import LEAST_TILES
from cuflash.planning.plan import Launch, Plan

HeadBlock = tuple[int, int]  # index of a head, over the batch, and index of a block of its rows


def head_by_head(index: int, num_blocks: int) -> HeadBlock:
    return divmod(index, num_blocks)


def lpt_order(index: int, num_blocks: int, num_heads: int, heads_in_l2: int) -> HeadBlock:
    first_head = index // (heads_in_l2 * num_blocks) * heads_in_l2
    block, head = divmod(index - first_head * num_blocks, min(heads_in_l2, num_heads - first_head))
    return first_head + head, block


class Work(NamedTuple):
    batch: int
    head: int
    part: int
    block: int

    @classmethod
    def from_head_block(cls, head_block: HeadBlock, heads: int, parts: int = 1) -> Work:
        head, part = divmod(head_block[0], parts)
        return cls(*divmod(head, heads), part, head_block[1])


def covering(elements: tuple[int, int], size: int) -> range:
    """Returns the tiles that contain some of the elements."""
    begin, end = elements
    return range(begin // size, -(-end // size) if begin < end else begin // size)


class Piece(NamedTuple):
    """The pairs of queries and keys of one query head that a thread block sums, for each of these results."""

    results: str
    batch: int
    head: int
    queries: range
    keys: range


class Rows(NamedTuple):
    """The written rows of a head of a result. Thread blocks that write the same rows in turn yield equal ones."""

    result: str
    batch: int
    head: int
    rows: range


class Touch(NamedTuple):
    """Floats of a part of the workspace that a thread block uses.

    how: "store" and "zero" write floats that no other block writes. "read", "add" and "count" need floats that an
    earlier kernel has written. A "turn" is a store by the first block and an addition by the others.
    """

    how: str
    part: str
    floats: slice


class Walk:
    """One launch of a plan; `blocks` yields the work of its thread blocks."""

    def __init__(self, plan: Plan, launch: Launch) -> None:
        self.plan, self.launch, self.fields = plan, launch, launch.fields
        self.problem: Any = plan.problem
        self.tile: Any = launch.variant.tile
        self.group = self.problem.heads_q // self.problem.heads_kv

    def blocks(self) -> Iterator[list[Piece | Rows | Touch]]:
        """Yields the work of each thread block of the grid or, if blocks are persistent, of each work tile."""
        one = ONE_BLOCK[self.launch.variant.source]
        for index in range(self.fields.get("num_tiles", self.launch.num_blocks)):
            yield list(one(self, index))

    def rows_of(self, block: int, step: int, length: int) -> range:
        return range(block * step, min(block * step + step, length))

    def query_head(self, batch: int, head: int) -> int:
        return int(batch * self.problem.heads_q + head)

    def stats(self, batch: int, head: int, row: int, count: int) -> Iterator[Touch]:
        """Yields the reads of delta's results for some queries: in pairs, or in sm90 kernels from two rows."""
        rows = self.fields["stats_rows"]
        begin = 2 * rows * self.query_head(batch, head)
        if self.launch.variant.of_warpgroups:
            for first in (begin + row, begin + rows + row):
                yield Touch("read", "stats", slice(first, first + count))
        else:
            yield Touch("read", "stats", slice(begin + 2 * row, begin + 2 * (row + count)))

    def strips(self, how: str, part: str, head: int, length: int, rows: range, columns: int) -> Iterator[Touch]:
        """Yields touches of strips of 16 rows of an sm80 accumulator, as in `common/accumulators.cuh`."""
        for strip in range(rows.start // 16, -(-min(rows.stop, length) // 16)):
            begin = (head * -(-length // 16) + strip) * 16 * columns
            yield Touch(how, part, slice(begin, begin + 16 * columns))

    def delta(self, index: int) -> Iterator[Rows | Touch]:
        problem, fields, parts = self.problem, self.fields, self.plan.workspace
        rows_of_head, step, count = fields["stats_rows"], fields["stats_step"], self.launch.variant.num_threads // 8
        work = Work.from_head_block(head_by_head(index, rows_of_head // count), problem.heads_q)
        head, row = self.query_head(work.batch, work.head), work.block * count
        begin = 2 * rows_of_head * head + step * row
        for first in (begin, begin + fields["stats_delta"]):
            yield Touch("store", "stats", slice(first, first + step * (count - 1) + 1, step))
        if "semaphores" in parts:
            visible = problem.mask.row_range(0, problem.seqlen_k)
            for i in range(row, min(row + count, problem.seqlen_q)):
                if not visible[0] <= i < visible[1]:
                    yield Rows("dq", work.batch, work.head, range(i, i + 1))
            if row == 0:
                num_blocks = fields["num_q_blocks"]
                last = fields["more_semaphores"] if head == problem.batch * problem.heads_q - 1 else 0
                yield Touch("zero", "semaphores", slice(head * num_blocks, (head + 1) * num_blocks + last))
        elif "dq_acc" in parts:
            rows = range(row, row + count)
            yield from self.strips("zero", "dq_acc", head, problem.seqlen_q, rows, fields["padded_dim"])

    def convert(self, index: int) -> Iterator[Rows | Touch]:
        problem, fields = self.problem, self.fields
        threads = self.launch.variant.num_threads
        first = index * threads  # index of the block's first thread among the threads of a gradient
        for result, heads, splits, length, columns in (
            ("dq", problem.heads_q, 1, problem.seqlen_q, fields["padded_dim"]),
            ("dk", problem.heads_kv, fields["splits"], problem.seqlen_k, fields["padded_dim"]),
            ("dv", problem.heads_kv, fields["splits"], problem.seqlen_k, fields["padded_dim_v"]),
        ):
            if f"{result}_acc" not in self.plan.workspace:
                continue
            of_head = -(-length // 16) * columns  # threads, each of which reads 16 floats of a split
            for head in range(problem.batch * heads):
                begin, end = max(first - head * of_head, 0), min(first + threads - head * of_head, of_head)
                for split in range(splits if begin < end else 0):
                    begin_of_split = 16 * of_head * (head * splits + split)
                    yield Touch("read", f"{result}_acc", slice(begin_of_split + 16 * begin, begin_of_split + 16 * end))
                for strip in range(-(-length // 16)):
                    if begin < (strip + 1) * columns <= end:  # the last column of the strip is here
                        yield Rows(result, *divmod(head, heads), self.rows_of(strip, 16, length))
            first -= problem.batch * heads * of_head

    def query_block(self, index: int) -> Iterator[Piece | Rows | Touch]:
        """Yields the work of a block of queries, for kernels whose blocks are rows of q."""
        problem, fields, num_blocks = self.problem, self.fields, self.fields["num_q_blocks"]
        head_block = head_by_head(index, num_blocks)
        if "heads_in_l2" in fields:
            heads = fields["num_tiles"] // num_blocks if "num_tiles" in fields else problem.batch * problem.heads_q
            head_block = lpt_order(index, num_blocks, heads, fields["heads_in_l2"])
        work = Work.from_head_block(head_block, problem.heads_q, fields.get("num_slices", 1))
        block = num_blocks - 1 - work.block
        rows = self.rows_of(block, self.tile.block_q, problem.seqlen_q)
        results = {"forward": f"out{work.part}", "lse": "lse", "backward_dq": "dq"}[self.launch.variant.op].split()
        if self.launch.variant.op == "forward" and work.part == 0:
            results.append("lse")
        yield Piece(" ".join(results), work.batch, work.head, rows, range(problem.seqlen_k))
        yield from (Rows(result, work.batch, work.head, rows) for result in results)
        if "stats_rows" in fields:
            yield from self.stats(work.batch, work.head, block * self.tile.block_q, self.tile.block_q)

    def rows_of_group(self, index: int) -> Iterator[Piece | Rows | Touch]:
        """Yields the work of few queries of all heads of a group over one split of the keys: sm80/decode.cu."""
        problem, fields, tile = self.problem, self.fields, self.tile
        rest, kv_head = divmod(index, fields["heads_kv"])
        rest, part = divmod(rest, fields["head_parts"])
        slot, split = divmod(rest, fields["splits"])
        batch, block = divmod(slot, -(-problem.seqlen_q // fields["queries"]))
        rows, heads = self.rows_of(block, fields["queries"], problem.seqlen_q), min(self.group, tile.block_q)
        tiles = covering(problem.mask.key_range(rows.start, rows.stop), tile.block_k)
        most = max(min(fields["splits"], -(-len(tiles) // LEAST_TILES)), 1)
        each = max(-(-len(tiles) // most), 1)
        num_splits = max(-(-len(tiles) // each), 1)
        mine = tiles[split * each : (split + 1) * each] if split < num_splits else range(0)
        keys = range(mine.start * tile.block_k, min(mine.stop * tile.block_k, problem.seqlen_k)) if mine else range(0)
        first = part * tile.block_q
        for head in range(first, min(first + heads, self.group)):
            yield Piece("out0 lse", batch, kv_head * self.group + head, rows, keys)
            if split == num_splits - 1:
                yield from (Rows(result, batch, kv_head * self.group + head, rows) for result in ("out0", "lse"))
        if 1 < num_splits > split:
            number = (slot * fields["head_parts"] + part) * fields["heads_kv"] + kv_head
            begin, count = (number * fields["splits"] + split) * tile.block_q, len(rows) * heads
            yield Touch("store", "partial_sums", slice(2 * begin, 2 * (begin + count)))
            yield Touch("store", "partial_out", slice(begin * tile.head_dim_v, (begin + count) * tile.head_dim_v))

    def key_block(self, index: int) -> Iterator[Piece | Rows | Touch]:
        """Yields the work of a key block, for all kernels except the sm90 kernel of all gradients."""
        problem, fields, tile, splits = self.problem, self.fields, self.tile, self.fields.get("splits", 1)
        results = {"backward": "dq dk dv", "backward_dkdv": "dk dv", "backward_dk": "dk", "backward_dv": "dv"}
        expected = results[self.launch.variant.op]
        heads = problem.batch * problem.heads_kv * splits
        slot, part = divmod(index, sharers := 2 if getattr(tile, "shares_heads", False) else 1)
        head_block = lpt_order(slot, fields["num_k_blocks"], heads, fields["heads_in_l2"])
        work = Work.from_head_block(head_block, problem.heads_kv, splits)
        keys = self.rows_of(work.block, tile.block_k, problem.seqlen_k)
        of_split = -(-self.group // splits)
        first, end = (work.part * of_split, min((work.part + 1) * of_split, self.group))
        if sharers > 1:
            first, end = (self.group * p // sharers for p in (part, part + 1))
            columns = tile.head_dim if expected == "dk" else tile.head_dim_v
            yield Touch(
                "count", "semaphores", slice(fields["first_semaphore"] + slot, fields["first_semaphore"] + slot + 1)
            )
            yield Touch("turn", f"{expected}_acc", slice(slot * 128 * columns, (slot + 1) * 128 * columns))
        for head in range(work.head * self.group + first, work.head * self.group + end):
            for m in covering(problem.mask.row_range(keys.start, keys.stop), tile.block_q):
                rows = self.rows_of(m, tile.block_q, problem.seqlen_q)
                yield Piece(expected, work.batch, head, rows, keys)
                yield from self.stats(work.batch, head, m * tile.block_q, tile.block_q)
                if "dq" in expected:
                    acc = self.query_head(work.batch, head)
                    yield from self.strips("add", "dq_acc", acc, problem.seqlen_q, rows, tile.head_dim)
        for result, columns in (("dk", tile.head_dim), ("dv", tile.head_dim_v)):
            if f"{result}_acc" in self.plan.workspace and sharers == 1:
                head = (work.batch * problem.heads_kv + work.head) * splits + work.part
                yield from self.strips("store", f"{result}_acc", head, problem.seqlen_k, keys, columns)
            elif result in expected:
                yield Rows(result, work.batch, work.head, keys)

    def half_of_keys(self, index: int) -> Iterator[Piece | Rows | Touch]:
        """Yields the work of a thread block in a cluster of two, which share the keys of a key block."""
        problem, fields, tile = self.problem, self.fields, self.tile
        heads, half = problem.batch * problem.heads_kv, tile.block_k // 2
        head_block = lpt_order(index // 2, fields["num_k_blocks"], heads, fields["heads_in_l2"])
        work = Work.from_head_block(head_block, problem.heads_kv)
        keys = self.rows_of(work.block, tile.block_k, problem.seqlen_k)
        half_keys = keys[index % 2 * half :][:half]
        for head in range(work.head * self.group, (work.head + 1) * self.group):
            for m in covering(problem.mask.row_range(keys.start, keys.stop), tile.block_q):
                rows = self.rows_of(m, tile.block_q, problem.seqlen_q)
                yield Piece("dq dk dv", work.batch, head, rows, half_keys)
                yield from self.stats(work.batch, head, m * tile.block_q, tile.block_q)
                acc = self.query_head(work.batch, head)
                yield from self.strips("add", "dq_acc", acc, problem.seqlen_q, rows, tile.head_dim)
        if half_keys:
            yield from (Rows(result, work.batch, work.head, half_keys) for result in ("dk", "dv"))

    def rows_of_gradient(self, index: int) -> Iterator[Piece | Rows | Touch]:
        """Returns the work of a block of backward_dq_dkv: of queries for dq, and of keys for dk and dv."""
        return self.query_block(index) if self.tile.gradient == "dq" else self.key_block(index)

    def key_blocks(self, index: int) -> Iterator[tuple[int, tuple[int, int]]]:
        """Yields (key block, range of its steps) of a thread block on Hopper. Steps are query tiles over all heads."""
        fields, past = self.fields, 1 << 30
        if index >= fields["whole_blocks"]:
            all_steps = fields["num_q_blocks"] * self.group
            begin = (index - fields["whole_blocks"]) * fields["shared_steps"]
            last = min(begin + fields["shared_steps"], fields["shared_keys"] * all_steps) - 1
            for nth in range(begin // all_steps, last // all_steps + 1):
                steps = max(begin - nth * all_steps, 0), min(last + 1 - nth * all_steps, all_steps)
                yield fields["shared_first"] + nth, steps
            return
        problem, per_head = self.problem, fields["num_k_blocks"]
        num_parts = -(-per_head // fields["key_blocks"])
        slot = index >> fields["parts_log2"]
        head, part = lpt_order(slot, num_parts, problem.batch * problem.heads_kv, fields["heads_in_l2"])
        first = head * per_head + part * fields["key_blocks"]
        for block in range(first, min(first + fields["key_blocks"], (head + 1) * per_head)):
            yield block, (0, past)

    def steps_of_keys(self, index: int) -> Iterator[Piece | Rows | Touch]:
        """Yields the work of a thread block of the sm90 kernel for all gradients."""
        problem, fields, tile = self.problem, self.fields, self.tile
        num_blocks, by_rows = fields["num_q_blocks"], tile.block_q == 128  # or by whole panels of columns
        dq_floats = tile.block_q * (tile.head_dim if by_rows else -(-tile.head_dim // 64) * 64)
        for number, (begin, end) in self.key_blocks(index):
            work = Work.from_head_block(head_by_head(number, fields["num_k_blocks"]), problem.heads_kv)
            keys = self.rows_of(work.block, tile.block_k, problem.seqlen_k)
            tiles = covering(problem.mask.row_range(keys.start, keys.stop), tile.block_q)
            steps = [(work.head * self.group + i, m) for i in range(self.group) for m in tiles]
            slot, part = divmod(index, 1 << fields["parts_log2"])
            if fields["parts_log2"]:
                begin, end = ((self.group * p >> fields["parts_log2"]) * len(tiles) for p in (part, part + 1))
            for head, m in steps[begin:end]:
                rows, nth = self.rows_of(m, tile.block_q, problem.seqlen_q), self.query_head(work.batch, head)
                yield Piece("dq dk dv", work.batch, head, rows, keys)
                yield Rows("dq", work.batch, head, rows)
                yield from self.stats(work.batch, head, m * tile.block_q, tile.block_q)
                nth = nth * num_blocks + m
                yield Touch("count", "semaphores", slice(nth, nth + 1))
                yield Touch("turn", "dq_acc", slice(nth * dq_floats, (nth + 1) * dq_floats))
            if fields["parts_log2"] or steps[begin:end] != steps:  # other blocks take steps of these keys, too
                nth = slot if fields["parts_log2"] else number - fields["shared_first"]
                first = problem.batch * problem.heads_q * num_blocks + nth
                yield Touch("count", "semaphores", slice(first, first + 1))
                for part, columns in (("dk_acc", tile.head_dim), ("dv_acc", tile.head_dim_v)):
                    floats = tile.block_k * columns
                    yield Touch("turn", part, slice(nth * floats, (nth + 1) * floats))
            yield from (Rows(result, work.batch, work.head, keys) for result in ("dk", "dv"))


ONE_BLOCK: dict[str, Callable[[Walk, int], Iterator[Piece | Rows | Touch]]] = {
    "sm80/forward.cu": Walk.query_block,
    "sm80/lse.cu": Walk.query_block,
    "sm80/decode.cu": Walk.rows_of_group,
    "sm90/forward/forward.cu": Walk.query_block,
    "sm90/forward/lse.cu": Walk.query_block,
    "portable/delta.cu": Walk.delta,
    "portable/convert.cu": Walk.convert,
    "sm80/backward.cu": Walk.key_block,
    "sm80/backward_dq.cu": Walk.query_block,
    "sm90/backward/backward.cu": Walk.steps_of_keys,
    "sm90/backward_cluster/backward_cluster.cu": Walk.half_of_keys,
    "sm90/backward_dq_dkv/backward_dq_dkv.cu": Walk.rows_of_gradient,
}
