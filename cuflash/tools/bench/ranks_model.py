"""Computed time of `cuflash.distributed.attention` by ranks: plans, tiles in waves, and bytes over links.

A step of the ring takes max(kernel + accumulation + SMs that the transfer holds x its time, transfer). Ulysses takes
exchange + packing + kernel; "ulysses x ring" has Ulysses within a host and the ring between hosts. Skew, congestion
and slow ranks are not in it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ...distributed.choice import kv_copies, ulysses_lacks
from ...distributed.layout import Layout
from ...distributed.rectangles import Range, Window, needed_keys, pieces_of, rectangles
from ...distributed.work import plan as plan_of_ranks
from ...ops.plan import plan
from ...planning.device import named
from .ranks_problems import Heads, Work

ARCH = "sm_90"
NUM_SMS = named(ARCH).num_sms
ITEMSIZE = 2
REFERENCE_ROWS, REFERENCE_HEADS = 16384, 16  # of the full call whose rate a cluster has
LAUNCH_SECONDS = 5e-6
# Bytes of memory to convert, pack and add up an element of a gathered key's gradient.
RETURNED_BYTES = 10.0
# Cost of a tile beyond its steps, in steps: first loads and the store; and the masked steps, which a causal call adds.
# They fit the recorded rates of the H200 within 5 % from 1k to 16k rows, and 8 % at 512.
TILE_STEPS = {"forward": 0.9, "backward": 0.5}
MASKED_STEPS = 0.8
# Bytes of memory for each element of out in backward: delta reads out and dout, dq in float32 is cleared and converted.
BACKWARD_BYTES = 14.0
SAMPLED_RANKS = 8
MOST_ROWS = 1 << 20  # of a plan: tiles are those of shorter calls
OF_HOSTS = "ulysses x ring"
Numbers = NDArray[np.int64]


class Cluster(NamedTuple):
    """GPUs and links, in operations, bytes and seconds.

    forward, backward: FLOP/s of a full call of 16k rows and 16 heads. memory: bytes read and written a second.
    within, between: bytes a second of a GPU's links in one direction, within a host and between hosts. host: GPUs of a
    host. alpha: seconds before the first byte. held_sms: SMs that a transfer holds.
    """

    forward: float = 721e12
    backward: float = 605e12
    memory: float = 4.2e12
    within: float = 300e9
    between: float = 50e9
    host: int = 8
    alpha: float = 15e-6
    held_sms: int = 16


class Way(NamedTuple):
    """Transfers and sums of a ring.

    overlap: True if keys travel beside the kernels. forward, backward: bytes of memory to add up an element of out or
    dq in a step. hidden: share of them that runs beside products. sums: bytes to clear, and later to add up, an
    element of dk and dv.
    """

    overlap: bool = True
    forward: float = 6.0
    backward: float = 40.0
    hidden: float = 0.6
    sums: tuple[float, float] = (4.0, 12.0)


# These bytes are 1.03 of a backward call of 16k rows; on an H200 `accumulate` costs 1.03 to 1.05.
IN_KERNELS = Way()
# PyTorch's operations and copies, and keys sent after each kernel; forward alone. 18 passes of float32 fit 0.62 and
# 0.86 of one GPU's rate, measured on four H200 at 16k rows of 16 heads and 64k of 8.
NAIVE = Way(overlap=False, forward=72.0, hidden=0.0)


class Part(NamedTuple):
    """Rows and keys of one sequence of a call; offset: diagonal offset of its window."""

    rows: int
    keys: int
    offset: int = 0


class Share(NamedTuple):
    """Seconds of a rank, and the share of one GPU's rate for the whole problem."""

    seconds: float
    share: float


@lru_cache(1 << 14)
def kernel_seconds(cluster: Cluster, op: str, heads: Heads, window: Window, parts: tuple[Part, ...]) -> float:
    """Returns seconds of one call over these sequences."""
    if not parts:
        return 0.0
    scores, passes = _load(op, heads, window, parts)
    return LAUNCH_SECONDS + passes / cluster.memory + scores * _seconds_per_score(cluster, op, heads.dim)


