"""JAX without a GPU: XLA's interface, and the recorded launches of GPU handlers."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import importlib
import sys
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from cuflash.errors import ProblemError, UnsupportedError
from cuflash.planning.device import DEVICES
from cuflash.planning.planner import plan
from cuflash.runtime import call as calls

jax = pytest.importorskip("jax")
import jax.numpy as jnp

from cuflash.frameworks.jax import attention, ffi, handlers
from cuflash.frameworks.jax.handlers import BACKWARD, FORWARD, OPS, CallOptions, CallSpec

H100 = DEVICES["sm_90"]
STATIC = CallOptions(-300, 0, 0.125, 0.0)
X, LSE = (2, 300, 4, 64), (2, 4, 300, 1)


def call_spec(shapes: list[tuple[int, ...]], static: CallOptions = STATIC, workspace: int = 10**7) -> CallSpec:
    names = OPS[BACKWARD].names[: len(shapes)]
    dtypes = tuple("float32" if name.endswith("lse") else "bfloat16" for name in names)
    return CallSpec(static._replace(names=names), tuple(shapes), dtypes, workspace)


def test_attributes_round_trip_and_other_versions_are_refused() -> None:
    encoded = CallOptions(None, -3, 0.1, 0.0, from_end=True, max_seqlen_k=7, num_splits=2, split_size=256)
    for static in (STATIC, CallOptions(-(2**31), 2**31, 1e-15, 1e15, True), CallOptions(0, 0, 0.1, 30.0), encoded):
        for shapes in ([X] * 3, [X] * 5 + [LSE], [(9, 4), (0, 4), (0, 2**40)], []):
            attribute = call_spec(shapes, static).encode()
            assert attribute.dtype == np.int64
            assert CallSpec.decode(attribute.tobytes()) == call_spec(shapes, static)
    attribute[0] += 1
    for other in (attribute.tobytes(), b""):
        with pytest.raises(UnsupportedError, match="another version of cuflash"):
            CallSpec.decode(other)


def test_exported_programs_keep_the_old_name_of_mask_tiles() -> None:
    static = STATIC._replace(names=("q", "k", "v", "mask_tiles"))
    attribute = CallSpec(static).encode().tobytes()
    assert b'"cells"' in attribute
    assert b"mask_tiles" not in attribute
    assert CallSpec.decode(attribute).static.names == static.names


def raising(error: BaseException) -> Any:
    def run(call: ffi.Call) -> None:
        raise error

    return run


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (ProblemError("heads 3 and 2 " * 200), "INVALID_ARGUMENT: ProblemError: heads 3 and 2"),
        (UnsupportedError("größer"), "INVALID_ARGUMENT: UnsupportedError: größer"),
        (RuntimeError("kernel"), "INTERNAL: RuntimeError: kernel"),
        (KeyboardInterrupt(), "INTERNAL: KeyboardInterrupt"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_handler_exceptions_become_xla_errors(error: BaseException, expected: str) -> None:
    ffi.register("cuflash_test_error", "cpu", 0, raising(error))  # and each replaces the one before
    call = jax.jit(jax.ffi.ffi_call("cuflash_test_error", jax.ShapeDtypeStruct((1,), jnp.float32)))
    with jax.default_device(jax.devices("cpu")[0]), pytest.raises(jax.errors.JaxRuntimeError) as caught:
        jax.block_until_ready(call(jnp.ones(1)))
    assert str(caught.value).startswith(expected)
    assert len(str(caught.value)) >= len(str(error))


runtimes: list[Any] = []


def runtime_of(major: int = 0, api_bytes: int = 1000) -> Any:
    api = ffi._Api(struct_size=api_bytes)
    api.version.major, api.version.minor = major, 9
    runtimes.append(api)  # keeps it alive
    return ffi._Runtime(ctypes.addressof(api))


def test_mismatched_interface_is_refused_before_it_is_read() -> None:
    ffi.check_fits(runtime_of(), 168)
    with pytest.raises(UnsupportedError, match=r"FFI 1\.9 is there; cuflash speaks 0\.x"):
        ffi.check_fits(runtime_of(major=1), 168)
    with pytest.raises(UnsupportedError, match=r"frame of XLA's FFI 0\.9 has 100 bytes; cuflash reads 168"):
        ffi.check_fits(runtime_of(), 100)
    with pytest.raises(UnsupportedError, match="has no DeviceOrdinal_Get"):
        runtime_of(api_bytes=88).function("DeviceOrdinal_Get")


def test_call_frames_are_read_as_xla_writes_them() -> None:
    names: list[Any] = []

    def look(call: ffi.Call) -> None:
        buffers = call.buffers()
        assert call.pointers() == tuple(x.data for some in buffers for x in some)
        names.append([[(x.dtype, x.shape) for x in some] for some in buffers])
        names.append(call.attribute())

    ffi.register("cuflash_test_look", "cpu", 0, look)
    results = jax.ShapeDtypeStruct((2, 3), jnp.float32), jax.ShapeDtypeStruct((0, 5), jnp.float16)
    call = jax.jit(functools.partial(jax.ffi.ffi_call("cuflash_test_look", results), call=np.arange(3)))
    with jax.default_device(jax.devices("cpu")[0]):
        jax.block_until_ready(call(jnp.ones((4, 1, 2), jnp.bfloat16), jnp.zeros(())))
    assert names == [[[(16, (4, 1, 2)), (11, ())], [(11, (2, 3)), (10, (0, 5))]], np.arange(3).tobytes()]


def test_reloaded_modules_keep_their_handlers() -> None:
    x = np.ones((1, 3, 1, 4), "f4")
    names = ("jax.ffi", "jax.handlers", "jax.primitives", "jax.autograd", "jax")
    with jax.default_device(jax.devices("cpu")[0]):
        before = jax.jit(attention)
        np.testing.assert_array_equal(before(x, x, x), x)
        namespaces = {name: dict(vars(importlib.import_module(f"cuflash.frameworks.{name}"))) for name in names}
        try:
            for name in names:
                again = importlib.reload(sys.modules[f"cuflash.frameworks.{name}"])
            np.testing.assert_array_equal(again.attention(x, x, x), x)
            np.testing.assert_array_equal(before(x, x, x), x)
        finally:
            for name, values in namespaces.items():
                vars(sys.modules[f"cuflash.frameworks.{name}"]).update(values)


class Recorded:
    """A stand-in for loaded kernels, which records launches."""

    instances: list[Recorded]

    def __init__(self, plan: Any, ordinal: int) -> None:
        self.plan, self.ordinal, self.thread = plan, ordinal, threading.get_ident()
        self.tma_operands = tuple((plan.problem.op.index[name], 15) for name in plan.tma_operands)
        self.vector_loaded = ()
        self.written: list[Any] = []
        self.streams: list[int] = []
        Recorded.instances.append(self)

    def launch(self, pointers: Any, stream: int) -> bool:
        if any(pointers[number] & bits for number, bits in self.tma_operands):
            return False
        self.written.append(pointers)
        self.streams.append(stream)
        return True


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Provides two recording GPUs: the calls around launches are recorded in order."""
    lines: list[str] = []

    @contextlib.contextmanager
    def entered(what: str) -> Iterator[None]:
        lines.append(what)
        yield

    monkeypatch.setattr(Recorded, "instances", [], raising=False)
    monkeypatch.setattr(calls, "LoadedPlan", Recorded)
    monkeypatch.setattr(calls, "current_device", lambda: -1)
    monkeypatch.setattr(calls, "on_device", lambda ordinal: contextlib.nullcontext())
    monkeypatch.setattr(calls.device, "query", lambda ordinal: H100)
    monkeypatch.setattr(handlers, "on_device", lambda ordinal: entered(f"device {ordinal}"))
    for module in (calls, handlers):
        monkeypatch.setattr(module, "relaxed_capture", lambda: entered("relaxed"))
    monkeypatch.setattr(
        handlers.device_memory, "reserve_counter", lambda ordinal, words: lines.append(f"reserve {ordinal}")
    )
    calls.CALL_CACHE.clear()
    monkeypatch.setattr(jax, "local_devices", lambda backend: [SimpleNamespace(local_hardware_id=n) for n in (0, 1)])
    return lines


