"""Docstrings of the public calls: each has an example, and examples run as they stand, on NumPy arrays."""

from __future__ import annotations

import doctest
import inspect
from typing import Any

import pytest

import cuflash
from cuflash import mods

CALLS = [name for name in cuflash.__all__ if inspect.isfunction(getattr(cuflash, name))]


def examples(name: str, of: Any) -> doctest.DocTest:
    (found,) = doctest.DocTestFinder(recurse=False).find(of, name, globs={})
    return found


@pytest.mark.parametrize("name", CALLS)
def test_each_call_has_an_example_that_runs(name: str) -> None:
    test = examples(name, getattr(cuflash, name))
    assert test.examples
    told: list[str] = []
    failed, tried = doctest.DocTestRunner(optionflags=doctest.NORMALIZE_WHITESPACE).run(test, out=told.append)
    assert tried
    assert not failed, "".join(told)


@pytest.mark.parametrize("name", CALLS)
def test_each_call_tells_every_argument(name: str) -> None:
    call = getattr(cuflash, name)
    text = inspect.getdoc(call) or ""
    parameters = inspect.signature(call).parameters
    missing = [each for each in parameters if each not in text]
    # Those that are told once for all: "… as in `forward`".
    of_others = {each for each in missing if each in (inspect.getdoc(cuflash.forward) or "")}
    assert not set(missing) - of_others
    assert not of_others or "`forward`" in text


@pytest.mark.parametrize("name", [name for name in mods.__all__ if name not in mods.FUNCTIONS])
def test_ready_made_masks_and_scores_are_told(name: str) -> None:
    assert inspect.getdoc(getattr(mods, name))
