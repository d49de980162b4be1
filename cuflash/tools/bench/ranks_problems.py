"""Problems of `cuflash bench ranks`: a causal mask, a window and packed documents, by tokens of a rank."""

from __future__ import annotations

import math
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from ...distributed.layout import Kind, Layout
from ...distributed.rectangles import Window
from ...errors import ProblemError
from .pictures import short

NAME = "ranks"
OPS = {"forward": ("forward",), "both": ("forward", "backward")}
ROWS = 16384, 65536
WINDOW, DOCUMENT = 4096, 4096
DOCUMENTS_SEED, DOCUMENTS_SIGMA = 0, 1.0


class Heads(NamedTuple):
    """Heads and head dim of a call."""

    q: int
    kv: int
    dim: int


class Work(NamedTuple):
    """A problem for any number of ranks. rows: tokens of a rank. window: keys to the left. mean_document: in tokens."""

    name: str
    rows: int
    heads: Heads
    kind: Kind = "zigzag"
    window: int | None = None
    mean_document: int | None = None

    @property
    def mask(self) -> Window:
        """The causal mask or window."""
        return Window(self.window, 0)

    def layout(self, ranks: int, hosts: int | None = None) -> Layout:
        """Returns the rows of each rank, or of each host; documents have log-normal lengths."""
        return _layout(self, ranks, hosts or ranks)


@lru_cache(64)
def _layout(work: Work, ranks: int, parts: int) -> Layout:
    total = work.rows * ranks
    return Layout(total if work.mean_document is None else documents(total, work.mean_document), parts, work.kind)


def documents(total: int, mean: int) -> list[int]:
    """Returns the bounds of packed documents with log-normal lengths, equal on all ranks."""
    rng, bounds = np.random.default_rng(DOCUMENTS_SEED), [0]
    while bounds[-1] < total:
        length = rng.lognormal(math.log(mean) - DOCUMENTS_SIGMA**2 / 2, DOCUMENTS_SIGMA)
        bounds.append(min(bounds[-1] + max(int(length), 1), total))
    return bounds


def selected(works: list[Work], text: str) -> list[Work]:
    """Returns the problems with a text in their name."""
    some = [work for work in works if text.lower() in work.name.lower()]
    if not some:
        raise ProblemError(
            f"no problem of {NAME} has {text!r} in its name; there are {', '.join(x.name for x in works)}"
        )
    return some


def kinds(rows: tuple[int, ...], heads: Heads, window: int = WINDOW, document: int = DOCUMENT) -> list[Work]:
    """Returns the three kinds of problems, by tokens of a rank."""
    works = []
    for tokens in rows:
        name = f"{short(tokens)} tokens, {heads.q}/{heads.kv} heads"
        works += [
            Work(f"causal, {name}", tokens, heads),
            Work(f"window, {name}", tokens, heads, "contiguous", window - 1),
            Work(f"packed, {name}", tokens, heads, "balanced", mean_document=document),
        ]
    return works
