"""Pages of documentation (README.md, guide, examples, CONTRIBUTING.md) with sections, code, commands and links."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import Any, NamedTuple

from workers import ROOT

README, GUIDE = ROOT / "README.md", ROOT / "examples" / "guide"
CONTRIBUTING = ROOT / ".github" / "CONTRIBUTING.md"  # not in the sdist
EXAMPLES = ROOT / "examples" / "README.md"
PAGES = [path for path in (README, CONTRIBUTING, EXAMPLES, *sorted(GUIDE.glob("*.md"))) if path.is_file()]
FENCED = re.compile(r"^```(\w+)([\w ]*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
MARKED = re.compile(r"<!-- [\w -]+ -->.*?<!-- end -->", re.DOTALL)  # figures that .ci/readme_tables.py writes
FRAMEWORKS = ("torch", "jax", "transformers", "vllm")


class CodeBlock(NamedTuple):
    """A fenced block: its language, the words behind it, its text and the number of its first line in the page."""

    language: str
    words: str
    text: str
    line: int


class Section(NamedTuple):
    """A part of a page under a heading of the second or third level; the part before it has the name of the page."""

    page: Path
    heading: str
    blocks: list[CodeBlock]

    def __str__(self) -> str:
        return f"{self.page.stem}: {self.heading}"


def sections(page: Path) -> list[Section]:
    """Returns the sections of a page that hold blocks."""
    text = page.read_text("utf-8")
    plain = FENCED.sub(lambda match: re.sub(r"[^\n]", "x", match[0]), text)  # comments in code are no headings
    starts = [(0, page.stem), *((match.start(), match[1]) for match in re.finditer(r"^###? (.*)$", plain, re.M))]
    parts = [Section(page, heading, []) for _, heading in starts]
    for match in FENCED.finditer(text):
        index = sum(start <= match.start() for start, _ in starts) - 1
        line = text.count("\n", 0, match.start(3)) + 1
        parts[index].blocks.append(CodeBlock(match[1], match[2].strip(), match[3], line))
    return [section for section in parts if section.blocks]


def section_of(page: Path, heading: str) -> Section:
    """Returns the section of a page under a heading."""
    (section,) = (each for each in sections(page) if each.heading == heading)
    return section


class Replaced(ast.NodeTransformer):
    """Puts another array library in place of CuPy, and the CPU in place of the GPU."""

    def __init__(self, library: str) -> None:
        self.library = library

    def visit_Import(self, node: ast.Import) -> ast.Import:
        for alias in node.names:
            if alias.name == "cupy":
                alias.name, alias.asname = self.library, alias.asname or "cupy"
        return node

    def visit_Constant(self, node: ast.Constant) -> ast.Constant:
        if self.library == "numpy" and node.value == "cuda":
            return ast.copy_location(ast.Constant("cpu"), node)
        return node


def imported(section: Section) -> list[str]:
    """Returns the frameworks that the code of a section needs."""
    names: set[str] = set()
    for block in section.blocks:
        for node in ast.walk(ast.parse(block.text)) if block.language == "python" else ():
            if isinstance(node, ast.Import):
                modules = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.module:
                modules = [f"{node.module}.{alias.name}" for alias in node.names]
            else:
                continue
            for module in modules:
                root, second, third = (*module.split("."), "", "")[:3]
                if (root, second) == ("cuflash", "frameworks"):
                    names |= {third if third in FRAMEWORKS else "torch"}
                elif root in FRAMEWORKS:
                    names.add(root)
    return [name for name in FRAMEWORKS if name in names]


def run(section: Section, library: str, names: dict[str, Any]) -> None:
    """Runs the Python code of a section. library: "numpy", which leaves out blocks marked `gpu`, or "cupy"."""
    for block in section.blocks:
        if block.language != "python" or (block.words == "gpu" and library == "numpy"):
            continue
        tree = Replaced(library).visit(ast.parse(block.text))
        ast.increment_lineno(ast.fix_missing_locations(tree), block.line - 1)
        exec(compile(tree, str(section.page), "exec"), names)


def prose(page: Path) -> list[str]:
    """Returns the sentences of a page, without code, tables and headings."""
    text = MARKED.sub("0", FENCED.sub("", page.read_text("utf-8")))
    text = re.sub(r"\]\([^)]*\)", "]", text)
    lines = ["\n" if re.match(r"\||#|<", line) or not line.strip() else line for line in text.splitlines()]
    paragraphs = re.split(r"\n\s*\n|\n(?=- )", "\n".join(lines))
    return [each for part in paragraphs for each in re.split(r"(?<=[.!?:;])\s+", " ".join(part.split())) if each]


def anchors(page: Path) -> set[str]:
    """Returns the anchors that GitHub gives the headings of a page."""
    headings = re.findall(r"^#+ (.*)$", FENCED.sub("", page.read_text("utf-8")), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}
