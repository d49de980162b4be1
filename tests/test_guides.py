"""README.md, the guide and CONTRIBUTING.md: their code runs, their commands parse, their links and names exist."""

from __future__ import annotations

import itertools
import json
import os
import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pages import (
    CONTRIBUTING,
    EXAMPLES,
    FENCED,
    GUIDE,
    PAGES,
    README,
    Section,
    anchors,
    imported,
    prose,
    run,
    section_of,
    sections,
)
from workers import ROOT, need_checkout, output_of

import cuflash
from cuflash import __main__ as command_line
from cuflash import mods
from cuflash.mods.language import FUNCTIONS
from cuflash.testing.layouts import host, identical

need_checkout("README.md", "examples/guide")
GUIDES = sorted(GUIDE.glob("*.md"))
SECTIONS = [section for page in PAGES if page != README for section in sections(page)]
# Each block of README.md runs alone, with the imports of the first one.
SECTIONS += [
    Section(README, f"{section.heading} {block.line}", [block])
    for section in sections(README)
    for block in section.blocks
]
SET_UP = "python3 -m venv "


def name_of(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def test_all_pages_are_there_and_hold_code() -> None:
    names = {page.stem for page in GUIDES}
    assert names == {
        "comparison",
        "distributed",
        "distributed_libraries",
        "frameworks",
        "limits",
        "mods",
        "performance",
        "serving",
        "troubleshooting",
        "varlen",
    }
    runnable = {each.page for each in SECTIONS if any(block.language == "python" for block in each.blocks)}
    assert runnable >= {README, *GUIDES}


def test_all_examples_are_listed() -> None:
    listed = re.findall(r"^\| \[(\w+\.py)\]\(\1\) \|", EXAMPLES.read_text("utf-8"), re.MULTILINE)
    assert sorted([*listed, "packages.py"]) == sorted(path.name for path in EXAMPLES.parent.glob("*.py"))


@pytest.mark.parametrize("section", SECTIONS, ids=str)
def test_code_of_a_section_runs(section: Section, xp: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for framework in imported(section):
        pytest.importorskip(framework)
    monkeypatch.chdir(tmp_path)
    run(section, xp.__name__, {"cupy": xp, "cuflash": cuflash} if section.page == README else {})


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_commands_of_a_page_are_ones_that_exist(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    readme = README.read_text("utf-8").splitlines()
    set_up = {part for line in readme if line.startswith(SET_UP) for part in (line, *line.split(" && "))}
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]["optional-dependencies"]
    ran: list[str] = []
    for name, command in command_line.COMMANDS.items():
        monkeypatch.setattr(command.module, "main", lambda _, name=name: ran.append(name) or 0)
    monkeypatch.chdir(tmp_path)
    texts = [match[3] for match in FENCED.finditer(page.read_text("utf-8")) if match[1] == "sh"]
    for text in texts:
        subprocess.run(["bash", "-n"], input=text, text=True, check=True)
    for line in itertools.chain.from_iterable(text.replace("\\\n", " ").splitlines() for text in texts):
        is_set_up = line.startswith((SET_UP, ".venv-test/"))
        assert not is_set_up or line in set_up, f"{line}: .ci/run runs the commands of README.md alone"
        named = re.findall(r"\[([\w,]+)\]", line) if "pip" in line else []
        assert {extra for each in named for extra in each.split(",")} <= set(extras), line
        words = shlex.split(line, comments=True)
        while words and re.match(r"[A-Z_]+=", words[0]):
            del words[0]  # variables
        if words[:3] == ["python", "-m", "cuflash"] or words[:1] == ["cuflash"]:
            arguments = words[words.index("cuflash") + 1 :]
            for file in (each for each in arguments if each.endswith(".json")):
                Path(file).touch()
            count = len(ran)
            assert command_line.main(arguments) == 0, line
            assert ran[count:] == arguments[:1], line
        elif words and words[0].startswith((".ci/", "examples/")):
            assert os.access(ROOT / words[0], os.X_OK), line
        for script in re.findall(r"(?:python|bin/python) (\S+\.py)", line):
            assert (ROOT / script).is_file(), line


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_of_a_page_lead_somewhere(page: Path) -> None:
    links = re.findall(r"\]\((?!https?:)([^)]+)\)", page.read_text("utf-8"))
    assert links
    for link in links:
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        if ".github" in target.parts and not CONTRIBUTING.is_file():
            continue  # in the sdist
        assert target.exists(), link
        assert not anchor or anchor in anchors(target), link


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_a_page_is_short_and_so_are_its_lines_and_sentences(page: Path) -> None:
    text = page.read_text("utf-8")
    lines = text.splitlines()
    assert len(lines) <= 160
    assert page != README or len(text.split()) <= 1500
    wide = [line for line in lines if len(re.sub("<!-- .*? -->", "", line)) > 120 and not line.startswith("|")]
    assert all(line.startswith(SET_UP) for line in wide), wide
    assert not [sentence for sentence in prose(page) if len(sentence.split()) > 25]


def results_of(page: str, heading: str, xp: Any) -> dict[str, Any]:
    """Returns the names that a section defines, with random numbers instead of ones, which would hide a wrong row."""
    rng, section = np.random.default_rng(0), section_of(GUIDE / page, heading)
    names: dict[str, Any] = {"draw": lambda shape, dtype: xp.asarray(rng.standard_normal(shape), dtype)}
    blocks = [block._replace(text=block.text.replace("cupy.ones(", "draw(")) for block in section.blocks]
    assert blocks != section.blocks
    run(section._replace(blocks=blocks), xp.__name__, names)
    return names


IN_CHECKOUT = pytest.mark.skipif(not CONTRIBUTING.is_file(), reason="the sdist has no .github")


@IN_CHECKOUT
def test_the_form_asks_for_info_and_the_workflow_calls_ci_run() -> None:
    form, workflow = (CONTRIBUTING.parent / name for name in ("ISSUE_TEMPLATE/bug.yml", "workflows/checks.yml"))
    assert "`python -m cuflash info`" in form.read_text("utf-8")
    assert "- run: .ci/run\n" in workflow.read_text("utf-8")
    assert os.access(ROOT / ".ci" / "run", os.X_OK)


@IN_CHECKOUT
def test_files_that_contributing_names_are_there() -> None:
    text = FENCED.sub("", CONTRIBUTING.read_text("utf-8"))
    names = {name for name in re.findall(r"`([\w/.]+\.(?:py|cuh?|md|csv))`", text) if "X" not in name}
    folders = [ROOT, *(ROOT / name for name in ("cuflash", "kernels_cu", "tests"))]
    assert len(names) >= 40
    assert not [name for name in names if not any((folder / name).is_file() for folder in folders)]
    assert len(text.split("## Where do I add")[1].split("\n- **")) >= 14


def test_varlen_code_gives_the_results_of_dense_calls(xp: Any) -> None:
    bounds = [0, 300, 301, 512]
    parts = [slice(*pair) for pair in itertools.pairwise(bounds)]
    packed, cached = (results_of("varlen.md", x, xp) for x in ("Packed sequences", "Pages and decode steps"))
    for names, out in ((packed, packed["out"]), (cached, cached["prefilled"])):
        for part in parts:
            one = cuflash.forward(*(names[name][part] for name in "qkv"), causal=True)
            np.testing.assert_allclose(host(out[part]), host(one), atol=4e-3)
    shapes = [packed[name].shape for name in ("dq", "dk", "dv")]
    assert shapes == [packed[name].shape for name in "qkv"]
    for b, part in enumerate(parts):
        keys, values = (xp.concatenate([cached[name][part], cached[f"new_{name}"][b]]) for name in "kv")
        one = cuflash.forward(cached["new_q"][b], keys, values, causal=True)
        np.testing.assert_allclose(host(cached["out"][b]), host(one), atol=4e-3)
    assert host(cached["used"]).tolist() == [301, 2, 212]

    padded = results_of("varlen.md", "Padded batches", xp)
    for b, length in enumerate((300, 1, 211)):
        one = cuflash.forward(*(padded[name][b, :length] for name in "qkv"), causal=True)
        np.testing.assert_allclose(host(padded["out"][b, :length]), host(one), atol=4e-3)
    same = results_of("varlen.md", "The same bits in every call", xp)
    last, rows = host(same["last"]), host(same["dense"])[:, -1:]
    assert identical([last], [rows]) if xp is not np else np.allclose(last, rows, atol=4e-3)


@pytest.mark.gpu
def test_varlen_graph_replays_with_longer_sequences(cupy: Any) -> None:
    names = results_of("varlen.md", "CUDA graphs", cupy)
    assert host(names["used"]).tolist() == [4096, 1000, 1]
    expected = cuflash.forward(*(names[name] for name in "qkv"), seqused_k=names["used"])
    np.testing.assert_allclose(host(names["out"]), host(expected), atol=4e-3)


def test_mods_code_changes_scores_and_hides_keys(xp: Any) -> None:
    names = results_of("mods.md", "Functions of your own", xp)
    q, k, v, dout = (host(names[name]).astype("f4").swapaxes(1, 2) for name in ("q", "k", "v", "dout"))
    k, v = (np.repeat(x, 2, axis=1) for x in (k, v))
    i, j = np.ogrid[:512, :512]
    distance = abs(i - j)
    s = q @ k.swapaxes(2, 3) / 8 - host(names["slopes"])[:, None, None] * distance
    s = np.where((j <= i) | (j < 16), s, -np.inf)
    p = np.exp(s - s.max(axis=3, keepdims=True))
    p /= p.sum(axis=3, keepdims=True)
    out = p @ v
    np.testing.assert_allclose(host(names["out"]).swapaxes(1, 2), out, atol=4e-3)
    ds = p * (dout @ v.swapaxes(2, 3) - (dout * out).sum(axis=3, keepdims=True))
    np.testing.assert_allclose(host(names["dslopes"]), -(ds * distance).sum(axis=(0, 2, 3)), rtol=1e-2, atol=1e-2)

    names = results_of("mods.md", "Ready-made ones", xp)
    document = xp.asarray(np.repeat([0, 1, 2], [300, 17, 195]))
    more = {"sinks": names["sinks"], "dropout_p": 0.1, "dropout_seed": names["seed"]}
    arrays = [names[name] for name in "qkv"]
    expected = cuflash.forward(*arrays, causal=True, mask_mod=mods.segments(document), **more)
    np.testing.assert_allclose(host(names["out"]), host(expected), atol=4e-3)


def test_mods_page_lists_all_ready_made_functions() -> None:
    text = (GUIDE / "mods.md").read_text("utf-8").split("## Ready-made ones")[1].split("\n## ")[0]
    helpers = {"position_of", "seqlen_q", "seqlen_k", *FUNCTIONS}
    assert set(mods.__all__) - helpers <= set(re.findall(r"`(\w+)`", text))


def test_sizes_of_downloads_are_the_measured_ones() -> None:
    rows = json.loads((ROOT / "examples" / "results" / "install.json").read_text("utf-8"))["rows"]
    sizes = [row[kind] for row in rows for kind in ("bytes", "bytes_beside_torch", "bytes_on_disk")]
    measured = {f"{size / 1e6:.0f} MB" for size in sizes} | {f"{size / 1e9:.1f} GB" for size in sizes}
    for page in PAGES:
        text = " ".join(re.sub("<!-- .*? -->", "", page.read_text("utf-8")).split())
        written = re.findall(r"(?:downloads|unpack to|itself:) ([\d.]+ [MG]B)", text)
        written += re.findall(r"([\d.]+ [MG]B)(?: alone|, PyTorch itself)?,? beside PyTorch", text)
        assert set(written) <= measured, page


@pytest.mark.skipif(not (ROOT / ".ci").is_dir(), reason="the sdist has no .ci")
def test_figures_of_pages_are_the_measured_ones() -> None:
    output_of(sys.executable, str(ROOT / ".ci" / "readme_tables.py"), "--check")
