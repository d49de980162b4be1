"""Checks that run as processes of a gloo group: `run_ranks` starts a script, whose `main` is `run_check`."""

from __future__ import annotations

import os
import subprocess
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from workers import ROOT


@contextmanager
def started_ranks(script: str, ranks: int, folder: Path, *arguments: object) -> Iterator[list[subprocess.Popen[str]]]:
    """Starts a script of tests/support as so many processes of a group, and ends them.

    arguments: the name of a check and its arguments.
    """
    path, store = ROOT / "tests" / "support" / script, folder / "store"
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    running = [
        subprocess.Popen(
            [sys.executable, str(path), str(rank), str(ranks), str(store), *map(str, arguments)],
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment,
        )
        for rank in range(ranks)
    ]  # fmt: skip
    try:
        yield running
    finally:
        for process in running:
            process.kill()
            process.wait()


def run_ranks(script: str, ranks: int, folder: Path, *arguments: object) -> str:
    """Runs a script as `started_ranks` does; returns what its processes print. If one ends, so do the others."""
    with started_ranks(script, ranks, folder, *arguments) as running:
        return "\n".join(process.communicate()[0] for process in running)


def assert_ranks(script: str, ranks: int, folder: Path, check: str, *arguments: object) -> None:
    """Runs a check as so many processes, and fails if a process does not end it or finds a difference."""
    text = run_ranks(script, ranks, folder, check, *arguments)
    assert text.count(f"ran {check}") == ranks, text
    assert "differs" not in text, text


def run_check(checks: dict[str, Any]) -> None:
    """Runs a check as one rank, by the arguments of `run_ranks`: prints what is wrong, then "ran CHECK"."""
    import torch
    import torch.distributed as dist

    rank, ranks, store, check, *arguments = int(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:]
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(store, ranks), rank=rank, world_size=ranks)
    try:
        wrong = checks[check](rank, ranks, *arguments)
    except Exception:
        print(f"rank {rank}: {traceback.format_exc()}", flush=True)
        os._exit(1)  # the other ranks find the connection closed
    for text in wrong:
        print(f"rank {rank} differs: {text}", flush=True)
    print(f"ran {check}", flush=True)
    # All results are there: a group destroyed while another rank still reads ends that rank with an abort.
    dist.barrier()
    os._exit(bool(wrong))
