"""What README.md shows of sequences, scores and masks runs as it stands there, on NumPy and on a GPU alike."""

from __future__ import annotations

import itertools
import json
import re
import sys
from typing import Any

import numpy as np
import pytest
from workers import ROOT, need_checkout, output_of

import cuflash
from cuflash import mods
from cuflash.mods.language import FUNCTIONS
from cuflash.testing.layouts import host, identical

README = ROOT / "README.md"
need_checkout("README.md")


def code_of(heading: str) -> list[str]:
    """The Python code that a section shows."""
    section = README.read_text("utf-8").split(f"## {heading}\n")[1].split("\n## ")[0]
    return re.findall(r"```python\n(.*?)```", section, re.DOTALL)


def test_its_code_runs_and_its_results_are_those_of_dense_calls(xp: Any) -> None:
    rng = np.random.default_rng(0)

    def drawn(shape: tuple[int, ...], dtype: str = "float16") -> Any:
        return xp.asarray(rng.standard_normal(shape), dtype)

    packed, cached, dense = code_of("Variable-length sequences, caches and decoding")
    names: dict[str, Any] = {"cupy": xp, "cuflash": cuflash}
    names |= {f"{name}_all": drawn((2, 700, heads, 64)) for name, heads in zip("qkv", (8, 2, 2), strict=True)}
    ones = r"cupy\.ones\("
    assert re.search(ones, packed)
    assert re.search(ones, cached)
    names["drawn"] = drawn  # instead of ones, with which a wrong place would not show

    exec(re.sub(ones, "drawn(", packed), names)
    q, k, v = (names[name] for name in "qkv")
    bounds = [0, 300, 301, 512]
    parts = [slice(*pair) for pair in itertools.pairwise(bounds)]
    expected = [host(cuflash.forward(q[part], k[part], v[part], causal=True)) for part in parts]
    for part, one in zip(parts, expected, strict=True):
        np.testing.assert_allclose(host(names["out"][part]), one, atol=4e-3)
    assert [names[name].shape for name in ("dq", "dk", "dv")] == [q.shape, k.shape, v.shape]

    prefill, step = re.sub(ones, "drawn(", cached).split("\n\n")
    exec(prefill, names)
    for part, one in zip(parts, expected, strict=True):
        np.testing.assert_allclose(host(names["out"][part]), one, atol=4e-3)
    exec(step, names)
    new = [names[name] for name in "qkv"]
    for b, part in enumerate(parts):
        keys, values = (xp.concatenate([old[part], x[b]]) for old, x in ((k, new[1]), (v, new[2])))
        one = cuflash.forward(new[0][b], keys, values, causal=True)
        np.testing.assert_allclose(host(names["out"][b]), host(one), atol=4e-3)
    assert host(names["used"]).tolist() == [301, 2, 212]

    exec(dense, names)
    got, rows = host(names["last"]), host(names["dense"])[:, -1:]
    assert identical([got], [rows]) if xp is not np else np.allclose(got, rows, atol=4e-3)


def test_its_functions_change_scores_and_hide_keys(xp: Any) -> None:
    rng = np.random.default_rng(0)
    names: dict[str, Any] = {"cupy": xp, "cuflash": cuflash, "mods": mods}
    names["drawn"] = lambda shape, dtype: xp.asarray(rng.standard_normal(shape), dtype)
    functions, ready_made = code_of("Your own attention")
    exec(functions.replace("cupy.ones(", "drawn("), names)
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

    exec(ready_made, names)
    document = xp.asarray(np.repeat([0, 1, 2], [300, 17, 195]))
    more = {name: names[name] for name in ("sinks",)} | {"dropout_p": 0.1, "dropout_seed": names["seed"]}
    arrays = [names[name] for name in "qkv"]
    expected = cuflash.forward(*arrays, causal=True, mask_mod=mods.segments(document), **more)
    np.testing.assert_allclose(host(names["out"]), host(expected), atol=4e-3)


def test_its_list_of_ready_made_functions_is_whole() -> None:
    text = README.read_text("utf-8").split("**Ready-made**")[1].split("```")[0]
    helpers = {"position_of", "seqlen_q", "seqlen_k", *FUNCTIONS}
    assert set(mods.__all__) - helpers <= set(re.findall(r"`(\w+)`", text))


def test_its_sizes_are_those_that_were_measured() -> None:
    rows = json.loads((ROOT / "examples" / "results" / "install.json").read_text("utf-8"))["rows"]
    by_stack = {row["stack"]: row for row in rows}
    alone = {stack: f"{row['bytes'] / 1e6:.0f} MB" for stack, row in by_stack.items()}
    beside = {stack: f"{row['bytes_beside_torch'] / 1e6:.0f} MB" for stack, row in by_stack.items()}
    text = README.read_text("utf-8")
    on_disk = f"{by_stack['cuflash[cuda13]']['bytes_on_disk'] / 1e6:.0f} MB"
    assert f"The first downloads {alone['cuflash[cuda13]']}, which unpack to {on_disk}" in text
    assert f"write `[cuda12]` instead, which downloads {alone['cuflash[cuda12]']}" in text
    assert f"{alone['cuflash[cuda13]']} alone, {beside['cuflash[cuda13]']} beside PyTorch" in text
    assert f"{beside['flash-attn-4']} beside PyTorch" in text
    assert f"PyTorch 2.14 itself: {by_stack['torch']['bytes'] / 1e9:.1f} GB" in text


@pytest.mark.skipif(not (ROOT / ".ci").is_dir(), reason="the sdist has no .ci")
def test_its_figures_are_those_that_were_measured() -> None:
    output_of(sys.executable, str(ROOT / ".ci" / "readme_tables.py"), "--check")


def test_its_links_and_pictures_are_there() -> None:
    links = re.findall(r"\]\((?!https?:)([^)#]+)\)", README.read_text("utf-8"))
    assert links
    assert all((ROOT / link).is_file() for link in links)
