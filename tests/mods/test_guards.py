"""Guards: a later call detects every change of a trace, and no other change."""

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
    """Returns a mask that reads all values that a test changes."""

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
def test_every_change_of_a_read_value_gives_another_trace(name: str) -> None:
    captured, fresh = values(), values()
    mask = reads(captured)
    first = trace(mask, "mask_mod")
    assert trace(mask, "mask_mod").root is first.root
    CHANGES[name](captured)
    CHANGES[name](fresh)
    if name != "a key less":
        assert trace(mask, "mask_mod").digest == trace(reads(fresh), "mask_mod").digest
    is_equal = name in ("a key less", "another key", "array shape", "kind of a container")  # the graphs are equal
    assert (trace(mask, "mask_mod").digest == first.digest) == is_equal


class Configuration:
    width = 4

    def __init__(self) -> None:
        self.more: Any = None

    def wide(self, x: Any) -> Any:
        return x < self.__class__.width + Configuration.width


def hidden_changes() -> dict[str, tuple[Any, Callable[[pytest.MonkeyPatch], Any]]]:
    """Returns masks, and changes of classes, absent names, comparisons and identities that they depend on."""
    space, marks, numbers = SimpleNamespace(), [SimpleNamespace(), SimpleNamespace()], {1, 2}
    pair = SimpleNamespace(x=marks[0], y=marks[1])
    configuration = Configuration()
    is_wide = configuration.wide
    return {
        "class": (lambda b, h, q, k: q < Configuration.width, lambda m: m.setattr(Configuration, "width", 9)),
        "class of self": (lambda b, h, q, k: is_wide(q), lambda m: m.setattr(Configuration, "width", 9)),
        "absent attribute": (lambda b, h, q, k: q < getattr(space, "w", 2), lambda m: m.setattr(space, "w", 5, False)),
        "absent item": (lambda b, h, q, k: q < int(os.environ.get("WIDE", 2)), lambda m: m.setenv("WIDE", "5")),
        "identity": (lambda b, h, q, k: q < (3 if pair.x is pair.y else 4), lambda m: m.setattr(pair, "y", marks[0])),
        "comparison": (
            lambda b, h, q, k: q < (3 if configuration == marks else 4),
            lambda m: m.setattr(Configuration, "__eq__", equal),
        ),
        "import": (import_inside, lambda m: m.setattr(expressions, "LENGTH", 7)),
        "import of a name": (import_a_name, lambda m: m.setattr(expressions, "LENGTH", 7)),
        "set": (lambda b, h, q, k, s=numbers: q < len(s), lambda m: numbers.add(9)),
    }  # fmt: skip


def equal(self: Any, other: Any) -> bool:
    return True


def import_inside(b: Any, h: Any, q: Any, k: Any) -> Any:
    import expressions

    return q < expressions.LENGTH


def import_a_name(b: Any, h: Any, q: Any, k: Any) -> Any:
    from expressions import LENGTH

    return q < LENGTH


@pytest.mark.parametrize("name", hidden_changes())
def test_hidden_changes_give_another_trace(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    mask, change = hidden_changes()[name]
    first = trace(mask, "mask_mod").digest
    assert trace(mask, "mask_mod").digest == first
    change(monkeypatch)
    assert trace(mask, "mask_mod").digest != first


def test_a_large_set_is_compared_quickly() -> None:
    large = frozenset(range(20000))

    def mask(b: Any, h: Any, q: Any, k: Any) -> Any:
        return q < len(large)

    trace(mask, "mask_mod")
    begin = time.thread_time()
    trace(mask, "mask_mod")
    assert time.thread_time() - begin < 0.2


def test_other_values_of_an_array_change_nothing_but_the_array() -> None:
    captured = values()
    mask = reads(captured)
    first = trace(mask, "mask_mod")
    captured["table"] = TABLE + 1
    second = trace(mask, "mask_mod")
    assert second.root is first.root
    assert second.arrays[0].array is captured["table"]


def global_window(b: Any, h: Any, q: Any, k: Any) -> Any:
    return q - k < WIDTH


def test_changes_of_globals_give_another_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    first = trace(global_window, "mask_mod").digest
    monkeypatch.setitem(globals(), "WIDTH", 4)
    assert trace(global_window, "mask_mod").digest != first


PAIRS = [(0.0, -0.0), (1, True), (1, 1.0), (2, np.int64(2)), ("a", "b"), (np.float32(0), np.float32(-0.0))]


@pytest.mark.parametrize("pair", PAIRS, ids=str)
def test_equal_numbers_of_other_types_or_signs_do_not_match(pair: tuple[Any, Any]) -> None:
    one, other = pair
    for each in pair:
        assert matches(each, each)
        assert matches(each, type(each)(each))
    assert not matches(one, other)
    assert not matches(other, one)


def matches(number: Any, value: Any) -> bool:
    """True if a value passes the guard of a number."""
    reads_of_trace = guards.Guards()
    reads_of_trace.root = guards.equal(number)
    return reads_of_trace.function([0])(value) is not None


def test_nan_is_itself() -> None:
    assert matches(float("nan"), float("nan"))


def test_a_function_is_recognised_in_microseconds() -> None:
    def alibi(score: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        return score + TABLE[h] * (k - q)

    trace(alibi, "score_mod")
    times = []
    for _ in range(200):
        begin = time.thread_time()
        trace(alibi, "score_mod")
        times.append(time.thread_time() - begin)
    assert min(times) < 20e-6, "2.5 µs on an idle machine"


def test_a_trace_keeps_no_array_of_a_class_inside_a_function() -> None:
    def traced(array: Any) -> Any:
        class Local:
            def table(self) -> Any:
                return array

        captured = Local()
        trace(lambda b, h, q, k: captured.table()[k] > 0.0, "mask_mod")
        return weakref.ref(array)

    reference = traced(np.zeros(4, np.float32))
    gc.collect()
    assert reference() is None
