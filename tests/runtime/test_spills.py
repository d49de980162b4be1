"""Hopper's kernels with score_mod or mask_mod, or in clusters, do not run if they spill registers. Needs NVRTC."""

from __future__ import annotations

import warnings
from dataclasses import replace
from pathlib import Path

import pytest
from plans import mod_problem

from cuflash.__main__ import main
from cuflash.errors import UnsupportedError
from cuflash.planning.device import DEVICES
from cuflash.planning.plan import Plan
from cuflash.planning.planner import plan as make_plan
from cuflash.planning.variant import Variant
from cuflash.runtime import call as calls
from cuflash.runtime import compiler

try:
    compiler.nvrtc_version()
except UnsupportedError as error:
    pytest.skip(f"needs NVRTC: {error}", allow_module_level=True)

MERGE = Variant("merge", "portable/merge.cu", "sm_80", "float16", "float16")


@pytest.fixture(autouse=True)
def _private_cache(cache_dir: Path) -> Path:
    return cache_dir


SPILLS = "ptxas info: 16 bytes stack frame, 12 bytes spill stores, 12 bytes spill loads"
NONE = SPILLS.replace("16", "0").replace("12", "0")


@pytest.fixture
def logs(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Returns compiler logs that replace compilations, in order; each is used once."""
    said: list[str] = []
    monkeypatch.setattr(compiler, "compile_variant", lambda _: (b"cubin", said.pop(0)))
    return said


def test_a_kernel_of_hoppers_with_functions_mods_does_not_run_if_it_spills(
    cache_dir: Path, logs: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    hopper = make_plan(mod_problem(), DEVICES["sm_90"]).launches[0].variant
    other = make_plan(mod_problem(head_dim=128), DEVICES["sm_90"]).launches[0].variant
    logs[:] = [NONE, SPILLS]
    assert compiler.cubin(other) == b"cubin"
    for _ in range(2):  # the second time without compiling
        with pytest.raises(compiler.SpilledError, match=hopper.name) as caught:
            compiler.cubin(hopper)
        assert caught.value.variant is hopper
    assert compiler.unusable() == {hopper}
    assert sorted(path.suffix for path in cache_dir.iterdir()) == [".cubin", ".spilled"]
    monkeypatch.setattr(compiler, "_unusable", set())  # as in another process
    with pytest.raises(compiler.SpilledError):
        compiler.cubin(hopper)
    assert compiler.unusable() == {hopper}
    assert not logs


def test_other_kernels_run_if_they_spill(logs: list[str]) -> None:
    generic = make_plan(mod_problem(), DEVICES["sm_80"]).launches[0].variant
    for variant in (generic, replace(generic, mod_code=None), MERGE):
        logs.append(SPILLS)
        assert compiler.cubin(variant) == b"cubin"
    assert not compiler.unusable()


def test_a_spilled_kernel_is_remembered_without_a_folder(
    tmp_path: Path, logs: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "file"
    file.write_text("a folder cannot be made below a file", "utf-8")
    monkeypatch.setenv("CUFLASH_CACHE_DIR", str(file / "cache"))
    hopper = make_plan(mod_problem(seqlen=1000), DEVICES["sm_90"]).launches[0].variant
    logs.append(SPILLS)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for _ in range(2):
            with pytest.raises(compiler.SpilledError):
                compiler.cubin(hopper)


def test_a_call_is_planned_again_until_no_kernel_spills(monkeypatch: pytest.MonkeyPatch) -> None:
    call, tried = mod_problem(), []
    spilled: set[Variant] = set()

    class Loaded:
        def __init__(self, plan: Plan, ordinal: int) -> None:
            self.plan, variant = plan, plan.launches[0].variant
            tried.append(variant)
            if len(tried) < 3:
                spilled.add(variant)
                raise compiler.SpilledError(variant)

    monkeypatch.setattr(calls, "LoadedPlan", Loaded)
    monkeypatch.setattr(calls, "current_device", lambda: 0)
    monkeypatch.setattr(calls.device, "query", lambda _: DEVICES["sm_90"])
    monkeypatch.setattr(compiler, "unusable", lambda: frozenset(spilled))
    assert calls._load_plan(call, 0).plan.launches[0].variant is tried[2]
    assert len(set(tried)) == 3
    tried.clear()
    monkeypatch.setattr(calls, "plan", lambda *_: make_plan(call, DEVICES["sm_90"]))
    with pytest.raises(compiler.SpilledError):  # planning ends
        calls._load_plan(call, 0)


def test_warmup_replaces_a_kernel_that_must_not_run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    compiled = list[Variant]()

    def compile_variant(variant: Variant) -> tuple[bytes, str]:
        compiled.append(variant)
        return b"\x7fELF", SPILLS if variant.num_in_cluster > 1 else ""

    monkeypatch.setattr(compiler, "compile_variant", compile_variant)
    arguments = "--ops", "backward", "--dtypes", "float16", "--head-dims", "256", "--device", "sm_90"
    assert main(["warmup", *arguments]) == 0
    assert sum(variant.num_in_cluster > 1 for variant in compiled) == 1
    assert {"backward_dq", "backward_dk", "backward_dv"} <= {variant.op for variant in compiled}
    assert "1 replaced, as they must not run" in capsys.readouterr().out
    count = len(compiled)
    assert main(["warmup", *arguments]) == 0
    assert len(compiled) == count
