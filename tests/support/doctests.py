"""Runs the examples of docstrings."""

from __future__ import annotations

import doctest
from typing import Any


def run_examples(function: Any, **names: Any) -> None:
    """Runs the examples of a function's docstring, which has at least one. names: globals of the examples."""
    (test,) = doctest.DocTestFinder(recurse=False).find(function, function.__name__, globs=names)
    assert test.examples, f"{function.__name__} has no example"
    lines: list[str] = []
    failed, tried = doctest.DocTestRunner(optionflags=doctest.NORMALIZE_WHITESPACE).run(test, out=lines.append)
    assert tried
    assert not failed, "".join(lines)
