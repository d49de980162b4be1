"""Docstrings of the public calls: each has an example, and examples run as they stand, on NumPy arrays."""

from __future__ import annotations

import inspect

import numpy as np
import pytest
from doctests import run_examples

import cuflash
from cuflash import mods

CALLS = [name for name in cuflash.__all__ if inspect.isfunction(getattr(cuflash, name))]


@pytest.mark.parametrize("name", CALLS)
def test_each_call_has_an_example_that_runs(name: str) -> None:
    run_examples(getattr(cuflash, name))


@pytest.mark.parametrize("name", CALLS)
def test_each_call_tells_every_argument(name: str) -> None:
    call = getattr(cuflash, name)
    text = inspect.getdoc(call) or ""
    parameters = inspect.signature(call).parameters.values()
    missing = [each.name for each in parameters if each.name not in text and each.kind != each.VAR_KEYWORD]
    # Those that are described once for all: "… as in `forward`".
    of_others = {each for each in missing if each in (inspect.getdoc(cuflash.forward) or "")}
    assert not set(missing) - of_others
    assert not of_others or "`forward`" in text


@pytest.mark.parametrize("name", [name for name in mods.__all__ if name not in mods.FUNCTIONS])
def test_ready_made_masks_and_scores_have_examples_that_run(name: str) -> None:
    q, k, v = np.random.default_rng(0).standard_normal((3, 6, 2, 4), dtype="float32")
    run_examples(getattr(mods, name), np=np, cuflash=cuflash, mods=mods, q=q, k=k, v=v)
