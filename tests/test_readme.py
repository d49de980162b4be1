"""What README.md shows of sequences runs as it stands there, on NumPy and on a GPU alike."""

from __future__ import annotations

import itertools
import re
from typing import Any

import numpy as np
import pytest
from libraries import host, identical
from workers import ROOT

import cuflash

README = ROOT / "README.md"
if not README.is_file():
    pytest.skip("needs a checkout", allow_module_level=True)
SECTION = README.read_text("utf-8").split("## Sequences of several lengths, caches and decoding\n")[1].split("\n## ")[0]


def test_its_code_runs_and_its_results_are_those_of_dense_calls(xp: Any) -> None:
    rng = np.random.default_rng(0)

    def drawn(shape: tuple[int, ...], dtype: str = "float16") -> Any:
        return xp.asarray(rng.standard_normal(shape), dtype)

    packed, cached, dense = re.findall(r"```python\n(.*?)```", SECTION, re.DOTALL)
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
    wanted = [host(cuflash.forward(q[part], k[part], v[part], causal=True)) for part in parts]
    for part, one in zip(parts, wanted, strict=True):
        np.testing.assert_allclose(host(names["out"][part]), one, atol=4e-3)
    assert [names[name].shape for name in ("dq", "dk", "dv")] == [q.shape, k.shape, v.shape]

    prefill, step = re.sub(ones, "drawn(", cached).split("\n\n")
    exec(prefill, names)
    for part, one in zip(parts, wanted, strict=True):
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
