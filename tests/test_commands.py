"""The command line as a whole: what it says by itself, how it ends, and units in what it prints."""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import time
from functools import partial
from importlib.metadata import entry_points
from typing import Any

import pytest
from workers import ROOT

from cuflash import __version__, units
from cuflash.__main__ import COMMANDS, main
from cuflash.tools import arguments, info


def test_without_a_command_it_tells_which_there_are(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    printed = capsys.readouterr().out
    assert __version__ in printed
    assert "cuflash.forward(q, k, v" in printed
    for name, command in COMMANDS.items():
        assert f"python -m cuflash {name} " in printed
        assert command.help in printed


@pytest.mark.parametrize("name", COMMANDS)
def test_each_command_tells_its_options(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        main([name, "--help"])
    assert name in capsys.readouterr().out


def test_the_script_is_the_module() -> None:
    (script,) = entry_points(group="console_scripts", name="cuflash")
    assert script.load() is main


@pytest.mark.skipif(sys.platform == "win32", reason="POSIX's SIGINT")
@pytest.mark.parametrize(
    "command", [["selftest", "--minutes", "5"], ["bench", "paper"], ["warmup", "--device", "sm_80"]]
)
def test_ctrl_c_ends_it_without_a_traceback(command: list[str], tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUFLASH_CACHE_DIR", str(tmp_path))
    monkeypatch.chdir(ROOT)
    asked: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    asked["preexec_fn"] = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)  # why: a shell's background ignores it
    with subprocess.Popen([sys.executable, "-m", "cuflash", *command], **asked) as process:
        time.sleep(3.0)
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=60)
    assert "Traceback" not in errors, errors
    if command[0] != "warmup" or process.returncode:  # it may have ended before
        assert process.returncode == 130, errors
        assert errors.rstrip().endswith("cuflash: stopped")


@pytest.mark.parametrize(("size", "message"), [
    (0, "0 B"), (1, "1 B"), (1023, "1023 B"), (1024, "1 KiB"), (1536, "1.5 KiB"), (10 * 1024 + 600, "11 KiB"),
    (1023.7 * 1024, "1 MiB"), (9.96 * 2**20, "10 MiB"), (232 * 2**20, "232 MiB"), (5.25 * 2**30, "5.2 GiB"),
    (3000 * 2**40, "3000 TiB"),
])  # fmt: skip
def test_memory_is_told_in_its_largest_unit(size: float, message: str) -> None:
    assert units.memory(size) == message


@pytest.mark.parametrize(
    ("flops", "message"), [(12, "12 FLOP"), (999, "999 FLOP"), (2.5e6, "2.5 MFLOP"), (1.1e12, "1.1 TFLOP")]
)
def test_work_is_told_in_its_largest_unit(flops: float, message: str) -> None:
    assert units.work(flops) == message


def test_gpus_that_are_alike_are_counted() -> None:
    gpus = [{"name": "GPU", "arch": "sm_90", "num_sms": 132}] * 2 + [{"name": "GPU 2", "problem": "it is too old"}]
    assert info.line({"gpus": gpus, "versions": {"cuflash": "1"}}) == "2 x GPU (sm_90, 132 SMs): cuflash 1"
    assert info.line({"gpus": [], "versions": {"cuflash": "1"}}) == "CPU: cuflash 1"


@pytest.mark.parametrize("name", ["none", "a" * 300, "none/none", f"{'a' * 300}/none", "a\0b"])
def test_names_that_cannot_be_there_are_refused(name: str, tmp_path: Any, capsys: pytest.CaptureFixture[str]) -> None:
    path = str(tmp_path / name)
    for validate, kind in ((arguments.existing, "file"), (arguments.folder, "folder")):
        with pytest.raises(argparse.ArgumentTypeError, match=f"there is no such {kind}.*; give the name of one"):
            validate(path)
    if name != "none":
        with pytest.raises(argparse.ArgumentTypeError, match="cannot be written: "):
            arguments.output(path)
    with pytest.raises(SystemExit, match="2"):
        main(["bench", "--compare", path, path])
    assert "there is no such file" in capsys.readouterr().err


def test_a_file_to_write_is_tried_and_stays_as_it_was(tmp_path: Any) -> None:
    full, new, link = (tmp_path / name for name in ("full", "new", "link"))
    full.write_text("kept", "utf-8")
    link.symlink_to(new)
    for path in (full, new, link):
        assert arguments.output(str(path)) == path
    assert full.read_text("utf-8") == "kept"
    assert sorted(x.name for x in tmp_path.iterdir()) == ["full", "link"]
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    assert arguments.output(str(pipe)) == pipe  # it does not wait for a reader
