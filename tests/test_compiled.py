"""The record of compiled kernels: when `.ci/run` compiles all variants, and which ones a sample has."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from variants import sampled, variants
from workers import ci_script, need_checkout

need_checkout(".ci")
pytest.importorskip("cupy", reason="needs NVRTC")


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    monkeypatch.setattr(sys, "path", [*sys.path])
    module = ci_script("compiled")
    monkeypatch.setattr(module, "RECORD", tmp_path / "compiled.json")
    monkeypatch.setattr(module, "variants", lambda arch: variants(arch)[:3])
    return module


def test_a_sample_will_do_once_all_kernels_passed(compiled: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert compiled.main([]) == compiled.main(["write"]) == compiled.main([]) == 0
    assert capsys.readouterr().out.split() == ["all", "sample"]


@pytest.mark.parametrize("change", [{"digest": "0"}, {"compilers": ["13.0.88"]}, {"kernels": 5}])
def test_another_record_does_not_count(compiled: Any, change: Any, capsys: pytest.CaptureFixture[str]) -> None:
    compiled.RECORD.write_text(json.dumps(compiled.state() | change), "utf-8")
    assert compiled.main([]) == 0
    assert capsys.readouterr().out == "all\n"


def test_comments_are_no_part_of_the_digest(compiled: Any, tmp_path: Path) -> None:
    texts = "int x = 1;  // one\n\n  // two\nint y;\n", "int x = 1;\nint y;  // three\n", "int x = 2;\nint y;\n"
    path, codes = tmp_path / "a.cu", []
    for text in texts:
        path.write_text(text, "utf-8")
        codes.append(compiled.code(path))
    assert codes[0] == codes[1] != codes[2]


def test_an_unknown_command_writes_nothing(compiled: Any) -> None:
    assert compiled.main(["record"]) == 2
    assert not compiled.RECORD.exists()


def test_a_sample_follows_from_its_seed() -> None:
    numbers = list(range(100))
    assert sampled(numbers, None) == numbers
    sample = sampled(numbers, "one")
    assert sample == sampled(numbers, "one") != sampled(numbers, "two")
    assert len(set(sample)) == 7
    assert sampled([None], "one") == [None]
