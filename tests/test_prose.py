"""Prose in sources: first words of docstrings, words that must not come back, and the length of tests' names.

The rules are in `.github/CONTRIBUTING.md`, section "Style". `test_guides.py` holds the size of pages.
"""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from typing import NamedTuple

import pages
import pytest
from workers import ROOT, need_checkout

need_checkout("kernels_cu", ".ci")
FOLDERS = ("cuflash", "kernels_cu", "tests", "examples", ".ci")
FILES = {
    path.relative_to(ROOT).as_posix(): path
    for folder in FOLDERS
    for path in sorted((ROOT / folder).rglob("*"))
    if path.suffix in (".py", ".cu", ".cuh")
}
LONGEST_NAME = 70
# A docstring begins with a noun or a verb, and not with a clause.
FIRST_WORDS = re.compile(r"(What|Whether|Those of|The same|Which|How|Who|Whom|Whose|When|Where|That)\b")
# Old words of prose, and their successors. test_names.py holds old identifiers, and words that are gone everywhere.
WORDS = {
    r"nobody|somebody": "name the thread, call or user, or use the passive",
    r"told|untold|hears?|heard": "passed, given, listed, reported; reads, waits for",
    r"callers?'s? own": "score_mod, mask_mod, bias, sinks and dropout (mods)",
    r"blocks? of threads": "thread block",
    r"multiprocessors?": "SM",
    r"pieces? of work": "work tile",
    r"(of )?several lengths": "variable-length, varlen",
    r"dealt|deals? out|dealers?": "pushed, scheduled; scheduler warp",
    r"judg(ed|ing)": "validated",
    r"(house|door)s?": "folder, integration",
}
OLD_WORDS = re.compile(rf"\b({'|'.join(WORDS)})\b", re.IGNORECASE)
# A reason stands alone: nothing but the reason itself follows "why".
REASON = re.compile(r"(?:^|[.:;!?]\s+)why\b[^:.]+:")
# Begins of declarations in CUDA: all code of the first column, and members that begin with a keyword.
DECLARATION = re.compile(r"\w|\s+(template|struct|class|enum|union|using|static|inline|constexpr|__)")


class Prose(NamedTuple):
    """A docstring or a comment: its file, first line and text, and True if it describes a declaration."""

    file: str
    line: int
    text: str
    describes: bool


def of_python(file: str, text: str) -> Iterator[Prose]:
    """Yields docstrings and comments; a comment of several lines is one."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            docstring = ast.get_docstring(node)
            if docstring is not None:
                yield Prose(file, node.body[0].lineno, docstring, True)
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    marks = {token.start[0]: token.start[1] for token in tokens if token.type == tokenize.COMMENT}
    for line, comment, _ in blocks(text, "#", marks):
        yield Prose(file, line, comment, False)


def of_cuda(file: str, text: str) -> Iterator[Prose]:
    """Yields comments; a comment of several lines is one, and describes its file or the declaration below."""
    marks = {number: line.index("//") for number, line in enumerate(text.splitlines(), 1) if "//" in line}
    for line, comment, code in blocks(text, "//", marks):
        yield Prose(file, line, comment, line == 1 or DECLARATION.match(code) is not None)


def blocks(text: str, mark: str, marks: dict[int, int]) -> Iterator[tuple[int, str, str]]:
    """Yields (first line, text, next line) of comments that begin at these columns, by line.

    The next line is empty for a comment behind code.
    """
    lines = ["", *text.splitlines(), ""]
    block: list[str] = []
    for number, column in marks.items():
        comment, before = lines[number][column:].lstrip(mark).strip(), lines[number][:column].strip()
        if before:
            yield number, comment, ""
            continue
        block.append(comment)
        following = lines[number + 1]
        if not following.lstrip().startswith(mark):
            yield number + 1 - len(block), " ".join(block), following
            block.clear()


def names_of_tests(text: str) -> list[str]:
    """Returns the names of tests in a Python source."""
    return re.findall(r"^ *def (test_\w+)", text, re.MULTILINE)


def old_words(text: str) -> list[str]:
    """Returns words that must not come back, and reasons that do not stand alone."""
    text = re.sub(r"`[^`]*`", "", text)
    return [match[0] for match in OLD_WORDS.finditer(text)] + REASON.findall(text)


@pytest.fixture(scope="module")
def texts() -> dict[str, str]:
    return {file: path.read_text("utf-8") for file, path in FILES.items()}


@pytest.fixture(scope="module")
def prose(texts: dict[str, str]) -> list[Prose]:
    return [
        each for file, text in texts.items() for each in (of_python if file.endswith(".py") else of_cuda)(file, text)
    ]


def test_prose_of_all_folders_is_read(texts: dict[str, str], prose: list[Prose]) -> None:
    assert {file.split("/")[0] for file in texts} == set(FOLDERS)
    assert sum(each.describes for each in prose if each.file.endswith(".py")) >= 1500
    assert sum(each.describes for each in prose if each.file.endswith((".cu", ".cuh"))) >= 500


def test_docstrings_and_comments_of_declarations_begin_with_the_thing(prose: list[Prose]) -> None:
    bad = [
        f"{file}:{line}: {text[:60]}" for file, line, text, describes in prose if describes and FIRST_WORDS.match(text)
    ]
    assert not bad, "begin with a noun, or with a verb such as Returns"


def test_old_words_are_gone_from_prose(prose: list[Prose]) -> None:
    bad = {f"{file}:{line}": words for file, line, text, _ in prose if (words := old_words(text))}
    assert not bad, WORDS


def test_old_words_are_gone_from_pages() -> None:
    bad = [(page.name, words) for page in pages.PAGES for line in pages.prose(page) if (words := old_words(line))]
    assert not bad, WORDS


def test_names_of_tests_are_short_and_plain(texts: dict[str, str]) -> None:
    names = [name for file, text in texts.items() if file.startswith("tests/") for name in names_of_tests(text)]
    assert len(names) >= 600
    assert not [name for name in names if len(name) > LONGEST_NAME]
    assert not [name for name in names if old_words(name.replace("_", " "))]


def test_a_violation_is_found() -> None:
    source = '"""What it is."""\n\n# why here: L31\nx = 1  # why: it is one\n# Read by\n# nobody.\ndef test_a(): ...\n'
    docstring, *comments = of_python("a.py", source)
    assert FIRST_WORDS.match(docstring.text)
    assert [(line, old_words(text)) for _, line, text, _ in comments] == [
        (3, ["why here:"]),
        (4, []),
        (5, ["nobody"]),
    ]
    assert names_of_tests(source) == ["test_a"]
    above, beside = of_cuda("a.cuh", "\n// Whether it is so\n// for all.\nbool is_so();\n\nint n;  // Told by `told`\n")
    assert above == ("a.cuh", 2, "Whether it is so for all.", True)
    assert FIRST_WORDS.match(above.text)
    assert (beside.describes, old_words(beside.text)) == (False, ["Told"])