def call_of(
    shapes: list[tuple[int, ...]], results: int, stream: int = 7, ordinal: int = 1, off: int = 0, **more: Any
) -> Any:
    attribute = call_spec(shapes, **more).encode().tobytes()
    pointers = *(4096 * (n + 1) for n in range(len(shapes))), *(2**20 * (n + 1) for n in range(results))
    pointers = pointers[0] + off, *pointers[1:]
    return SimpleNamespace(
        attribute=lambda: attribute, pointers=lambda: pointers, stream=lambda: stream, ordinal=lambda: ordinal
    )


def test_a_forward_call_writes_its_pointers_and_launches_on_its_stream(gpus: list[str]) -> None:
    for stream in (7, 8):
        handlers.run_on_cuda(FORWARD, call_of([X, X, X], 2, stream))
    (kernels,) = Recorded.instances
    assert kernels.ordinal == 1
    assert kernels.written == [(4096, 8192, 12288, 2**20, 2**21)] * 2
    assert kernels.streams == [7, 8]
    assert gpus == ["relaxed"]  # once
    handlers.run_on_cuda(FORWARD, call_of([X, X, X], 2, ordinal=0))
    thread = threading.Thread(target=handlers.run_on_cuda, args=(FORWARD, call_of([X, X, X], 2)))
    thread.start()
    thread.join()
    assert len(Recorded.instances) == 3  # of another GPU, and of another thread
    assert len({kernels.thread for kernels in Recorded.instances}) == 2


