"""JAX without a GPU: XLA's interface, what the GPU's handlers launch (recorded), and programs in other processes."""

from __future__ import annotations

import ctypes
import importlib
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from workers import run_python

from cuflash import launch
from cuflash.backward import NAMES
from cuflash.device import KNOWN
from cuflash.errors import ProblemError, UnsupportedError
from cuflash.plan import plan

jax = pytest.importorskip("jax")
import jax.numpy as jnp  # noqa: E402

from cuflash.frameworks import xla_ffi, xla_handlers  # noqa: E402
from cuflash.frameworks.jax import attention  # noqa: E402
from cuflash.frameworks.xla_handlers import FORWARD, Options  # noqa: E402

H100 = KNOWN["sm_90"]
OPTIONS = Options(-300, 0, 0.125, 0.0)


def test_options_survive_their_attribute_and_another_versions_are_refused() -> None:
    for options in (OPTIONS, Options(-(2**31), 2**31, 1e-15, 1e15, True), Options(0, 0, 0.1, 30.0)):
        attribute = options.encode()
        assert attribute.dtype == np.int64
        assert Options.decode(attribute.tobytes()) == options
    newer = OPTIONS.encode().copy()
    newer[0] += 1
    for other in (newer, newer[:3]):
        with pytest.raises(UnsupportedError, match="another version of cuflash"):
            Options.decode(other.tobytes())


def raising(error: BaseException) -> Any:
    def run(call: xla_ffi.Call) -> None:
        raise error

    return run


