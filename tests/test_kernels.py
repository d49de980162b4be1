"""`launch.Kernels` with the GPU recorded: which parameters a launch takes, and in which context."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from test_params_sm90 import FakeDriver

from cuflash import launch, params, tensor_map
from cuflash.device import KNOWN
from cuflash.errors import UnsupportedError
from cuflash.plan import plan
from cuflash.problem import ArraySpec, Problem

POINTERS = (2**30, 2**31, 2**32, 2**33, 2**34)


class Gpus:
    """What was launched (stream, bytes of the parameters), by a recorded driver."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.current, self.driver = 1, FakeDriver()
        self.launched: list[tuple[int, bytes]] = []
        self.parameters: dict[int, params.Parameters] = {}  # by address
        monkeypatch.setattr(launch, "current_device", lambda: self.current)
        monkeypatch.setattr(launch, "on_device", self.on_device)
        monkeypatch.setattr(launch, "jit", SimpleNamespace(load=lambda variant, ordinal: self.launch))
        monkeypatch.setattr(launch.counters, "counter", lambda ordinal, stream: 512 * stream)
        monkeypatch.setattr(tensor_map, "function", self.driver.function)
        function = SimpleNamespace(CPointer=lambda address: address)
        for name, module in (("cupy", SimpleNamespace()), ("cupy.cuda", SimpleNamespace()),
                             ("cupy.cuda.function", function)):  # fmt: skip
            monkeypatch.setitem(sys.modules, name, module)
        hold = params.Parameters._hold

        def noted(parameters: params.Parameters, packed: bytes) -> None:
            hold(parameters, packed)
            self.parameters[parameters.address] = parameters

        monkeypatch.setattr(params.Parameters, "_hold", noted)

    @contextlib.contextmanager
    def on_device(self, ordinal: int) -> Iterator[None]:
        before, self.current = self.current, ordinal
        yield
        self.current = before

    def launch(self, grid: Any, block: Any, arguments: Any, smem_bytes: int, stream: Any) -> None:
        assert self.current == 1
        (address,) = arguments
        self.launched.append((stream.ptr, bytes(self.parameters[address])))


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> Gpus:
    return Gpus(monkeypatch)


def forward(seqlen: int = 300, counted: bool = False) -> tuple[launch.Kernels, params.Parameters]:
    """Kernels of a problem on Hopper, and parameters like theirs."""
    q = ArraySpec.dense((2, seqlen, 4, 64), "bfloat16")
    problem = Problem.of(q, q, q, causal=counted)
    made = plan(problem, "forward", KNOWN["sm_90"])
    assert made.counted == counted
    wanted, own = (params.forward_parameters(problem, made, q.strides) for _ in range(2))
    return launch.Kernels(made, 1, own), wanted


def moved(by: int) -> tuple[int, ...]:
    return *POINTERS[:3], POINTERS[3] + 4096 * by, POINTERS[4]


def test_a_launch_takes_the_parameters_of_its_pointers_and_those_that_are_known_are_not_written_again(
    gpus: Gpus,
) -> None:
    kernels, wanted = forward()
    for by in (0, 1, 0, 1, 2):
        known = moved(by)
        kernels.launch(known, stream=7)
        wanted.write(known)
        assert gpus.launched[-1] == (7, bytes(wanted))
    made = [name for name, *_ in gpus.driver.calls if name == "cuTensorMapEncodeTiled"]
    assert len(made) == 4 + 4  # of q, k, v and out, here and in `wanted`; a copy has them
    gpus.driver.calls.clear()
    kernels.launch(moved(1), stream=8)
    assert gpus.launched[-1][0] == 8
    assert gpus.driver.calls == []


def test_past_so_many_sets_of_pointers_the_oldest_is_overwritten(gpus: Gpus, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "MAX_WRITTEN", 3)
    kernels, wanted = forward()
    before = len(gpus.parameters)
    for by in (*range(10), 8, 0):
        kernels.launch(moved(by), stream=7)
        wanted.write(moved(by))
        assert gpus.launched[-1][1] == bytes(wanted)
    assert len(gpus.parameters) == before + 2


def test_what_was_refused_is_not_launched_and_not_known(gpus: Gpus) -> None:
    kernels, wanted = forward()
    for known in (moved(0), moved(1)):
        gpus.driver.result = 1
        with pytest.raises(UnsupportedError, match="the driver refuses"):
            kernels.launch(known, stream=7)
        gpus.driver.result = 0
        kernels.launch(known, stream=7)
        wanted.write(known)
        assert gpus.launched[-1][1] == bytes(wanted)
    assert len(gpus.launched) == 2


def test_a_thread_without_the_gpus_context_gets_it_for_the_launch(gpus: Gpus) -> None:
    kernels, _ = forward()
    for gpus.current in (-1, 0):
        before = gpus.current
        kernels.launch(POINTERS, stream=7)
        assert gpus.current == before
    assert len(gpus.launched) == 2


def test_a_counter_is_that_of_the_stream(gpus: Gpus) -> None:
    kernels, wanted = forward(seqlen=8192, counted=True)
    assert isinstance(wanted, params.WarpgroupParameters)
    wanted.write(POINTERS)
    for stream in (7, 9, 7):
        kernels.launch(POINTERS, stream)
        wanted.count_with(512 * stream)
        assert gpus.launched[-1] == (stream, bytes(wanted))


def test_the_parts_of_a_workspace_begin_where_the_plan_says(gpus: Gpus) -> None:
    q = ArraySpec.dense((2, 300, 4, 64), "bfloat16")
    problem = Problem.of(q, q, q)
    made = plan(problem, "backward", KNOWN["sm_90"])
    assert len(made.workspace) == 5
    assert -1 in made.workspace
    wanted, own = (params.backward_parameters(problem, made, [q.strides] * 5) for _ in range(2))
    pointers = [2**30 * (n + 1) for n in range(10)]
    workspace = 2**40
    launch.Kernels(made, 1, own).launch((*pointers, workspace), stream=7)
    wanted.write((*pointers, *(workspace + begin if begin >= 0 else 0 for begin in made.workspace)))
    assert gpus.launched == [(7, bytes(wanted))] * len(made.launches)