@pytest.mark.parametrize("with_dlse", [False, True])
def test_a_backward_call_takes_the_workspace_of_xla(gpus: list[str], with_dlse: bool) -> None:
    shapes = [X] * 5 + [LSE] * (1 + with_dlse)
    handlers.run_on_cuda(BACKWARD, call_of(shapes, 4))
    (kernels,) = Recorded.instances
    pointers = kernels.written[0]
    assert pointers[:6] == tuple(4096 * n for n in range(1, 7))
    assert pointers[6] == (7 * 4096 if with_dlse else 0)
    assert pointers[7:] == tuple(2**20 * n for n in range(1, 5))
    with pytest.raises(UnsupportedError, match="but the program was lowered with one of 40: lower or export it again"):
        handlers.run_on_cuda(BACKWARD, call_of(shapes, 4, workspace=10))
    assert len(kernels.streams) == 1


def test_unaligned_operands_use_the_generic_kernel(gpus: list[str]) -> None:
    handlers.run_on_cuda(BACKWARD, call_of([X] * 5 + [LSE], 4, off=2))
    hopper, generic = Recorded.instances
    assert (hopper.plan.variant.of_warpgroups, generic.plan.variant.of_warpgroups) == (True, False)
    assert (len(hopper.streams), len(generic.streams)) == (0, 1)


