"""Calls that cuflash must refuse: a valid call, a change that makes it invalid, and words of the message."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import pytest
from libraries import Producer

from cuflash.errors import ProblemError

LAYOUT = "(batch, seqlen, heads, head_dim)"


def zeros(*shape: int, dtype: Any = np.float32) -> np.ndarray[Any, Any]:
    return np.zeros(shape, dtype)


def base(dtype: Any = np.float32) -> dict[str, Any]:
    """Returns q, k and v of a valid call: two query heads per kv head, unequal lengths, and unequal head dims."""
    rng = np.random.default_rng(0)
    shapes = {"q": (2, 5, 4, 8), "k": (2, 7, 2, 8), "v": (2, 7, 2, 6)}
    return {name: rng.standard_normal(shape).astype(dtype) for name, shape in shapes.items()}


def forward_with(changes: dict[str, Any], dtype: Any = np.float32) -> dict[str, Any]:
    return base(dtype) | changes


def backward_with(changes: dict[str, Any]) -> dict[str, Any]:
    return base() | {"dout": zeros(2, 5, 4, 6), "out": zeros(2, 5, 4, 6), "lse": zeros(2, 4, 5)} | changes


class Row(NamedTuple):
    """Arguments of an invalid call, and words of its message about given and accepted values."""

    id: str
    arguments: dict[str, Any]
    words: tuple[str, ...]


def rows(make: Callable[[dict[str, Any]], dict[str, Any]], *table: tuple[str, dict[str, Any], tuple[str, ...]]) -> Any:
    return [pytest.param(Row(name, make(changes), words), id=name) for name, changes, words in table]


SCALE, CAP = "finite number above 0, or None", "finite number above 0, or 0"
DTYPES = "float16, bfloat16, float32"


@contextmanager
def refused(error: type[Exception], *texts: str) -> Iterator[None]:
    """Checks that an error is raised inside whose message contains all of these texts."""
    with pytest.raises(error) as caught:
        yield
    missing = [text for text in texts if text not in str(caught.value)]
    assert not missing, f"{missing} not in: {caught.value}"


def contents(arguments: Any) -> list[bytes]:
    """Returns the bytes of every array in the arguments of a call."""
    if isinstance(arguments, dict):
        arguments = list(arguments.values())
    if isinstance(arguments, (list, tuple)):
        return [data for item in arguments for data in contents(item)]
    array = arguments.array if isinstance(arguments, Producer) else arguments
    return [array.tobytes()] if hasattr(array, "tobytes") and not isinstance(array, type) else []


def check(call: Callable[..., Any], row: Row) -> None:
    before = contents(row.arguments)
    with pytest.raises(ProblemError) as caught:
        call(**row.arguments)
    message = str(caught.value)
    missing = [words for words in row.words if words not in message]
    assert not missing, f"{missing} not in: {message}"
    assert isinstance(caught.value, ValueError)
    assert contents(row.arguments) == before
