"""Runs work in other processes and threads."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Callable
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]


def need_checkout(*parts: str) -> None:
    """Skips a test file if one of these files or folders is missing, as in the sdist."""
    if not all((ROOT / part).exists() for part in parts):
        pytest.skip("needs a checkout", allow_module_level=True)


def output_of(*command: str, **options: Any) -> str:
    """Returns a command's output, which is the message if it fails. options: options of `subprocess.run`."""
    done = subprocess.run(command, capture_output=True, text=True, check=False, **options)
    assert done.returncode == 0, done.stdout + done.stderr
    return str(done.stdout)


def run_python(*arguments: str, **variables: str) -> str:
    """Runs Python with cuflash and the tests' helper modules on its path; returns its output, or fails the test."""
    folders = filter(None, (str(ROOT), str(ROOT / "tests" / "support"), os.environ.get("PYTHONPATH")))
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(folders)} | variables
    return output_of(sys.executable, *arguments, env=environment, timeout=600)


def run_threads(work: Callable[[int], None], count: int) -> None:
    """Runs `work` in `count` threads at once, and raises their errors."""
    errors: list[BaseException] = []
    start = threading.Barrier(count)

    def guarded(index: int) -> None:
        try:
            start.wait(timeout=600)
            work(index)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=guarded, args=(index,)) for index in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=600)
    assert not any(thread.is_alive() for thread in threads)
    if errors:
        raise errors[0]


def ci_script(name: str) -> Any:
    """Returns a script of `.ci/`, which is no package, as a module of its name."""
    spec = spec_from_file_location(name, ROOT / ".ci" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[name] = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
