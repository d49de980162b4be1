"""Docstrings of the public calls: each describes its parameters one by one, and examples run on NumPy arrays."""

from __future__ import annotations

import inspect
import re

import numpy as np
import pytest
from doctests import run_examples

import cuflash
from cuflash import mods

CALLS = [name for name in cuflash.__all__ if inspect.isfunction(getattr(cuflash, name))]
SECTIONS = ("Parameters", "Returns", "Raises", "Notes", "References", "Examples")


def sections(name: str) -> dict[str, str]:
    """Returns the sections of a call's docstring in NumPy style; its summary is the section ""."""
    text = inspect.getdoc(getattr(cuflash, name)) or ""
    summary, *rest = re.split(r"^(\w+)\n-{3,}\n", text, flags=re.MULTILINE)
    assert len(set(rest[::2])) == len(rest[::2])
    assert "---" not in "".join([summary, *rest[1::2]]), "dashes without a heading above them"
    return {"": summary, **dict(zip(rest[::2], rest[1::2], strict=True))}


def entries(section: str) -> dict[str, str]:
    """Returns the description of each "name : type" of a section."""
    _, *rest = re.split(r"^(\w+) : \S.*\n", section, flags=re.MULTILINE)
    return dict(zip(rest[::2], rest[1::2], strict=True))


@pytest.mark.parametrize("name", CALLS)
def test_each_call_has_an_example_that_runs(name: str) -> None:
    run_examples(getattr(cuflash, name))


@pytest.mark.parametrize("name", CALLS)
def test_sections_of_each_call_are_complete_and_in_order(name: str) -> None:
    parts = sections(name)
    assert [part for part in SECTIONS if part in parts] == list(parts)[1:]
    assert {"Parameters", "Returns", "Raises", "Examples"} <= set(parts)
    assert parts[""].split("\n\n")[0].count("\n") == 0, "the summary is one line"


@pytest.mark.parametrize("name", CALLS)
def test_each_parameter_of_a_call_has_an_entry_in_order(name: str) -> None:
    parameters = inspect.signature(getattr(cuflash, name)).parameters.values()
    described = entries(sections(name)["Parameters"])
    assert list(described) == [each.name for each in parameters if each.kind != each.VAR_KEYWORD]
    for parameter, text in described.items():
        lines = text.rstrip("\n").split("\n")
        assert lines != [""], f"{parameter} is not described"
        assert all(line.startswith("    ") for line in lines), f"indent the description of {parameter}"


def test_entries_of_a_section_are_found() -> None:
    text = 'q : array (batch, heads)\n    Queries: all of them.\nk : {"a", "b"}, default "a"\n    Keys.\n    More.\n'
    assert entries(text) == {"q": "    Queries: all of them.\n", "k": "    Keys.\n    More.\n"}
    assert entries("q, k : array\n    Both.\n") == entries("q\n    No type.\n") == {}


@pytest.mark.parametrize("name", [name for name in mods.__all__ if name not in mods.FUNCTIONS])
def test_ready_made_masks_and_scores_have_examples_that_run(name: str) -> None:
    q, k, v = np.random.default_rng(0).standard_normal((3, 6, 2, 4), dtype="float32")
    run_examples(getattr(mods, name), np=np, cuflash=cuflash, mods=mods, q=q, k=k, v=v)
