"""Kernels of `.ci/gpu sanitize`, as planned for a stand-in for a GPU: running them needs one."""

from __future__ import annotations

from importlib import import_module

import numpy as np
import pytest
from variants import variants
from workers import ROOT, need_checkout

from cuflash.planning import device
from cuflash.planning.device import DEVICES

need_checkout(".ci")
pytest.importorskip("cupy")


def test_the_sanitizer_reaches_every_tile_and_every_varlen_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "query", lambda ordinal: DEVICES["sm_90"])
    monkeypatch.syspath_prepend(str(ROOT / ".ci"))
    sanitize = import_module("sanitize")
    launched = sanitize.variants()
    assert not sanitize.unreached(launched)
    of_lengths = {x for x in launched if x.is_varlen and x.mod_code is None and not x.lists_seqlens}
    # Calls that add to float32 arrays, or take or return delta, are those of sanitize_sums.
    plain = {x for x in variants("sm_90") if not x.accumulates and x.delta is None}
    assert {x for x in plain if x.is_varlen} == of_lengths
    mod_sources = {x.source for x in launched if x.is_varlen and (x.mod_code is not None or x.lists_seqlens)}
    assert mod_sources >= {f"sm90/forward/{name}.cu" for name in ("forward", "lse")}
    assert mod_sources >= {f"sm90/{name}/{name}.cu" for name in ("backward", "backward_dq_dkv")}
    assert mod_sources >= {f"sm80/{name}.cu" for name in ("forward", "lse", "backward", "backward_dq")}
    assert "portable/delta.cu" in mod_sources
    assert sanitize.unreached([x for x in launched if not x.is_varlen])
    # Every tile of sm90 forward has calls with scores so large that rows leave the main loop.
    large = import_module("sanitize_cases").LARGE
    tiles: dict[bool, set[object]] = {False: set(), True: set()}  # by whether scores are large
    for (_, case, _), kernels in sanitize.work().items():
        is_large = getattr(case, "base", case).softmax_scale == large
        forward = (x for x in kernels if x.op == "forward" and x.of_warpgroups)
        tiles[is_large].update((x.source, x.dtype, x.tile, x.is_varlen) for x in forward)
    assert tiles[False]
    assert tiles[True] >= tiles[False]


def test_calls_that_add_to_float32_arrays_write_all_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / ".ci"))
    calls = list(import_module("sanitize_sums").sums(np, True, lambda q: q[::-1]))
    assert len({name for name, _ in calls}) == len(calls) == 2 * 2 * (5 + 5 + 4) + 2 * 2
    for name, call in calls:
        results = [x.copy() for x in call()]
        assert not any(np.isnan(x.astype("float32")).any() for x in results), name
        assert all(x.any() for x in results), name
        assert all(np.array_equal(x, y) for x, y in zip(results, call(), strict=True)), name


def test_parts_of_a_run_are_given_as_a_number_and_how_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / ".ci"))
    sanitize = import_module("sanitize")
    assert [sanitize.part_of(arguments) for arguments in ([], ["0/1"], ["7/8"])] == [(0, 1), (0, 1), (7, 8)]
    for wrong in (["8/8"], ["1"], ["1/2", "3"], ["-1/2"], ["a/b"], ["0/0"]):
        with pytest.raises(SystemExit, match="usage: sanitize"):
            sanitize.part_of(wrong)
