"""The command line as a whole: its guide, exit codes, interrupts, and units in its output."""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
from functools import partial
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import pytest
from workers import ROOT, run_python

from cuflash import __version__, interrupt, units
from cuflash.__main__ import COMMANDS, main
from cuflash.tools import arguments, info


def test_without_a_command_it_lists_the_commands(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    printed = capsys.readouterr().out
    assert __version__ in printed
    assert "cuflash.forward(q, k, v" in printed
    for name, command in COMMANDS.items():
        assert f"python -m cuflash {name} " in printed
        assert command.help in printed


@pytest.mark.parametrize("name", COMMANDS)
def test_each_command_lists_its_options(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        main([name, "--help"])
    assert name in capsys.readouterr().out


def test_the_script_is_the_module() -> None:
    (script,) = entry_points(group="console_scripts", name="cuflash")
    assert script.load() is main


def interrupted(*command: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Runs Python with these arguments and sends Ctrl-C after the line "ready"; returns its end."""
    folders = filter(None, (variables.pop("first", None), str(ROOT), os.environ.get("PYTHONPATH")))
    options: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "cwd": ROOT}
    options["env"] = os.environ | {"PYTHONPATH": os.pathsep.join(folders)} | variables
    options["preexec_fn"] = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)  # background jobs ignore it
    with subprocess.Popen([sys.executable, *command], **options) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if line == "ready\n":
                process.send_signal(signal.SIGINT)
                break
        output, errors = process.communicate(timeout=600)
    return subprocess.CompletedProcess(command, process.returncode, output, errors)


of_posix = pytest.mark.skipif(sys.platform == "win32", reason="POSIX's SIGINT")
# Replaces a module: it runs until it is interrupted, and suppresses a KeyboardInterrupt, as some packages do.
IMPORTED = """
import time
print("ready", flush=True)
try:
    while True:  # in short sleeps: Python would see a signal that comes just before a sleep only after it
        time.sleep(0.1)
except BaseException:
    pass
"""
# Replaces a function of a command: it runs until the command is interrupted.
WORKING = """
import concurrent.futures, sys, threading
from cuflash.__main__ import main
from cuflash.runtime import compiler
from cuflash.tools import selftest
from cuflash.tools.bench import run as bench

interrupted, shutdown = threading.Event(), concurrent.futures.ThreadPoolExecutor.shutdown

def work(*arguments, **keywords):
    print("ready", flush=True)
    while not interrupted.wait(1.0):  # a signal that comes just as a wait begins is seen when it ends
        pass

def shutdown_now(*arguments, **keywords):
    interrupted.set()
    shutdown(*arguments, **keywords)

concurrent.futures.ThreadPoolExecutor.shutdown = shutdown_now
compiler.nvrtc_version, compiler.is_cached, compiler.cubin = lambda: (13, 0), lambda variant: False, work
selftest.Cpu.run = selftest.Gpus.run = bench.run_case = work
sys.exit(main())
"""


@of_posix
@pytest.mark.parametrize("module", ["numpy", "argparse"])  # first imports of the package and of the command
@pytest.mark.parametrize("is_script", [False, True], ids=["module", "script"])
def test_ctrl_c_ends_its_imports_without_a_traceback(module: str, is_script: bool, tmp_path: Path) -> None:
    (tmp_path / f"{module}.py").write_text(IMPORTED, "utf-8")
    script = tmp_path / "cuflash"
    script.write_text("import sys\nfrom cuflash.__main__ import main\nsys.exit(main())\n", "utf-8")
    done = interrupted(*([str(script)] if is_script else ["-m", "cuflash"]), "info", first=str(tmp_path))
    assert (done.returncode, done.stderr) == (130, "cuflash: stopped\n")


@of_posix
@pytest.mark.parametrize("command", ["selftest --minutes 60", "bench paper", "warmup --device sm_80 --jobs 2"])
def test_ctrl_c_ends_its_work_without_a_traceback(command: str, tmp_path: Path) -> None:
    done = interrupted("-c", WORKING, *command.split(), CUFLASH_CACHE_DIR=str(tmp_path))
    assert "Traceback" not in done.stderr, done.stderr
    assert done.returncode == 130, done.stderr
    assert done.stderr.rstrip().endswith("cuflash: stopped")


# Replaces `python -m cuflash`, with the process arguments that it has before the package is imported.
COMMAND = """
import sys
sys.orig_argv, sys.argv = ["python", "-m", "cuflash"], ["-m"]
"""
# Prints each module that is imported while Ctrl-C prints a traceback.
UNGUARDED = """
import signal
signal.signal(signal.SIGINT, signal.default_int_handler)  # background jobs ignore it

class Finder:
    def find_spec(self, name, *_):
        if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            print(name)

sys.meta_path.insert(0, Finder())
for name in ("signal", "enum"):
    del sys.modules[name]
import cuflash
"""
# Ends as slowly as packages that have much to release.
ENDING = """
import atexit, time
from cuflash.__main__ import main

def wait():
    print("ready", flush=True)
    while True:
        time.sleep(0.1)

atexit.register(wait)
sys.exit(main(["--version"]))
"""


@of_posix
def test_ctrl_c_has_its_handler_before_anything_is_imported() -> None:
    printed = run_python("-c", COMMAND + UNGUARDED)
    assert printed.split() == ["cuflash", "cuflash.interrupt"]


@of_posix
def test_ctrl_c_ends_the_end_of_a_command_without_a_traceback() -> None:
    done = interrupted("-c", COMMAND + ENDING)
    assert (done.returncode, done.stderr) == (130, "cuflash: stopped\n")


@of_posix
def test_ctrl_c_is_left_alone_in_other_programs(tmp_path: Path) -> None:
    (tmp_path / "numpy.py").write_text(IMPORTED.replace("except BaseException:", "finally:"), "utf-8")
    done = interrupted("-c", "import cuflash", first=str(tmp_path))
    assert "KeyboardInterrupt" in done.stderr


@pytest.mark.parametrize(("command_line", "arguments", "expected"), [
    ("python -m cuflash", "-m", True), ("python -W error -mcuflash info", "-m info", True),
    ("python -m cuflash.__main__ info", "-m info", True), ("python -m cuflash.tools.info", "-m", False),
    ("python -m pytest -m cuflash", "-m -m cuflash", False), ("python -m pytest cuflash", "-m cuflash", False),
    ("python /a/bin/cuflash warmup --jobs 2", "/a/bin/cuflash warmup --jobs 2", True),
    ("python /a/bin/cuflash.py", "/a/bin/cuflash.py", False), ("python -c cuflash", "-c", False),
    ("python /a/bin/pytest cuflash", "/a/bin/pytest cuflash", False), ("python", "", False),
])  # fmt: skip
def test_the_process_of_a_command_is_distinguished_from_others(
    command_line: str, arguments: str, expected: bool
) -> None:
    assert interrupt.is_command(command_line.split(), arguments.split()) is expected


# Replaces the slow work of a command: the result comes at once.
AT_ONCE = """
import sys
from cuflash.__main__ import main
from cuflash.runtime import compiler
from cuflash.testing.arrays import NumpyArrays
from cuflash.tools import info
from cuflash.tools.bench import accuracy, report, run

compiler.nvrtc_version, compiler.is_cached, compiler.cubin = lambda: (13, 0), lambda variant: False, lambda variant: b""
run.bench = lambda arrays, options: report.Report(info.machine(), "numpy", "quick", {}, command="")
run.find = accuracy.find = lambda: (NumpyArrays(), "")
accuracy.settings = lambda *_: ()
sys.exit(main())
"""


@pytest.mark.skipif(sys.platform == "win32", reason="a closed pipe of POSIX")
@pytest.mark.parametrize(("command", "unbuffered", "stderr"), [
    ("", "", True), ("--help", "", True), ("info", "", True), ("info", "1", False), ("bench quick", "", True),
    ("accuracy", "1", True), ("warmup --device sm_80", "", True), ("warmup --device sm_80", "", False),
    ("selftest --problems 1", "", True),
])  # fmt: skip
def test_a_command_whose_reader_has_ended_ends_quietly(
    command: str, unbuffered: str, stderr: bool, tmp_path: Path
) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    variables = {"PYTHONUNBUFFERED": unbuffered, "CUFLASH_CACHE_DIR": str(tmp_path), "PYTHONPATH": str(ROOT)}
    process = [sys.executable, "-c", AT_ONCE, *command.split()]
    streams = {"stdout": writing, "stderr": subprocess.PIPE if stderr else writing}
    done = subprocess.run(process, **streams, env=os.environ | variables, timeout=600, check=False)
    os.close(writing)
    assert done.returncode == 141
    assert b"Broken" not in (done.stderr or b""), done.stderr


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="Linux's device that is always full")
@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize("command", ["", "info", "bench quick", "accuracy", "warmup --device sm_80",
                                     "selftest --problems 1"])  # fmt: skip
def test_a_command_whose_output_has_no_space_says_so(command: str, unbuffered: str, tmp_path: Path) -> None:
    variables = {"PYTHONUNBUFFERED": unbuffered, "CUFLASH_CACHE_DIR": str(tmp_path), "PYTHONPATH": str(ROOT)}
    process = [sys.executable, "-c", AT_ONCE, *command.split()]
    with open("/dev/full", "w") as full:
        streams: list[dict[str, Any]] = [{"stdout": full, "stderr": subprocess.PIPE}, {"stdout": full, "stderr": full}]
        for each in streams:
            done = subprocess.run(process, **each, env=os.environ | variables, timeout=600, check=False, text=True)
            assert done.returncode == 1
            if done.stderr is not None:
                assert done.stderr.endswith("cuflash: cannot write the output: No space left on device\n")
                assert "Traceback" not in done.stderr


def test_help_whose_output_has_no_space_fails_too() -> None:
    if not Path("/dev/full").exists():
        pytest.skip("Linux's device that is always full")
    with open("/dev/full", "w") as full:
        process = [sys.executable, "-m", "cuflash", "info", "--help"]
        done = subprocess.run(process, stdout=full, stderr=subprocess.PIPE, cwd=ROOT, check=False, text=True)
    assert (done.returncode, done.stderr) == (1, "cuflash: cannot write the output: No space left on device\n")


@pytest.mark.parametrize(("size", "message"), [
    (0, "0 B"), (1, "1 B"), (1023, "1023 B"), (1024, "1 KiB"), (1536, "1.5 KiB"), (10 * 1024 + 600, "11 KiB"),
    (1023.7 * 1024, "1 MiB"), (9.96 * 2**20, "10 MiB"), (232 * 2**20, "232 MiB"), (5.25 * 2**30, "5.2 GiB"),
    (3000 * 2**40, "3000 TiB"),
])  # fmt: skip
def test_memory_is_printed_in_its_largest_unit(size: float, message: str) -> None:
    assert units.memory(size) == message


@pytest.mark.parametrize(
    ("flops", "message"), [(12, "12 FLOP"), (999, "999 FLOP"), (2.5e6, "2.5 MFLOP"), (1.1e12, "1.1 TFLOP")]
)
def test_work_is_printed_in_its_largest_unit(flops: float, message: str) -> None:
    assert units.work(flops) == message


def test_gpus_that_are_alike_are_counted() -> None:
    gpus = [{"name": "GPU", "arch": "sm_90", "num_sms": 132}] * 2 + [{"name": "GPU 2", "problem": "it is too old"}]
    assert info.line({"gpus": gpus, "versions": {"cuflash": "1"}}) == "2 x GPU (sm_90, 132 SMs): cuflash 1"
    assert info.line({"gpus": [], "versions": {"cuflash": "1"}}) == "CPU: cuflash 1"


@pytest.mark.parametrize("name", ["none", "a" * 300, "none/none", f"{'a' * 300}/none", "a\0b"])
def test_names_that_cannot_be_there_are_refused(name: str, tmp_path: Any, capsys: pytest.CaptureFixture[str]) -> None:
    path = str(tmp_path / name)
    with pytest.raises(argparse.ArgumentTypeError, match=r"there is no such file.*; give the name of one"):
        arguments.existing(path)
    if name != "none":
        with pytest.raises(argparse.ArgumentTypeError, match="cannot be written: "):
            arguments.output(path)
    if not name.startswith("none"):
        with pytest.raises(argparse.ArgumentTypeError, match="cannot be written to: "):
            arguments.folder(path)
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