def test_operands_are_placed_by_name_and_kv_is_halved(gpus: list[str]) -> None:
    names, shapes = (
        ("q", "kv", "cu_seqlens_q", "seqused_k", "page_table"),
        ((9, 4, 64), (5, 16, 2, 128), (3,), (2,), (2, 4)),
    )
    static = CallOptions(None, 0, 0.125, 0.0, names=names, from_end=True, max_seqlen_q=9, max_seqlen_k=64)
    whole = CallSpec(static, shapes, ("bfloat16", "bfloat16", "int32", "int32", "int32"))
    problem = whole.problem(FORWARD, "cuda:1")
    whole = whole._replace(workspace=plan(problem, H100).workspace_bytes // 4)
    assert problem.spec("v").strides == (16 * 2 * 128, 2 * 128, 128, 1)
    assert CallOptions.from_problem(problem, names) == static
    pointers = *(4096 * (n + 1) for n in range(5)), 2**20, 2**21, 2**22
    call = SimpleNamespace(attribute=lambda: whole.encode().tobytes(), pointers=lambda: pointers, stream=lambda: 7,
                           ordinal=lambda: 1)  # fmt: skip
    handlers.run_on_cuda(FORWARD, call)
    inputs = {"q": 4096, "k": 8192, "v": 8192 + 2 * 64, "cu_seqlens_q": 12288, "seqused_k": 16384, "page_table": 20480}
    expected = [inputs.get(operand.name, 0) for operand in problem.op.inputs]
    assert Recorded.instances[-1].written == [(*expected, 2**20, 2**21, 2**22)]


def lowered(function: Any, *shapes: tuple[int, ...]) -> str:
    arrays = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in shapes]
    return jax.jit(function).trace(*arrays).lower(lowering_platforms=("cuda",)).as_text()


def gradients(*arrays: Any) -> Any:
    return jax.grad(lambda *x: attention(*x, causal=True).astype("float32").sum(), (0, 1, 2))(*arrays)


def test_lowering_loads_kernels_on_every_gpu_and_sizes_the_workspace(gpus: list[str]) -> None:
    def planned(target: str, shapes: list[tuple[int, ...]]) -> Any:
        return plan(call_spec(shapes).problem(target, "cuda:0"), H100)

    floats = planned(BACKWARD, [X] * 5 + [LSE]).workspace_bytes // 4
    text = lowered(gradients, X, X, X)
    assert f"tensor<{floats}xf32>" in text
    assert sorted((recorded.ordinal, recorded.plan.kernel.split("_")[0]) for recorded in Recorded.instances) == [
        (0, "backward"), (0, "forward"), (1, "backward"), (1, "forward")]  # fmt: skip
    Recorded.instances.clear()
    text = lowered(jax.vmap(gradients), (3, *X), (3, *X), (3, *X))
    folded = [(6, *X[1:])] * 5 + [(6, *LSE[1:])]
    assert f"tensor<{planned(BACKWARD, folded).workspace_bytes // 4}xf32>" in text
    assert {recorded.plan.launches[-1].num_blocks for recorded in Recorded.instances} == {
        planned(target, folded[:n]).launches[-1].num_blocks for target, n in ((FORWARD, 3), (BACKWARD, 6))
    }


def test_lowering_reserves_the_counter_of_a_counted_plan(gpus: list[str]) -> None:
    lowered(lambda *x: attention(*x, causal=True), *[(4, 4096, 16, 64)] * 3)
    assert all(recorded.plan.launches[0].takes_counter for recorded in Recorded.instances)
    assert [what for what in gpus if "reserve" in what] == ["reserve 0", "reserve 1"]


def test_unsupported_gpus_are_skipped_beside_a_supported_one(gpus: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def query(ordinal: int) -> Any:
        if ordinal not in capable:
            raise UnsupportedError(f"GPU {ordinal} is sm_75")
        return H100

    monkeypatch.setattr(calls.device, "query", query)
    capable = {1}
    lowered(attention, X, X, X)
    capable = set()
    with pytest.raises(UnsupportedError, match="GPU 1 is sm_75"):
        lowered(attention, (3, *X[1:]), (3, *X[1:]), (3, *X[1:]))


def test_lowering_for_other_machines() -> None:
    if any(device.platform == "gpu" for device in jax.devices()):
        pytest.skip("needs a machine without a GPU")
    shapes = [(5, *X[1:])] * 3  # unique to this test: lowered programs are cached
    assert FORWARD in lowered(attention, *shapes)
    with pytest.raises(UnsupportedError, match="export on a machine that has one"):
        lowered(gradients, *shapes)
    with pytest.raises(UnsupportedError, match=f"{FORWARD} runs on NVIDIA GPUs and the CPU, not on tpu"):
        jax.jit(attention).trace(*[jax.ShapeDtypeStruct(X, jnp.float32)] * 3).lower(lowering_platforms=("tpu",))