@lru_cache
def _seconds_per_score(cluster: Cluster, op: str, head_dim: int) -> float:
    """Returns seconds of an SM for a score, from the rate of the reference call."""
    rows, heads = REFERENCE_ROWS, REFERENCE_HEADS
    scores, passes = _load(op, Heads(heads, heads, head_dim), Window(), (Part(rows, rows),))
    flops = 4.0 * rows**2 * heads * head_dim * (1 if op == "forward" else 2.5)
    seconds: float = flops / getattr(cluster, op) - LAUNCH_SECONDS - passes / cluster.memory
    return seconds / scores


def _load(op: str, heads: Heads, window: Window, parts: tuple[Part, ...]) -> tuple[float, float]:
    """Returns the scores of the busiest SM, with the costs of its tiles, and the bytes of passes over memory."""
    longest = max(parts, key=lambda part: part.rows * part.keys)
    # Powers of 2, as tiles depend on few lengths.
    rows, keys = (min(1 << (length - 1).bit_length(), MOST_ROWS) for length in (longest.rows, longest.keys))
    block_q, block_k = _tile(op, heads, rows, keys, window)
    steps = _steps_of_tiles(op, window, np.array(parts, np.int64), block_q, block_k)
    most = float(steps.max(initial=0.0))
    # Full forward calls have equal tiles, whose number is no multiple of the SMs. Backward shares the last ones.
    if op == "forward" and len(parts) == 1 and window.is_open:
        load = math.ceil(steps.size * heads.q / NUM_SMS) * most
    else:
        load = max(float(steps.sum()) * heads.q / NUM_SMS, most)
    elements = sum(part.rows for part in parts) * heads.q * heads.dim
    return load * block_q * block_k, 0.0 if op == "forward" else BACKWARD_BYTES * elements


@lru_cache(4096)
def _tile(op: str, heads: Heads, rows: int, keys: int, window: Window) -> tuple[int, int]:
    """Returns the queries and keys of a tile of the plan."""
    q, kv = (1, rows, heads.q, heads.dim), (1, keys, heads.kv, heads.dim)
    options: dict[str, Any] = {"op": op, "dtype": "bfloat16", "device": ARCH, "window_size": tuple(window)}
    variant = plan(q, kv, kv, **options).variant
    assert variant is not None
    assert variant.tile is not None
    return variant.tile.block_q, variant.tile.block_k


