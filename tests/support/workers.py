"""Work in other processes and threads."""

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
    """Skips a test file where one of these files or folders is missing, as in the sdist."""
    if not all((ROOT / part).exists() for part in parts):
        pytest.skip("needs a checkout", allow_module_level=True)


def output_of(*command: str, **options: Any) -> str:
    """What a command prints; all that it prints is the message where it fails. options: those of `subprocess.run`."""
    done = subprocess.run(command, capture_output=True, text=True, check=False, **options)
    assert done.returncode == 0, done.stdout + done.stderr
    return str(done.stdout)


def run_python(*arguments: str, **variables: str) -> str:
    """What Python prints; it finds cuflash and tests' helper modules here. The test fails if Python does."""
    folders = filter(None, (str(ROOT), str(ROOT / "tests" / "support"), os.environ.get("PYTHONPATH")))
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(folders)} | variables
    return output_of(sys.executable, *arguments, env=environment, timeout=600)


def run_threads(work: Callable[[int], None], count: int) -> None:
    """`work` in so many threads at once; their errors are raised here."""
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
    """Imports a script of `.ci/`, which is no package, under its name."""
    spec = spec_from_file_location(name, ROOT / ".ci" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[name] = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
