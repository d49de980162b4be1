"""Layouts: the rows of one sequence, or of packed documents, that each rank of a group holds. Integers alone."""

from __future__ import annotations

import hashlib
import heapq
import sys
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from copy import copy
from itertools import pairwise
from typing import Any, Literal, NamedTuple, TypeVar, get_args

import numpy as np

from ..errors import ProblemError
from ..problem.options import check_integer
from ..units import kind_of

Kind = Literal["zigzag", "contiguous", "balanced"]
KINDS: tuple[Kind, ...] = get_args(Kind)
CHUNK = 4096  # rows of a chunk of "balanced": work then differs by 1 to 5 % between ranks, keys travel once
Array = TypeVar("Array")
Rows = np.ndarray[Any, np.dtype[np.int64]]


class Span(NamedTuple):
    """Consecutive rows `begin … end - 1` of the sequence, which a rank holds as its rows `local … `."""

    begin: int
    end: int
    local: int

    @property
    def size(self) -> int:
        """The number of rows."""
        return self.end - self.begin


class Layout:
    """Rows of one sequence, or of packed documents, that each rank of a group holds.

    Parameters
    ----------
    seqlen : int, or sequence of ints (documents + 1,)
        Length of the whole sequence, or `cu_seqlens`: 0, then the running sum of the lengths of packed documents.
        These are integers in host memory, as a data loader has them: all ranks compute the same layout from them.
    ranks : int, ProcessGroup or DeviceMesh
        Number of ranks, or the group. A group also gives this process's rank. The layout does not hold the group, and
        can be pickled.
    kind : {"zigzag", "contiguous", "balanced"}, default "zigzag"
        "zigzag" cuts the rows into 2 ranks chunks and gives rank r chunks r and 2 ranks - 1 - r, which balances causal
        work. "contiguous" gives each rank one chunk. "balanced" assigns chunks of documents by their causal work.
    rank : int, optional
        This process's rank; by default that of the group.
    chunk : int, default 4096
        Most rows of a chunk of "balanced".
    runs : sequence of sequences of (begin, end), optional
        For each rank the runs of rows begin … end - 1 that it holds, ascending, in place of a kind: any other layout.

    Attributes
    ----------
    cu_seqlens : tuple of int
        Bounds of the documents; (0, seqlen) for one sequence.
    seqlen, ranks, kind, rank, chunk
        As given; rank is None where neither a rank nor a group was, and kind is "runs" where runs were.
    rows : tuple of int
        The numbers of rows of all ranks.
    spans : tuple of tuple of Span
        For each rank the runs of rows (begin, end, local) that it holds, ascending.

    Raises
    ------
    ProblemError
        For lengths that are negative or decrease, a rank outside the group, an unknown kind, or runs that do not hold
        each row once.

    Notes
    -----
    Any length works, also one that ranks do not divide: ranks then hold different numbers of rows. Chunks are balanced
    by the longest-processing-time-first rule (Graham, 1969).

    Examples
    --------
    >>> from cuflash.distributed import Layout
    >>> layout = Layout(12, ranks=2)
    >>> [layout.indices(rank).tolist() for rank in range(2)]
    [[0, 1, 2, 9, 10, 11], [3, 4, 5, 6, 7, 8]]
    >>> Layout([0, 5, 12], ranks=2).positions(0).tolist()
    [0, 1, 2, 4, 5, 6]
    >>> Layout(12, ranks=2, runs=[[(0, 2), (4, 8)], [(2, 4), (8, 12)]]).indices(0).tolist()
    [0, 1, 4, 5, 6, 7]
    """

    def __init__(
        self,
        seqlen: int | Sequence[int],
        ranks: Any,
        kind: Kind = "zigzag",
        *,
        rank: int | None = None,
        chunk: int = CHUNK,
        runs: Sequence[Sequence[tuple[int, int]]] | None = None,
    ) -> None:
        if kind not in KINDS:
            raise ProblemError(f"kind={kind!r} is no layout; give one of {', '.join(map(repr, KINDS))}")
        group_rank = None
        if ranks is None:
            raise ProblemError(
                "ranks is None, as torch.distributed.group.WORLD is before init_process_group; call that first, or "
                "give the number of ranks"
            )
        if hasattr(ranks, "size") and not isinstance(ranks, np.generic):
            ranks, group_rank = _size_and_rank(ranks)
        self.ranks = check_integer("ranks", ranks)
        if self.ranks < 1:
            raise ProblemError(f"ranks={ranks} is below 1; give the number of processes that share the sequence")
        self.cu_seqlens, self.kind = _bounds(seqlen), kind if runs is None else "runs"
        self.seqlen = self.cu_seqlens[-1]
        self.bounds = np.array(self.cu_seqlens, np.int64)  # an array is no constant of a graph of torch.compile
        self.rank = group_rank if rank is None else self._checked(rank)
        chunk = check_integer("chunk", chunk)
        if chunk < 1:
            raise ProblemError(f"chunk={chunk} is below 1; give the most rows of a chunk")
        self.chunk = chunk
        self._hold(map(_spans, self._runs() if runs is None else self._checked_runs(runs)))

    def _hold(self, spans: Iterable[tuple[Span, ...]]) -> None:
        """Sets the rows of all ranks, and what ranks must agree on."""
        self.spans = tuple(spans)
        self.rows = tuple(sum(span.size for span in each) for each in self.spans)
        self.key = self.kind, self.ranks, self.cu_seqlens, self.spans
        self._hash: int | None = None

    def _runs(self) -> list[list[tuple[int, int]]]:
        """Returns the runs of rows of each rank, ascending."""
        ranks, total, chunk = self.ranks, self.seqlen, self.chunk

        def cuts(count: int) -> list[tuple[int, int]]:
            return list(pairwise(total * i // count for i in range(count + 1)))

        if self.kind == "contiguous":
            return [[run] for run in cuts(ranks)]
        if self.kind == "zigzag":
            runs = cuts(2 * ranks)
            return [[runs[r], runs[-1 - r]] for r in range(ranks)]
        chunks = cuts(ranks * max(-(-total // (chunk * ranks)), 1))
        each = len(chunks) // ranks
        # Ranks take the longest remaining chunk in turns by their work so far; all get equally many chunks.
        assigned: list[list[tuple[int, int]]] = [[] for _ in range(ranks)]
        by_work = [(0, r) for r in range(ranks)]
        for run in sorted(chunks, key=lambda run: (-self._work(*run), run)):
            work, r = heapq.heappop(by_work)
            assigned[r].append(run)
            if len(assigned[r]) < each:
                heapq.heappush(by_work, (work + self._work(*run), r))
        return [sorted(runs) for runs in assigned]

    def _checked_runs(self, runs: Sequence[Sequence[tuple[int, int]]]) -> list[list[tuple[int, int]]]:
        """Returns the caller's runs, without empty ones."""
        if len(runs) != self.ranks:
            raise ProblemError(f"runs are for {len(runs)} ranks, but ranks={self.ranks}; give the runs of each rank")
        checked = [[(check_integer("runs", a), check_integer("runs", b)) for a, b in each if a != b] for each in runs]
        ordered = sorted(run for each in checked for run in each)
        borders = [0, *(end for _, end in ordered)]
        ascending = borders == sorted(borders) and all(each == sorted(each) for each in checked)
        if not ascending or ordered != list(pairwise(borders)) or borders[-1] != self.seqlen:
            raise ProblemError(
                f"runs do not hold each of {self.seqlen} rows once, or do not ascend within a rank; give (begin, end) "
                "for rows begin to end - 1"
            )
        return checked

    def _work(self, begin: int, end: int) -> int:
        """Returns the pairs of a query in these rows and a key that a causal mask shows it."""
        return sum(
            (last - first) * (first + last - 2 * document + 1) // 2 for first, last, document in self.pieces(begin, end)
        )

    def pieces(self, begin: int, end: int) -> Iterator[tuple[int, int, int]]:
        """Cuts rows at the borders of documents: yields (begin, end, first row of the document) of each piece."""
        number = bisect_right(self.cu_seqlens, begin) - 1
        while begin < end:
            last = min(end, self.cu_seqlens[number + 1])
            if begin < last:
                yield begin, last, self.cu_seqlens[number]
            begin, number = last, number + 1

    def document_of(self, row: int) -> int:
        """Returns the first row of the document that holds a row."""
        return self.cu_seqlens[bisect_right(self.cu_seqlens, row) - 1]

    def end_of(self, document: int) -> int:
        """Returns the end of the document with this first row."""
        return self.cu_seqlens[bisect_right(self.cu_seqlens, document)]

    def _checked(self, rank: Any) -> int:
        """Returns a rank of this layout."""
        number = check_integer("rank", rank)
        if not 0 <= number < self.ranks:
            raise ProblemError(f"rank={number} is outside a group of {self.ranks}; give 0 to {self.ranks - 1}")
        return number

    def _rank(self, rank: int | None) -> int:
        """Returns `rank`, by default this process's."""
        if rank is not None:
            return self._checked(rank)
        if self.rank is None:
            raise ProblemError("the layout has no rank of this process; give rank=, or build it from the group")
        return self.rank

    def num_rows(self, rank: int | None = None) -> int:
        """Returns the number of rows that a rank holds."""
        return self.rows[self._rank(rank)]

    def indices(self, rank: int | None = None) -> Rows:
        """Returns the row of the whole sequence of each row of a rank."""
        runs = [np.arange(span.begin, span.end) for span in self.spans[self._rank(rank)]]
        return np.concatenate([np.empty(0, np.int64), *runs])

    def positions(self, rank: int | None = None) -> Rows:
        """Returns the position within its document of each row of a rank, for rotary embedding."""
        rows, begins = self.indices(rank), np.array(self.cu_seqlens[:-1], np.int64)
        return rows - begins[np.searchsorted(begins, rows, "right") - 1]

    @property
    def order(self) -> Rows:
        """The rows of the whole sequence in the order of ranks, then of their rows."""
        return np.concatenate([self.indices(rank) for rank in range(self.ranks)])

    def shard(self, x: Array, dim: int = 1, rank: int | None = None) -> Array:
        """Returns a rank's rows of an array of the whole sequence.

        Parameters
        ----------
        x : array
            Array of any library with `seqlen` elements along `dim`. Gradients flow through.
        dim : int, default 1
            Axis of the rows.
        rank : int, optional
            Rank; by default this process's.

        Returns
        -------
        array
            A new array, of the same library.
        """
        rank, data = self._rank(rank), _checked_rows(x, dim, self.seqlen)
        runs = [(span.begin, span.end) for span in self.spans[rank]] or [(0, 0)]
        shard: Array = _concat([_rows(data, dim, *run) for run in runs], dim)
        return shard

    def join(self, shards: Sequence[Array], dim: int = 1) -> Array:
        """Returns the array of the whole sequence from the rows of all ranks, in the order of ranks."""
        if len(shards) != self.ranks:
            raise ProblemError(f"{len(shards)} shards are given for {self.ranks} ranks; give one of each")
        parts: list[tuple[int, Any]] = []
        for rank, shard in enumerate(shards):
            data = _checked_rows(shard, dim, self.num_rows(rank), f"shard {rank}")
            parts += [(s.begin, _rows(data, dim, s.local, s.local + s.size)) for s in self.spans[rank]]
        parts = parts or [(0, shards[0])]
        whole: Array = _concat([part for _, part in sorted(parts, key=lambda each: each[0])], dim)
        return whole

    def joined(self, count: int) -> Layout:
        """Returns the layout of fewer ranks, each of which holds the rows of `count` consecutive ranks."""
        layout = copy(self)
        layout.ranks, layout.rank, layout.kind = self.ranks // count, None, "runs"
        parts = [sum(self.spans[first : first + count], ()) for first in range(0, self.ranks, count)]
        layout._hold(_spans(sorted((span.begin, span.end) for span in part)) for part in parts)
        return layout

    @property
    def is_packed(self) -> bool:
        """True if the sequence holds several documents, or none."""
        return len(self.cu_seqlens) != 2

    def local_bounds(self, rank: int) -> tuple[int, ...]:
        """Returns the bounds of the documents among the rows of a rank."""
        bounds, last = [0], None
        for span in self.spans[rank]:
            for _, end, document in self.pieces(span.begin, span.end):
                stop = end - span.begin + span.local
                if document == last:
                    bounds[-1] = stop
                else:
                    bounds.append(stop)
                last = document
        return tuple(bounds)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Layout) and self.key == other.key

    def __hash__(self) -> int:
        if self._hash is None:
            self._hash = hash(self.key)
        return self._hash

    def __getstate__(self) -> dict[str, Any]:
        """Returns the state to pickle: hashes of strings differ between processes."""
        return vars(self) | {"_hash": None}

    def __repr__(self) -> str:
        documents = len(self.cu_seqlens) - 1
        fewest, most = min(self.rows), max(self.rows)
        return (
            f"Layout({self.kind}, {self.seqlen} rows{f' of {documents} documents' if documents > 1 else ''}, "
            f"{self.ranks} ranks of {fewest}{f' to {most}' if most > fewest else ''} rows"
            f"{'' if self.rank is None else f', rank {self.rank}'})"
        )

    def described(self) -> str:
        """Returns a line about the layout of all ranks, with a digest of their rows."""
        of_all = copy(self)
        of_all.rank = None
        return f"{of_all!r} with digest {hashlib.sha256(repr(self.key).encode()).hexdigest()[:8]}"


def _size_and_rank(group: Any) -> tuple[int, int]:
    """Returns the size of a group of PyTorch and this process's rank in it."""
    size = group.size()
    rank = group.get_local_rank() if hasattr(group, "get_local_rank") and group.ndim == 1 else None
    if rank is None:
        if not hasattr(group, "rank"):
            raise ProblemError(f"ranks={group!r} has {group.ndim} axes; give a 1-D mesh, or mesh[name] of one axis")
        rank = group.rank()
    if not 0 <= rank < size:
        raise ProblemError("this process is no member of the group; build the layout of a group that it belongs to")
    return size, rank


def _bounds(seqlen: Any) -> tuple[int, ...]:
    """Returns the bounds of the documents."""
    if hasattr(seqlen, "shape") and seqlen.shape != ():
        if not isinstance(seqlen, np.ndarray):
            raise ProblemError(
                f"cu_seqlens is {kind_of(seqlen)}; give a list of integers in host memory (tolist()), from which all "
                "ranks compute the same layout"
            )
        seqlen = seqlen.tolist()
    if not isinstance(seqlen, (list, tuple)):
        length = check_integer("seqlen", seqlen)
        if length < 0:
            raise ProblemError(f"seqlen={length} is negative; give the number of rows of the whole sequence")
        return 0, length
    bounds = tuple(check_integer("cu_seqlens", x) for x in seqlen)
    if len(bounds) < 2 or bounds[0] != 0 or any(a > b for a, b in pairwise(bounds)):
        raise ProblemError(
            f"cu_seqlens is {bounds if len(bounds) <= 8 else f'({bounds[0]}, {bounds[1]}, …)'}; give 0, then the "
            "running sum of the lengths of all documents"
        )
    return bounds


def _spans(runs: list[tuple[int, int]]) -> tuple[Span, ...]:
    """Returns runs that hold rows as spans; adjacent ones become one."""
    spans: list[Span] = []
    local = 0
    for begin, end in runs:
        if spans and spans[-1].end == begin:
            spans[-1] = spans[-1]._replace(end=end)
        elif begin < end:
            spans.append(Span(begin, end, local))
        local += end - begin
    return tuple(spans)


def _checked_rows(x: Any, dim: int, rows: int, name: str = "x") -> Any:
    if not hasattr(x, "shape") or not -len(x.shape) <= dim < len(x.shape):
        raise ProblemError(f"{name} is {kind_of(x)} without an axis {dim}; give an array of any library and its dim")
    if x.shape[dim] != rows:
        raise ProblemError(f"{name} has {x.shape[dim]} rows along axis {dim}, but the layout has {rows}")
    return x


def _rows(x: Any, dim: int, begin: int, end: int) -> Any:
    """Returns a view of some rows along an axis."""
    return x[(slice(None),) * (dim % len(x.shape)) + (slice(begin, end),)]


def _concat(parts: list[Any], dim: int) -> Any:
    """Concatenates arrays of any library along an axis, always into a new array."""
    if (torch := sys.modules.get("torch")) is not None and torch.is_tensor(parts[0]):
        return torch.cat(parts, dim)
    return parts[0].__array_namespace__().concat(parts, axis=dim)
