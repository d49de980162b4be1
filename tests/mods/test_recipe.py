"""Recipes: a later call sees everything that would change a trace, and nothing else."""

from __future__ import annotations

import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from cuflash.mods import recipe
from cuflash.mods.trace import trace

TABLE = np.arange(4, dtype=np.float32)
WIDTH: Any = 3


def reads(values: Any) -> Callable[..., Any]:
    """A mask that reads all values that a test changes."""

    def helper(x: Any) -> Any:
        return x - values["helper"](x)

    def mask(b: Any, h: Any, q: Any, k: Any, default: Any = values["default"]) -> Any:
        near = helper(q) - k < values["number"] + values["list"][0] + values["object"].width + default
        return near | (values["table"][h] > values["tuple"][1])

    return mask


def values() -> dict[str, Any]:
    return {
        "number": 5,
        "list": [1, 2],
        "tuple": (1, 0.5),
        "object": SimpleNamespace(width=4),
        "table": TABLE,
        "helper": lambda x: x // 2,
        "default": 1,
    }


CHANGES: dict[str, Callable[[dict[str, Any]], Any]] = {
    "number": lambda v: v.update(number=6),
    "its type": lambda v: v.update(number=5.0),
    "list": lambda v: v["list"].__setitem__(0, 9),
    "tuple": lambda v: v.update(tuple=(1, 0.75)),
    "attribute": lambda v: setattr(v["object"], "width", 8),
    "object": lambda v: v.update(object=SimpleNamespace(width=7)),
    "array dtype": lambda v: v.update(table=TABLE.astype("f8")),
    "array shape": lambda v: v.update(table=TABLE[:3]),
    "helper": lambda v: v.update(helper=lambda x: x // 3),
    "kind of a container": lambda v: v.update(list=(1, 2)),
    "another key": lambda v: v.update(more=2),
    "a key less": lambda v: v.pop("default"),
}


@pytest.mark.parametrize("name", CHANGES)
def test_every_change_of_what_was_read_is_seen(name: str) -> None:
    own = values()
    mask = reads(own)
    first = trace(mask, "mask_mod")
    assert trace(mask, "mask_mod").root is first.root
    CHANGES[name](own)
    fresh = values()
    CHANGES[name](fresh)
    if name != "a key less":
        assert trace(mask, "mask_mod").digest == trace(reads(fresh), "mask_mod").digest
    kept = name in ("a key less", "another key", "array shape", "kind of a container")  # the graph is the same
    assert (trace(mask, "mask_mod").digest == first.digest) == kept


def test_other_values_of_an_array_change_nothing_but_the_array() -> None:
    own = values()
    mask = reads(own)
    first = trace(mask, "mask_mod")
    own["table"] = TABLE + 1
    again = trace(mask, "mask_mod")
    assert again.root is first.root
    assert again.arrays[0].array is own["table"]


def of_global(b: Any, h: Any, q: Any, k: Any) -> Any:
    return q - k < WIDTH


def test_changes_of_globals_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    first = trace(of_global, "mask_mod").digest
    monkeypatch.setitem(globals(), "WIDTH", 4)
    assert trace(of_global, "mask_mod").digest != first


@pytest.mark.parametrize("pair", [(0.0, -0.0), (1, True), (1, 1.0), (2, np.int64(2)), ("a", "b")], ids=str)
def test_numbers_that_are_equal_but_not_the_same_are_told_apart(pair: tuple[Any, Any]) -> None:
    one, other = pair
    for each in pair:
        assert recipe.equal(each)(each, ())
        assert recipe.equal(each)(type(each)(each), ())
    assert not recipe.equal(one)(other, ())
    assert not recipe.equal(other)(one, ())


def test_nan_is_itself() -> None:
    assert recipe.equal(float("nan"))(float("nan"), ())


def test_a_function_is_recognised_in_microseconds() -> None:
    def alibi(score: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        return score + TABLE[h] * (k - q)

    trace(alibi, "score_mod")
    times = []
    for _ in range(200):
        begin = time.perf_counter()
        trace(alibi, "score_mod")
        times.append(time.perf_counter() - begin)
    assert min(times) < 20e-6, "2.5 µs on an idle machine"
