"""Ready-made masks: they show the keys of the pictures in their docstrings, and of their definitions."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from itertools import pairwise, takewhile
from pathlib import Path
from typing import Any

import numpy
import numpy as np
import pytest
from expressions import points
from texts import Case, check, compiled

import cuflash
from cuflash.errors import ProblemError
from cuflash.mods import masks
from cuflash.mods.graph.simplify import pick_form
from cuflash.mods.tracing.trace import trace
from cuflash.reference.evaluate import evaluate

DEFINITIONS = {name: each for name, each in vars(masks).items() if inspect.getmodule(each) is masks and name[0] != "_"}
PICTURES = {name: each for name, each in DEFINITIONS.items() if " keys:\n" in (each.__doc__ or "")}


def visible_keys(mask_mod: Any, seqlen_q: int, seqlen_k: int, b: int = 0, h: int = 0) -> Any:
    """Returns the visible keys, (seqlen_q, seqlen_k), after a comparison of the forms by queries and by keys."""
    graph = trace(mask_mod, "mask_mod")
    inputs = {"b": b, "h": h, "q_idx": np.arange(seqlen_q)[:, None], "k_idx": np.arange(seqlen_k)}
    lengths = {"seqlen_q": seqlen_q, "seqlen_k": seqlen_k}
    roots = [pick_form(graph.root, keys_as_rows) for keys_as_rows in (False, True)]
    values = evaluate(roots, inputs | lengths, [each.array for each in graph.arrays])
    by_queries, by_keys = (np.broadcast_to(each, (seqlen_q, seqlen_k)) for each in values)
    np.testing.assert_array_equal(by_queries, by_keys)
    return by_queries


def test_all_masks_have_a_picture() -> None:
    assert set(DEFINITIONS) - set(PICTURES) == {"and_masks", "or_masks", "check_number", "Mod"} & set(DEFINITIONS)


@pytest.mark.parametrize("name", PICTURES)
def test_masks_show_what_their_pictures_show(name: str) -> None:
    lines = inspect.getdoc(PICTURES[name]).splitlines()  # type: ignore[union-attr]
    title = next(line for line in lines if line.endswith(" keys:"))
    call, seqlen_q, seqlen_k = re.fullmatch(r"(.*), (\d+) queries, (\d+) keys:", title).groups()  # type: ignore[union-attr]
    picture = [line.split() for line in takewhile(bool, lines[lines.index(title) + 1 :])]
    mask_mod = eval(call, vars(masks) | {"numpy": numpy})
    rows = visible_keys(mask_mod, int(seqlen_q), int(seqlen_k))
    assert [["x" if each else "." for each in row] for row in rows] == picture


def defined_keys(size: int, shows: Callable[[int, int], bool], offset: int = 0) -> Any:
    """Returns a mask by its definition, for queries that stand beside the last keys."""
    return np.array([[shows(q + offset, k) for k in range(size + offset)] for q in range(size)])


BEGINS = np.array([0, 0, 5, 5, 6, 13, 20, 20], np.int32)
EXPECTED: dict[str, tuple[Any, Callable[[int, int], bool]]] = {
    "sliding_window": (masks.sliding_window(4, 2), lambda q, k: q - 4 <= k <= q + 2),
    "dilated": (masks.dilated_window(9, 3, 6), lambda q, k: q - 9 <= k <= q + 6 and (q - k) % 3 == 0),
    "global": (masks.global_window(np.arange(30) % 7 == 0, 3), lambda q, k: q - 3 <= k <= q or 0 in (k % 7, q % 7)),
    "chunked": (masks.chunked(7), lambda q, k: q // 7 == k // 7),
    "prefix": (masks.prefix_lm(np.array([5, 9])), lambda q, k: k < 5 or k <= q),
    "document": (
        masks.document(BEGINS),
        lambda q, k: any(begin <= q < end and begin <= k < end for begin, end in pairwise(BEGINS)),
    ),
    "segments": (masks.segments(np.arange(60).reshape(2, 30) % 4), lambda q, k: q % 4 == k % 4),
    "and": (masks.and_masks(masks.causal, masks.chunked(5), masks.causal), lambda q, k: k <= q and q // 5 == k // 5),
    "or": (masks.or_masks(masks.sliding_window(2), lambda b, h, q, k: k == 1), lambda q, k: q - 2 <= k <= q or k == 1),
    "neighborhood": (
        masks.neighborhood((3, 5), (4, 7)),
        lambda q, k: abs(k // 7 - min(max(q // 7, 1), 2)) <= 1 and abs(k % 7 - min(max(q % 7, 2), 4)) <= 2,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", EXPECTED)
@pytest.mark.parametrize("offset", [0, 3])
def test_masks_show_what_their_definitions_say(name: str, offset: int) -> None:
    mask_mod, shows = EXPECTED[name]
    size = 28 - offset if name == "neighborhood" else 25
    np.testing.assert_array_equal(visible_keys(mask_mod, size, size + offset), defined_keys(size, shows, offset))


@pytest.mark.parametrize("count", [1, 2, 3, 7, 8, 9, 100])
def test_any_number_of_documents(count: int) -> None:
    rng = np.random.default_rng(count)
    offsets = np.sort(rng.integers(0, 40, count + 1)).astype(np.int32)
    owner = np.searchsorted(offsets, np.arange(40), "right") - 1
    has_owner = (owner >= 0) & (owner < count)
    expected = (owner[:, None] == owner) & has_owner[:, None] & has_owner
    np.testing.assert_array_equal(visible_keys(masks.document(offsets), 40, 40), expected)


def test_documents_are_one_function_up_to_a_power_of_two_of_offsets() -> None:
    roots = [[trace(masks.document(np.arange(count)), "mask_mod").root for count in counts]
             for counts in ((2,), (3, 4), (5, 7, 8), (9, 12, 16), (1000, 1024))]  # fmt: skip
    assert [len(set(each)) for each in roots] == [1] * 5
    assert len({root for each in roots for root in each}) == 5
    shapes = {"dtype": "bfloat16", "device": "sm_90", "causal": True}
    for op in ("forward", "backward"):
        plans = [cuflash.plan(*[(2, 300, 4, 64)] * 3, op=op, mask_mod=masks.document(np.arange(count)), **shapes)
                 for count in (5, 7)]  # fmt: skip
        texts = [[(launch.variant.name, launch.variant.mod_code) for launch in each.launches] for each in plans]
        assert texts[0] == texts[1]


def test_offsets_may_be_repeated() -> None:
    expected = visible_keys(masks.document(np.array([0, 9, 21])), 25, 25)
    for offsets in ([0, 9, 21, 21, 21], [0, 9, 9, 9, 21, 21]):
        np.testing.assert_array_equal(visible_keys(masks.document(np.array(offsets)), 25, 25), expected)


def test_trees_of_bools_and_of_bits_show_the_same() -> None:
    rng = np.random.default_rng(0)
    nodes = np.tril(rng.random((2, 20, 20)) < 0.4) | np.eye(20, dtype=bool)
    bits = (nodes * 2 ** np.arange(20)).sum(axis=2)
    for b in range(2):
        expected = np.concatenate([np.ones((20, 11), bool), nodes[b]], axis=1)
        for ancestors in (nodes[b], nodes, bits[b], bits.astype(np.int32)):
            np.testing.assert_array_equal(visible_keys(masks.tree(ancestors), 20, 31, b), expected)


def test_their_texts_have_their_values_and_compile(tmp_path: Path) -> None:
    cases = []
    for mask_mod in [mask_mod for mask_mod, _ in EXPECTED.values()] + [masks.tree(np.arange(20)), masks.causal]:
        graph = trace(mask_mod, "mask_mod")
        for root in dict.fromkeys(pick_form(graph.root, keys_as_rows) for keys_as_rows in (False, True)):
            cases.append(Case([root], [each.array for each in graph.arrays]))
    inputs = points(200) | {"b": np.arange(200) % 2, "seqlen_q": np.full(200, 30), "seqlen_k": np.full(200, 30)}
    check(cases, tmp_path, inputs | {"q_idx": np.arange(200) % 29, "k_idx": np.arange(200) % 30})
    compiled(cases, "sm_90a")


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: masks.sliding_window(-1), "left=-1; give an integer of at least 0"),
        (lambda: masks.sliding_window(True), "left=True"),
        (lambda: masks.dilated_window(4, 0), "dilation=0; give an integer of at least 1"),
        (lambda: masks.global_window(1.5, 2), "num_global=1.5; give an integer of at least 0, or an array of bool"),
        (lambda: masks.chunked(0), "size=0"),
        (lambda: masks.prefix_lm("3"), "prefix_length='3'; give an integer of at least 0, or an array"),
        (lambda: masks.document(np.zeros((2, 2))), r"offsets has shape \(2, 2\)"),
        (lambda: masks.document([0, 3]), r"offsets has shape \(\)"),
        (lambda: masks.document(np.ndarray), r"offsets has shape \(\)"),
        (lambda: masks.global_window(np.ndarray, 2), "num_global=<class 'numpy.ndarray'>; give an integer"),
        (lambda: masks.prefix_lm(np.timedelta64(3)), r"prefix_length=.*timedelta64\(3\).*; give an integer"),
        (lambda: masks.segments(3), "ids has 0 axes"),
        (lambda: masks.segments(np.ndarray), "ids has 0 axes"),
        (lambda: masks.tree(np.ndarray), "ancestors has 0 axes"),
        (lambda: masks.neighborhood(4, 9), "size=4 of canvas=9; give odd numbers"),
        (lambda: masks.neighborhood((3, 3), 9), "give as many numbers for both"),
        (lambda: masks.block_diffusion(0, 2), "seqlen=0"),
        (lambda: masks.tree(np.ones(3, bool)), "ancestors has 1 axes"),
    ],
)
def test_bad_arguments_are_refused(make: Callable[[], Any], message: str) -> None:
    with pytest.raises(ProblemError, match=message):
        make()
