"""Kernel names in `.ci/`: each pattern matches a kernel, or a check there would pass without any."""

from __future__ import annotations

import re
from collections.abc import Iterator
from importlib import import_module
from itertools import chain
from typing import Any

import pytest
from mod_variants import few_variants, mod_variants
from variants import variants
from workers import ROOT, need_checkout

CI = ROOT / ".ci"
need_checkout(".ci")

ARCHS = "sm_80", "sm_90"
TEXTS = {path.name: path.read_text("utf-8") for path in sorted(CI.iterdir()) if path.is_file()}
# Forms of patterns: a bash variable of alternatives, options of compute-sanitizer and pytest, and Python.
DEVICES = re.compile(r"\bknown='([^']*)'")
SUBSTRING = re.compile(r"\bkernel_substring=([\w${}]+)")
CHOSEN = re.compile(r"""-k "([^"]*)\"""")
CONTAINED = re.compile(r"""["'](\w+)["'] (?:not )?in [\w.]+\.(?:kernel|variant\.name)\b""")
LOOP = re.compile(r"\bfor (\w+) in ([\w ]+);")


def alternatives(pattern: str) -> Iterator[str]:
    """Yields each alternative of a regular expression, including alternatives of its groups."""
    for branch in re.findall(r"(?:[^|()]|\([^()]*\))+", pattern):
        group = re.fullmatch(r"([^()]*)\(([^()]*)\)(.*)", branch)
        if group is None:
            yield branch
        else:
            for inside in group[2].split("|"):
                yield from alternatives(group[1] + inside + group[3])


def filled(text: str, name: str) -> list[str]:
    """Returns a word of bash with each value of the loop variable in it."""
    words = [name]
    for variable, values in LOOP.findall(text):
        place = f"${{{variable}}}"
        words = [each.replace(place, value) for each in words for value in (values.split() if place in each else [""])]
    return words


def patterns(text: str) -> Iterator[str]:
    """Yields the regular expressions of kernel names in a file, which begin where the name does."""
    yield from chain.from_iterable(map(alternatives, DEVICES.findall(text)))
    for name in SUBSTRING.findall(text):
        yield from (rf"\w*{each}" for each in filled(text, name))
    for words in CHOSEN.findall(text):
        yield from (rf"\w*{each}" for each in re.findall(r"\w*sm\d+\w*", words))
    yield from (rf"\w*{each}" for each in CONTAINED.findall(text))


PATTERNS = [(file, pattern) for file, text in TEXTS.items() for pattern in patterns(text)]


@pytest.fixture(scope="module")
def names() -> set[str]:
    lists: list[Any] = [variants, mod_variants, lambda arch: mod_variants(arch, True), few_variants]
    return {variant.name for arch in ARCHS for kernels in lists for variant in kernels(arch)}


def test_all_patterns_are_found() -> None:
    counts = {file: sum(file == each for each, _ in PATTERNS) for file in TEXTS}
    # Six alternatives, two families and a conversion of each dtype; Hopper's kernels by pytest.
    assert {file: count for file, count in counts.items() if count} == {"gpu": 11, "run": 1}
    for file, text in TEXTS.items():
        assert text.count("--kernel-name") == len(SUBSTRING.findall(text)), file


@pytest.mark.parametrize(("file", "pattern"), PATTERNS)
def test_a_pattern_fits_a_kernel(file: str, pattern: str, names: set[str]) -> None:
    assert "$" not in pattern, file
    assert any(re.match(pattern, name) for name in names), file


def test_renamed_words_are_words_of_kernels(names: set[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(CI))
    words = import_module("versus_kernels").RENAMED
    assert words
    for old, new in words.items():
        assert old != new
        assert any(f"_{new}_" in f"_{name}_" for name in names), new


def test_alternatives_of_groups_are_apart() -> None:
    assert list(alternatives(r"a_\w*_(b|c)|d(_e|_f)_(g|h)|i")) == [
        *(r"a_\w*_b", r"a_\w*_c"),
        *("d_e_g", "d_e_h", "d_f_g", "d_f_h", "i"),
    ]
