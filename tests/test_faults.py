"""The faults of `.ci/faults.py`: each still has its place in the sources. Tests that catch them run there."""

from __future__ import annotations

from typing import Any

import pytest
from workers import ROOT, ci_script, need_checkout

need_checkout(".ci")


@pytest.fixture(scope="module")
def faults() -> Any:
    return ci_script("faults")


def test_each_fault_has_one_place_and_tests(faults: Any) -> None:
    assert len({fault.name for fault in faults.FAULTS}) == len(faults.FAULTS) >= 30
    for fault in faults.FAULTS:
        assert (ROOT / fault.path).read_text("utf-8").count(fault.right) == 1, fault
        assert fault.wrong != fault.right, fault
        assert all((ROOT / "tests" / name).exists() for name in fault.tests.split()), fault


def test_a_fault_that_no_test_catches_is_reported(faults: Any, tmp_path: Any) -> None:
    unseen = faults.Fault("a comment", "problem/mask.py", "Mask of causal and", "Mask of", "test_faults.py")
    for name in (f"cuflash/{unseen.file}", "tests/test_faults.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
    text = (ROOT / "cuflash" / unseen.file).read_text("utf-8")
    (tmp_path / "cuflash" / unseen.file).write_text(text, "utf-8")
    (tmp_path / "tests/test_faults.py").write_text("def test_nothing() -> None:\n    pass\n", "utf-8")
    assert not faults.is_caught(unseen, tmp_path)
    assert (tmp_path / "cuflash" / unseen.file).read_text("utf-8") == text
    (tmp_path / "tests/test_faults.py").write_text(
        "from pathlib import Path\n\n\ndef test_text() -> None:\n"
        "    assert 'a query sees.' in Path('cuflash/problem/mask.py').read_text('utf-8')\n", "utf-8"
    )  # fmt: skip
    assert faults.is_caught(unseen, tmp_path)
    with pytest.raises(SystemExit, match="has not one 'no such text'"):
        faults.is_caught(unseen._replace(right="no such text"), tmp_path)
