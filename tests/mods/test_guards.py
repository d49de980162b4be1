"""Guards: a later call sees everything that would change a trace, and nothing else."""

from __future__ import annotations

import gc
import os
import time
import weakref
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import expressions
import numpy as np
import pytest

from cuflash.mods.tracing import guards
from cuflash.mods.tracing.trace import trace

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


class Configuration:
    width = 4

    def __init__(self) -> None:
        self.more: Any = None

    def wide(self, x: Any) -> Any:
        return x < self.__class__.width + Configuration.width


def changes_that_are_read_out_of_sight() -> dict[str, tuple[Any, Callable[[pytest.MonkeyPatch], Any]]]:
    """Masks, and what changes them: classes, absent names, comparisons, identities."""
    space, marks, some = SimpleNamespace(), [SimpleNamespace(), SimpleNamespace()], {1, 2}
    pair = SimpleNamespace(x=marks[0], y=marks[1])
    own = Configuration()
    return {
        "class": (lambda b, h, q, k: q < Configuration.width, lambda m: m.setattr(Configuration, "width", 9)),
        "class of self": (own.wide, lambda m: m.setattr(Configuration, "width", 9)),
        "absent attribute": (lambda b, h, q, k: q < getattr(space, "w", 2), lambda m: m.setattr(space, "w", 5, False)),
        "absent item": (lambda b, h, q, k: q < int(os.environ.get("WIDE", 2)), lambda m: m.setenv("WIDE", "5")),
        "identity": (lambda b, h, q, k: q < (3 if pair.x is pair.y else 4), lambda m: m.setattr(pair, "y", marks[0])),
        "comparison": (
            lambda b, h, q, k: q < (3 if own == marks else 4),
            lambda m: m.setattr(Configuration, "__eq__", equal),
        ),
        "import": (import_inside, lambda m: m.setattr(expressions, "LENGTH", 7)),
        "import of a name": (import_a_name, lambda m: m.setattr(expressions, "LENGTH", 7)),
        "set": (lambda b, h, q, k, s=some: q < len(s), lambda m: some.add(9)),
    }  # fmt: skip


def equal(self: Any, other: Any) -> bool:
    return True


def import_inside(b: Any, h: Any, q: Any, k: Any) -> Any:
    import expressions

    return q < expressions.LENGTH


def import_a_name(b: Any, h: Any, q: Any, k: Any) -> Any:
    from expressions import LENGTH

    return q < LENGTH


@pytest.mark.parametrize("name", changes_that_are_read_out_of_sight())
def test_changes_of_what_is_read_out_of_sight_are_seen(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    mask, change = changes_that_are_read_out_of_sight()[name]
    if name == "class of self":
        method = mask
        mask = lambda b, h, q, k: method(q)  # noqa: E731
    first = trace(mask, "mask_mod").digest
    assert trace(mask, "mask_mod").digest == first
    change(monkeypatch)
    assert trace(mask, "mask_mod").digest != first


def test_a_large_set_is_compared_quickly() -> None:
    large = frozenset(range(20000))

    def mask(b: Any, h: Any, q: Any, k: Any) -> Any:
        return q < len(large)

    trace(mask, "mask_mod")
    begin = time.perf_counter()
    trace(mask, "mask_mod")
    assert time.perf_counter() - begin < 0.2


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


PAIRS = [(0.0, -0.0), (1, True), (1, 1.0), (2, np.int64(2)), ("a", "b"), (np.float32(0), np.float32(-0.0))]


@pytest.mark.parametrize("pair", PAIRS, ids=str)
def test_numbers_that_are_equal_but_not_the_same_are_told_apart(pair: tuple[Any, Any]) -> None:
    one, other = pair
    for each in pair:
        assert is_found(each, each)
        assert is_found(each, type(each)(each))
    assert not is_found(one, other)
    assert not is_found(other, one)


def is_found(wanted: Any, value: Any) -> bool:
    """Whether a guard that requires a number finds it in another one."""
    made = guards.Guards()
    made.root = guards.equal(wanted)
    return made.function([0])(value) is not None


def test_nan_is_itself() -> None:
    assert is_found(float("nan"), float("nan"))


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


def test_a_trace_keeps_no_array_of_a_class_that_a_function_made() -> None:
    def traced(array: Any) -> Any:
        class Local:
            def of(self) -> Any:
                return array

        own = Local()
        trace(lambda b, h, q, k: own.of()[k] > 0.0, "mask_mod")
        return weakref.ref(array)

    found = traced(np.zeros(4, np.float32))
    gc.collect()
    assert found() is None