@pytest.mark.parametrize(
    ("error", "wanted"),
    [
        (ProblemError("heads 3 and 2 " * 200), "INVALID_ARGUMENT: ProblemError: heads 3 and 2"),
        (UnsupportedError("größer"), "INVALID_ARGUMENT: UnsupportedError: größer"),
        (RuntimeError("kernel"), "INTERNAL: RuntimeError: kernel"),
        (KeyboardInterrupt(), "INTERNAL: KeyboardInterrupt"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_a_handler_raises_is_an_error_of_xla(error: BaseException, wanted: str) -> None:
    xla_ffi.register("cuflash_test_error", "cpu", 0, raising(error))  # and each replaces the one before
    call = jax.jit(jax.ffi.ffi_call("cuflash_test_error", jax.ShapeDtypeStruct((1,), jnp.float32)))
    with jax.default_device(jax.devices("cpu")[0]), pytest.raises(jax.errors.JaxRuntimeError) as caught:
        jax.block_until_ready(call(jnp.ones(1)))
    assert str(caught.value).startswith(wanted)
    assert len(str(caught.value)) >= len(str(error))


def frame_of(major: int = 0, frame_bytes: int = 1000, api_bytes: int = 1000) -> Any:
    api = xla_ffi._Api(struct_size=api_bytes)
    api.version.major, api.version.minor = major, 9
    return xla_ffi._Frame(struct_size=frame_bytes, api=ctypes.pointer(api))


def test_an_interface_that_does_not_fit_is_told_before_anything_of_it_is_read() -> None:
    xla_ffi.check_fits(frame_of())
    with pytest.raises(UnsupportedError, match=r"FFI has version 1\.9; cuflash speaks 0\.x"):
        xla_ffi.check_fits(frame_of(major=1))
    with pytest.raises(UnsupportedError, match="has 100 bytes; cuflash reads 168"):
        xla_ffi.check_fits(frame_of(frame_bytes=100))
    old = xla_ffi.Call(frame_of(api_bytes=88))
    with pytest.raises(UnsupportedError, match="has no DeviceOrdinal_Get"):
        old.ordinal()


def test_modules_that_are_loaded_anew_serve_on() -> None:
    x = np.ones((1, 3, 1, 4), "f4")
    names = ("xla_ffi", "xla_handlers", "xla_primitives", "jax")
    with jax.default_device(jax.devices("cpu")[0]):
        before = jax.jit(attention)
        np.testing.assert_array_equal(before(x, x, x), x)
        kept = {name: dict(vars(importlib.import_module(f"cuflash.frameworks.{name}"))) for name in names}
        try:
            for name in names:
                again = importlib.reload(sys.modules[f"cuflash.frameworks.{name}"])
            np.testing.assert_array_equal(again.attention(x, x, x), x)
            np.testing.assert_array_equal(before(x, x, x), x)
        finally:
            for name, values in kept.items():
                vars(sys.modules[f"cuflash.frameworks.{name}"]).update(values)


class Recorded:
    """In place of loaded kernels."""

    made: list[Recorded]

    def __init__(self, plan: Any, ordinal: int, parameters: Any) -> None:
        self.plan, self.ordinal, self.thread = plan, ordinal, threading.get_ident()
        self.parameters = SimpleNamespace(write=lambda pointers, misaligning: self.written.append(pointers))
        self.written: list[Any] = []
        self.streams: list[int] = []
        Recorded.made.append(self)

    def launch(self, stream: int) -> None:
        self.streams.append(stream)


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Two GPUs that record: what is done around launches is told in order."""
    told: list[str] = []

    class Entered:
        def __init__(self, what: str) -> None:
            self.what = what

        def __enter__(self) -> None:
            told.append(self.what)

        def __exit__(self, *error: Any) -> None:
            pass

    gpu = SimpleNamespace(device=lambda ordinal: Entered(f"device {ordinal}"))
    monkeypatch.setattr(Recorded, "made", [], raising=False)
    for module in ("launch", "backward"):
        monkeypatch.setattr(sys.modules[f"cuflash.{module}"], "Kernels", Recorded)
    monkeypatch.setattr(launch.device, "query", lambda ordinal: H100)
    monkeypatch.setattr(xla_handlers, "cupy", lambda: gpu)
    monkeypatch.setattr(xla_handlers, "relaxed_capture", lambda: Entered("relaxed"))
    monkeypatch.setattr(xla_handlers.counters, "reserve", lambda ordinal: told.append(f"reserve {ordinal}"))
    monkeypatch.setattr(xla_handlers, "_launchers", {})
    monkeypatch.setattr(jax, "local_devices", lambda backend: [SimpleNamespace(local_hardware_id=n) for n in (0, 1)])
    return told


def buffer(address: int, shape: tuple[int, ...], code: int = 16) -> Any:
    return SimpleNamespace(data=address, dtype=code, rank=len(shape), dims=shape)


def call_of(shapes: list[tuple[int, ...]], results: int, stream: int = 7, ordinal: int = 1, **more: Any) -> Any:
    codes = {5: 11, 6: 11}
    operands = [buffer(4096 * (n + 1), shape, codes.get(n, 16)) for n, shape in enumerate(shapes)]
    made = {"operands": operands, "results": [buffer(2**20 * (n + 1), (10**7,)) for n in range(results)]}
    made |= {"attribute": lambda: OPTIONS.encode().tobytes()} | more
    return SimpleNamespace(**made, stream=lambda: stream, ordinal=lambda: ordinal)


X, LSE = (2, 300, 4, 64), (2, 4, 300, 1)


def test_a_forward_call_writes_its_pointers_and_launches_on_its_stream(gpus: list[str]) -> None:
    for stream in (7, 8):
        xla_handlers.forward_on_cuda(call_of([X, X, X], 2, stream))
    (kernels,) = Recorded.made
    assert kernels.ordinal == 1
    assert kernels.written == [(4096, 8192, 12288, 2**20, 2**21)] * 2
    assert kernels.streams == [7, 8]
    assert gpus == ["relaxed", "device 1", "device 1"]
    xla_handlers.forward_on_cuda(call_of([X, X, X], 2, ordinal=0))
    thread = threading.Thread(target=xla_handlers.forward_on_cuda, args=(call_of([X, X, X], 2),))
    thread.start()
    thread.join()
    assert len(Recorded.made) == 3  # of another GPU, and of another thread
    assert len({kernels.thread for kernels in Recorded.made}) == 2


@pytest.mark.parametrize("with_dlse", [False, True])
def test_a_backward_call_takes_the_workspace_of_xla(gpus: list[str], with_dlse: bool) -> None:
    shapes = [X] * 5 + [LSE] * (1 + with_dlse)
    xla_handlers.backward_on_cuda(call_of(shapes, 4))
    (kernels,) = Recorded.made
    pointers, parts = kernels.written[0], kernels.plan.workspace
    assert pointers[:5] == (4096, 2 * 4096, 3 * 4096, 4 * 4096, 5 * 4096)
    assert pointers[5:8] == (2**20, 2**21, 3 * 2**20)
    assert pointers[8:10] == (6 * 4096, 7 * 4096 if with_dlse else 0)
    assert pointers[10:] == tuple(4 * 2**20 + part if part >= 0 else 0 for part in parts)
    small = call_of(shapes, 4)
    small.results[-1] = buffer(2**24, (10,))
    with pytest.raises(UnsupportedError, match="but the program was lowered with one of 40: lower or export it again"):
        xla_handlers.backward_on_cuda(small)
    assert len(kernels.streams) == 1


def test_operands_that_are_not_aligned_take_the_generic_kernel(gpus: list[str]) -> None:
    call = call_of([X] * 5 + [LSE], 4)
    call.operands[0].data += 2
    xla_handlers.backward_on_cuda(call)
    hopper, generic = Recorded.made
    assert (hopper.plan.variant.of_warpgroups, generic.plan.variant.of_warpgroups) == (True, False)
    assert (len(hopper.streams), len(generic.streams)) == (0, 1)


def lowered(function: Any, *shapes: tuple[int, ...]) -> str:
    arrays = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in shapes]
    return jax.jit(function).trace(*arrays).lower(lowering_platforms=("cuda",)).as_text()


def gradients(*arrays: Any) -> Any:
    return jax.grad(lambda *x: attention(*x, causal=True).astype("float32").sum(), (0, 1, 2))(*arrays)


def test_lowering_loads_what_runs_on_every_gpu_and_gives_backward_its_workspace(gpus: list[str]) -> None:
    specs = xla_handlers.specs_of([X] * 5 + [LSE], ["bfloat16"] * 5 + ["float32"], "cuda:0")
    assert list(specs) == list(NAMES[:6])
    floats = plan(OPTIONS.problem(specs), "backward", H100).workspace_bytes // 4
    text = lowered(gradients, X, X, X)
    assert f"tensor<{floats}xf32>" in text
    assert sorted((made.ordinal, made.plan.kernel.split("_")[0]) for made in Recorded.made) == [
        (0, "backward"), (0, "forward"), (1, "backward"), (1, "forward")]  # fmt: skip
    Recorded.made.clear()
    text = lowered(jax.vmap(gradients), (3, *X), (3, *X), (3, *X))
    folded = {name: spec._replace(shape=(6, *spec.shape[1:])) for name, spec in specs.items()}
    folded = xla_handlers.specs_of([(6, *X[1:])] * 5 + [(6, *LSE[1:])], ["bfloat16"] * 5 + ["float32"], "cuda:0")
    assert f"tensor<{plan(OPTIONS.problem(folded), 'backward', H100).workspace_bytes // 4}xf32>" in text
    assert {made.plan.launches[-1].num_blocks for made in Recorded.made} == {
        plan(OPTIONS.problem(dict(list(folded.items())[:n])), op, H100).launches[-1].num_blocks
        for op, n in (("forward", 3), ("backward", 6))
    }


def test_lowering_reserves_the_counter_of_a_counted_plan(gpus: list[str]) -> None:
    lowered(lambda *x: attention(*x, causal=True), *[(4, 4096, 16, 64)] * 3)
    assert all(made.plan.counted for made in Recorded.made)
    assert [what for what in gpus if "reserve" in what] == ["reserve 0", "reserve 1"]


def test_a_gpu_that_cannot_run_it_does_not_matter_beside_one_that_can(
    gpus: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def query(ordinal: int) -> Any:
        if ordinal not in capable:
            raise UnsupportedError(f"GPU {ordinal} is sm_75")
        return H100

    monkeypatch.setattr(launch.device, "query", query)
    capable = {1}
    lowered(attention, X, X, X)
    capable = set()
    with pytest.raises(UnsupportedError, match="GPU 1 is sm_75"):
        lowered(attention, (3, *X[1:]), (3, *X[1:]), (3, *X[1:]))


def test_lowering_for_machines_that_are_not_this_one() -> None:
    if any(device.platform == "gpu" for device in jax.devices()):
        pytest.skip("needs a machine without a GPU")
    shapes = [(5, *X[1:])] * 3  # of no other test: what is lowered once is kept
    assert FORWARD in lowered(attention, *shapes)
    with pytest.raises(UnsupportedError, match="export on a machine that has one"):
        lowered(gradients, *shapes)
    with pytest.raises(UnsupportedError, match=f"{FORWARD} runs on NVIDIA GPUs and the CPU, not on tpu"):
        jax.jit(attention).trace(*[jax.ShapeDtypeStruct(X, jnp.float32)] * 3).lower(lowering_platforms=("tpu",))


def run(code: str, **variables: str) -> str:
    """What a process of its own prints."""
    return run_python("-c", code, JAX_PLATFORMS="cpu", **variables)


def test_an_import_starts_nothing() -> None:
    code = "import sys, cuflash.frameworks; assert 'jax' not in sys.modules; import cuflash.frameworks.jax\n"
    code += "assert not {'cupy', 'torch'} & set(sys.modules); from jax._src import xla_bridge\n"
    run(code + "assert not xla_bridge.backends_are_initialized()")


CACHED = """
import jax, jax.numpy as jnp, numpy as np
from cuflash.frameworks.jax import attention
hits = []
jax.monitoring.register_event_listener(lambda name, **more: hits.append(name) if name.endswith("cache_hits") else None)
x = jnp.asarray(np.random.default_rng(0).standard_normal((1, 5, 2, 8)), "float32")
for scale in (0.25, 0.5):
    grad = jax.jit(jax.grad(lambda x: attention(x, x, 2 * x, causal=True, softmax_scale=scale).sum()))
    print(np.asarray(grad(x)).tobytes().hex())
print(len(hits))
"""


def test_programs_of_the_persistent_cache_keep_their_options(tmp_path: Path) -> None:
    settings = {"JAX_COMPILATION_CACHE_DIR": str(tmp_path), "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
                "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1"}  # fmt: skip
    *first, none = run(CACHED, **settings).split()
    *second, hits = run(CACHED, **settings).split()
    assert first == second
    assert first[0] != first[1]
    assert (int(none), int(hits) >= 2) == (0, True)


EXPORT = """
import jax, jax.numpy as jnp, pathlib
from cuflash.frameworks.jax import attention
grad = jax.jit(jax.grad(lambda x: attention(x, x, 2 * x, causal=True).sum()))
checks = [jax.export.DisabledSafetyCheck.custom_call(f"cuflash_{op}") for op in ("forward", "backward")]
made = jax.export.export(grad, disabled_checks=checks)(jax.ShapeDtypeStruct((1, 5, 2, 8), jnp.float32))
pathlib.Path(FILE).write_bytes(made.serialize())
print(float(grad(jnp.linspace(-1, 1, 80).reshape(1, 5, 2, 8)).std()))
"""
IMPORT = """
import jax, jax.numpy as jnp, pathlib
import cuflash.frameworks.jax
made = jax.export.deserialize(bytearray(pathlib.Path(FILE).read_bytes()))
print(float(made.call(jnp.linspace(-1, 1, 80).reshape(1, 5, 2, 8)).std()))
"""


def test_an_exported_program_runs_in_another_process(tmp_path: Path) -> None:
    pytest.importorskip("flatbuffers")
    before = f"import jax.export\nFILE = {str(tmp_path / 'program')!r}\n"
    assert run(before + EXPORT) == run(before + IMPORT)


SHARDED = """
import jax, jax.numpy as jnp, numpy as np
from functools import partial
from jax.sharding import Mesh, PartitionSpec as P
from cuflash.errors import ProblemError, UnsupportedError
from cuflash.frameworks.jax import attention
mesh = Mesh(np.array(jax.devices()), ("x",))
q, k, v = (jax.random.normal(jax.random.key(n), (2, 9, heads, 8)) for n, heads in enumerate((4, 2, 2)))
call = partial(attention, causal=True)
grad = lambda f: jax.grad(lambda *x: (f(*x) ** 2).sum(), (0, 1, 2))
for check in (True, False):
    for spec in (P("x"), P(None, None, "x")):
        split = jax.jit(jax.shard_map(call, mesh=mesh, in_specs=(spec,) * 3, out_specs=spec, check_vma=check))
        np.testing.assert_allclose(split(q, k, v), call(q, k, v), atol=1e-5)
        for got, wanted in zip(jax.jit(grad(split))(q, k, v), grad(call)(q, k, v)):
            np.testing.assert_allclose(got, wanted, atol=1e-4)
# k and v on every device: their gradients are summed
queries = P(None, "x")
q = q[:, :8]
split = jax.shard_map(attention, mesh=mesh, in_specs=(queries, P(), P()), out_specs=queries)
for got, wanted in zip(jax.jit(grad(split))(q, k, v), grad(attention)(q, k, v)):
    np.testing.assert_allclose(got, wanted, atol=1e-4)
try:
    heads = P(None, None, "x")
    jax.shard_map(attention, mesh=mesh, in_specs=(heads, P(), P()), out_specs=heads)(q[:, :, :2], k, v)
except ProblemError as error:
    print(error)
explicit = jax.make_mesh((2,), ("x",), axis_types=(jax.sharding.AxisType.Explicit,))
with jax.set_mesh(explicit):
    try:
        attention(*(jax.device_put(x, jax.NamedSharding(explicit, P("x"))) for x in (q, k, v)))
    except UnsupportedError as error:
        print(error)
"""


def test_shards_of_batch_and_heads_and_their_gradients() -> None:
    heads, explicit = run(SHARDED, XLA_FLAGS="--xla_force_host_platform_device_count=2").strip().split("\n")
    assert heads.startswith("q has 1 heads and k has 2; heads_q must be a multiple")
    assert heads.endswith("The shapes are of one shard, over x")
    assert explicit.startswith("q is split over devices by explicit mesh axes")
    assert "jax.shard_map" in explicit