def _steps_of_tiles(op: str, window: Window, parts: Numbers, block_q: int, block_k: int) -> NDArray[np.float64]:
    """Returns the steps of each tile of a head: forward has tiles of queries, backward of keys."""
    (rows, keys, offset), (left, right) = parts.T, window
    if op == "backward":
        left, right, offset, rows, keys, block_q, block_k = right, left, -offset, keys, rows, block_k, block_q
    counts = -(-rows // block_q)
    rows, keys, offset, before = (np.repeat(x, counts) for x in (rows, keys, offset, np.cumsum(counts) - counts))
    begin = (np.arange(rows.size) - before) * block_q
    end = np.minimum(begin + block_q, rows)
    first = np.zeros_like(keys) if left is None else np.clip(begin + offset - left, 0, keys)
    last = keys if right is None else np.clip(end + offset + right, 0, keys)
    extra = TILE_STEPS[op] + (0.0 if window.is_open else MASKED_STEPS)
    return np.where(last > first, -(-last // block_k) - first // block_k + extra, 0.0)


def one_gpu_seconds(cluster: Cluster, work: Work, ranks: int, op: str) -> float:
    """Returns seconds of the whole problem of so many ranks on one GPU."""
    return kernel_seconds(cluster, op, work.heads, work.mask, _documents(work.layout(ranks).cu_seqlens))


def _documents(bounds: tuple[int, ...]) -> tuple[Part, ...]:
    return tuple(Part(end - begin, end - begin) for begin, end in pairwise(bounds))


def ring_seconds(
    cluster: Cluster, layout: Layout, mask: Window, heads: Heads, op: str, link: float, way: Way = IN_KERNELS
) -> float:
    """Returns seconds of "ring". In each step the slowest rank counts, of at most SAMPLED_RANKS ranks."""
    ranks, rows = layout.ranks, layout.num_rows(0)
    elements, elements_kv = rows * heads.q * heads.dim, 2 * rows * heads.kv * heads.dim
    keys, sums = (cluster.alpha + itemsize * elements_kv / link for itemsize in (ITEMSIZE, 4))
    held, passes = cluster.held_sms / NUM_SMS, 0.0
    seconds = 0.0
    for step in range(ranks):
        compute = max(_step_seconds(cluster, layout, mask, heads, op, way, rank, step) for rank in _sampled(ranks))
        transfer = keys if step < ranks - 1 else 0.0
        if op == "backward":  # sums for the keys of the step before travel beside the kernels
            transfer += sums if step else 0.0
            passes += (way.sums[0] + way.sums[1] * (step > 0)) * elements_kv
        if way.overlap:
            seconds += max(compute + held * transfer, transfer)
        else:
            seconds += compute + transfer
    if ranks > 1:  # keys are packed; float32 becomes 16 bits; gradients of keys travel home in 16 bits
        passes += 2 * ITEMSIZE * elements_kv + 6 * elements
        seconds += keys if op == "backward" else 0.0
    return seconds + passes / cluster.memory


def _step_seconds(
    cluster: Cluster, layout: Layout, mask: Window, heads: Heads, op: str, way: Way, rank: int, step: int
) -> float:
    """Returns seconds of a rank's calls over the keys of one rank."""
    added = getattr(way, op) * heads.q * heads.dim * (1 - way.hidden) / cluster.memory  # of a row
    if step == 0 and mask.left is None:
        seconds = kernel_seconds(cluster, op, heads, mask, _documents(layout.local_bounds(rank)))
        return seconds + (layout.num_rows(rank) * added if op == "backward" else 0.0)
    seconds = 0.0
    for part in rectangles(layout, rank, (rank - step) % layout.ranks, mask):
        rows, keys = part.q[1] - part.q[0], part.k[1] - part.k[0]
        window = Window() if part.diagonal_offset is None else mask
        seconds += kernel_seconds(cluster, op, heads, window, (Part(rows, keys, part.diagonal_offset or 0),))
        seconds += rows * added
    return seconds


def _sampled(ranks: int) -> list[int]:
    return sorted({ranks * i // SAMPLED_RANKS for i in range(SAMPLED_RANKS)} | {ranks - 1})


def exchange_seconds(cluster: Cluster, num_bytes: float, ranks: int) -> float:
    """Returns seconds of an all-to-all. Links within a host and between hosts work side by side."""
    outside = max(ranks - cluster.host, 0) / max(ranks - 1, 1)
    return cluster.alpha + num_bytes * max(outside / cluster.between, (1 - outside) / cluster.within)


def _to_heads_seconds(cluster: Cluster, layout: Layout, heads: Heads) -> float:
    """Returns seconds to send heads for rows and back. Each array is packed, sent and put in order."""
    each = plan_of_ranks(layout, heads.q, heads.kv, heads.dim, scheme="ulysses", causal=True, itemsize=ITEMSIZE)
    heads_kv = heads.kv * kv_copies(heads.q, heads.kv, layout.ranks)
    num_bytes = ITEMSIZE * layout.num_rows(0) * heads.dim * 2 * (heads.q + heads_kv)
    transfers = exchange_seconds(cluster, each.ranks[0].bytes_received, layout.ranks) + 3 * cluster.alpha
    return transfers + 4 * num_bytes / cluster.memory


def ulysses_seconds(cluster: Cluster, layout: Layout, mask: Window, heads: Heads, op: str) -> float:
    """Returns seconds of "ulysses": as many bytes in backward as in forward, as q, k and v stay."""
    ranks = layout.ranks
    some = Heads(heads.q // ranks, heads.kv * kv_copies(heads.q, heads.kv, ranks) // ranks, heads.dim)
    kernel = kernel_seconds(cluster, op, some, mask, _documents(layout.cu_seqlens))
    return _to_heads_seconds(cluster, layout, heads) + kernel


def gather_seconds(cluster: Cluster, layout: Layout, mask: Window, heads: Heads, op: str) -> float:
    """Returns seconds of the slowest rank of "gather"."""
    seconds, row_bytes, spans = [], 2 * heads.kv * heads.dim * ITEMSIZE, _spans(layout)
    for rank in range(layout.ranks) if layout.is_packed else _sampled(layout.ranks):
        near, far = _fetched_rows(cluster.host, spans, needed_keys(layout, rank, mask), rank)
        transfer = max(near / cluster.within, far / cluster.between) * row_bytes + 2 * cluster.alpha
        parts = tuple(
            Part(piece.local[1] - piece.local[0], piece.keys[1] - piece.keys[0], piece.q_index - piece.k_index)
            for piece in pieces_of(layout, rank, mask)
        )
        keys = sum(part.keys for part in parts)
        copied = 2 * row_bytes * keys / cluster.memory  # read and written
        if op == "backward":  # keys are fetched again; their gradients travel home in float32
            transfer *= 1 + 4 / ITEMSIZE
            copied += RETURNED_BYTES / ITEMSIZE * row_bytes * keys / cluster.memory
        seconds.append(transfer + copied + kernel_seconds(cluster, op, heads, mask, parts))
    return max(seconds)


def _fetched_rows(
    host: int, spans: tuple[Numbers, Numbers, Numbers], needed: list[Range], rank: int
) -> tuple[int, int]:
    """Returns the rows that a rank fetches within its host and from other hosts."""
    (begins, ends, ranks), near, far = spans, 0, 0
    for begin, end in needed:
        some = slice(int(np.searchsorted(ends, begin, "right")), int(np.searchsorted(begins, end)))
        rows, holders = np.minimum(ends[some], end) - np.maximum(begins[some], begin), ranks[some]
        is_far = holders // host != rank // host
        far += int(rows[is_far].sum())
        near += int(rows[~is_far & (holders != rank)].sum())
    return near, far


def _spans(layout: Layout) -> tuple[Numbers, Numbers, Numbers]:
    """Returns the first row, the end and the rank of all spans, in the order of the sequence."""
    spans = sorted((span.begin, span.end, rank) for rank in range(layout.ranks) for span in layout.spans[rank])
    begins, ends, ranks = np.array(spans, np.int64).T
    return begins, ends, ranks


def _of_hosts_seconds(cluster: Cluster, work: Work, ranks: int, op: str) -> float:
    """Returns seconds of Ulysses within each host and the ring between hosts."""
    host, heads = cluster.host, work.heads
    some = Heads(heads.q // host, heads.kv * kv_copies(heads.q, heads.kv, host) // host, heads.dim)
    ring = ring_seconds(cluster, work.layout(ranks, ranks // host), work.mask, some, op, cluster.between)
    return _to_heads_seconds(cluster, Layout(work.rows * host, host), heads) + ring


def shares(cluster: Cluster, work: Work, ranks: int, ops: tuple[str, ...]) -> dict[str, Share]:
    """Returns seconds and share of each scheme that so many ranks can run, over all of these ops."""
    layout, mask, heads = work.layout(ranks), work.mask, work.heads
    alone = sum(one_gpu_seconds(cluster, work, ranks, op) for op in ops) / ranks
    link = cluster.within if ranks <= cluster.host else cluster.between
    schemes: dict[str, Callable[[str], float]] = {
        "ring": lambda op: ring_seconds(cluster, layout, mask, heads, op, link),
    }
    if ulysses_lacks(heads.q, ranks) is None:
        schemes["ulysses"] = lambda op: ulysses_seconds(cluster, layout, mask, heads, op)
    # A window or short documents need keys of few ranks, a causal mask those of all, which a rank then holds.
    is_local, is_host = bool(work.mean_document or work.window), ranks <= cluster.host
    if is_local or is_host:
        schemes["gather"] = lambda op: gather_seconds(cluster, layout, mask, heads, op)
    if is_local and not is_host:
        del schemes["ring"]
    elif ranks % cluster.host == 0 and not is_host and ulysses_lacks(heads.q, cluster.host) is None:
        schemes[OF_HOSTS] = lambda op: _of_hosts_seconds(cluster, work, ranks, op)
    if ranks == 1:
        return dict.fromkeys(schemes, Share(alone, 1.0))
    seconds = {name: sum(map(run, ops)) for name, run in schemes.items()}
    return {name: Share(x, alone / x) for name, x in seconds.items()}
