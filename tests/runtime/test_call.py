"""Calls on a recorded GPU: parameters of launches, what is cached, and the memory that it takes."""

from __future__ import annotations

import gc
import tracemalloc
from typing import Any

import pytest
from drivers import Array, Gpus
from plans import problem as make_problem

import cuflash
from cuflash.errors import ProblemError, UnsupportedError
from cuflash.planning.device import DEVICES
from cuflash.planning.planner import plan as make_plan
from cuflash.runtime import call as calls
from cuflash.runtime import device_memory, tensor_map
from cuflash.runtime.call_cache import RecentKeys, SecondChanceCache
from cuflash.runtime.structs import FREE_BYTES, STRUCTS, ParamBuffer, ParamTemplate

POINTERS = (2**30, 2**31, 2**32, 2**33, 2**34)


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> Gpus:
    return Gpus(monkeypatch)


def forward(seqlen: int = 300, counted: bool = False) -> tuple[calls.LoadedPlan, ParamTemplate]:
    """Returns the kernels of a problem on Hopper, and a template of their parameters."""
    problem = make_problem(dims=(2, seqlen, seqlen, 4, 4), causal=counted)
    plan = make_plan(problem, DEVICES["sm_90"])
    assert plan.launches[0].takes_counter == counted
    return calls.LoadedPlan(plan, 1), ParamTemplate(problem, plan.launches[0], {})


def moved(by: int) -> tuple[int, ...]:
    return *POINTERS[:3], POINTERS[3] + 4096 * by, POINTERS[4]


def packed_bytes(template: ParamTemplate, pointers: tuple[int, ...]) -> bytes:
    return bytes(template.pack(pointers).memory)


def test_a_launch_packs_new_pointers_and_reuses_them_after_two_uses(
    gpus: Gpus,
) -> None:
    kernels, template = forward()
    for by in (0, 1, 0, 1, 2):
        kernels.launch(moved(by), stream=7)
        assert gpus.launched[-1] == (7, packed_bytes(template, moved(by)))
    launched = {by: packed_bytes(template, moved(by)) for by in (0, 1)}
    gpus.driver.calls.clear()
    for by in (0, 1, 0):  # each was used twice
        kernels.launch(moved(by), stream=8)
        assert gpus.launched[-1] == (8, launched[by])
    assert gpus.driver.calls == []


def test_refused_pointers_are_not_launched_and_not_cached(gpus: Gpus) -> None:
    kernels, template = forward()
    for pointers in (moved(0), moved(1)):
        gpus.driver.result = 1
        with pytest.raises(UnsupportedError, match="the driver refuses"):
            kernels.launch(pointers, stream=7)
        gpus.driver.result = 0
        kernels.launch(pointers, stream=7)
        assert gpus.launched[-1][1] == packed_bytes(template, pointers)
    assert len(gpus.launched) == 2


def test_a_call_within_a_call_has_parameters_of_its_own(gpus: Gpus) -> None:
    # A collector's finalizer may call while parameters are packed.
    kernels, template = forward()
    pack, inner = ParamTemplate.pack, [moved(1)]

    def interrupted(template: ParamTemplate, pointers: tuple[int, ...]) -> ParamBuffer:
        buffer = pack(template, pointers)
        if inner:
            kernels.launch(inner.pop(), stream=7)
        return buffer

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ParamTemplate, "pack", interrupted)
        kernels.launch(moved(0), stream=7)
    assert [packed for _, packed in gpus.launched] == [packed_bytes(template, moved(by)) for by in (1, 0)]


def test_free_buffers_are_bounded_in_bytes_and_packed_again(gpus: Gpus) -> None:
    _, template = forward()
    buffers = [template.pack(POINTERS) for _ in range(FREE_BYTES // template.size + 3)]
    for buffer in buffers:
        buffer.free_list.append(buffer)
    assert len(buffer.free_list) == FREE_BYTES // template.size
    assert template.pack(POINTERS) is buffer


def test_a_thread_without_the_gpus_context_gets_it_for_the_launch(gpus: Gpus) -> None:
    kernels, _ = forward()
    for gpus.current in (-1, 0):
        before = gpus.current
        kernels.launch(POINTERS, stream=7)
        assert gpus.current == before
    assert len(gpus.launched) == 2


def test_a_thread_without_the_gpus_context_gets_it_for_descriptors(gpus: Gpus, monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread of autograd may plan a call of a new shape, with all kernels loaded, before it uses the GPU."""
    contexts: list[int] = []
    function = gpus.driver.function

    def noted(name: str, *argtypes: type) -> Any:
        contexts.append(gpus.current)
        return function(name, *argtypes)

    monkeypatch.setattr(tensor_map, "function", noted)
    for gpus.current in (-1, 0):
        before = gpus.current
        calls._load_plan(make_problem(dims=(2, 300 - before, 300, 4, 4)), 1)
        assert gpus.current == before
    assert contexts
    assert set(contexts) == {1}


def test_a_counter_is_that_of_the_stream(gpus: Gpus) -> None:
    kernels, template = forward(8192, counted=True)
    before = packed_bytes(template, POINTERS)
    offset = STRUCTS[template.name].counter.offset
    for stream in (7, 9, 7):
        kernels.launch(POINTERS, stream)
        counter = (512 * stream).to_bytes(8, "little")
        assert gpus.launched[-1] == (stream, before[:offset] + counter + before[offset + 8 :])


def test_a_launch_whose_counter_was_not_found_asks_for_it_again(gpus: Gpus, monkeypatch: pytest.MonkeyPatch) -> None:
    kernels, template = forward(8192, counted=True)
    offset, none = STRUCTS[template.name].counter.offset, "no memory is left"

    def refuse(*arguments: int) -> int:
        raise MemoryError(none)

    with monkeypatch.context() as patch:
        patch.setattr(device_memory, "counter", refuse)
        for _ in range(3):
            with pytest.raises(MemoryError, match=none):
                kernels.launch(POINTERS, stream=0)
    monkeypatch.setattr(device_memory, "counter", lambda ordinal, stream, words, use: 2**20)
    kernels.launch(POINTERS, stream=0)
    assert int.from_bytes(gpus.launched[-1][1][offset : offset + 8], "little") == 2**20
    assert len(gpus.launched) == 1


def test_kernels_of_one_struct_share_their_parameters(gpus: Gpus) -> None:
    problem = make_problem(192, 192, "backward", dims=(1, 300, 300, 2, 2))
    plan = make_plan(problem, DEVICES["sm_90"])
    assert len(plan.launches) == 4  # delta, dq, dk, dv
    calls.LoadedPlan(plan, 1).launch((*(2**30 * (n + 1) for n in range(10)), 2**45), stream=7)
    delta, *rows = [packed for _, packed in gpus.launched]
    assert rows == rows[:1] * 3 != [delta] * 3


def test_kernels_of_one_struct_with_other_maps_have_own_parameters(gpus: Gpus) -> None:
    more: dict[str, Any] = {"dims": (1, 300, 300, 2, 2), "softcap": 5.0, "deterministic": True}
    plan = make_plan(make_problem(256, 256, "backward", **more), DEVICES["sm_90"])
    of_launches = [number for number, _ in calls.LoadedPlan(plan, 1)._kernels]
    assert of_launches == [0, 1, 1, 2]  # dq and dk have tiles of 32 columns, dv of 64


def decode(length: int, layer: int, rows: int = 2**15) -> None:
    """Runs a step of decoding in one layer of a model with this many keys in its cache."""
    q = Array.contiguous((1, 1, 32, 128), 2**20 * (layer + 1))
    k = Array.contiguous((1, length, 8, 128), 2**30 * (layer + 1), rows=rows)
    cuflash.forward(q, k, k, causal=True)


def test_layers_of_a_model_hit_from_their_third_call_on(gpus: Gpus) -> None:
    for layer in range(128):
        decode(1000, layer)
    assert len(gpus.blocks) == 1  # each first use takes the same memory
    for layer in range(128):
        decode(1000, layer)
    second = gpus.launched[128:]
    gpus.driver.calls.clear()
    assert len(gpus.blocks) == 128
    for layer in range(128):
        decode(1000, layer)
    assert gpus.driver.calls == []
    assert len(gpus.blocks) == 128
    assert gpus.launched[256:] == second


def test_new_shapes_leave_no_more_than_the_bound(gpus: Gpus, monkeypatch: pytest.MonkeyPatch) -> None:
    assert calls.CALL_CACHE.max_bytes == calls.CACHE_BYTES
    max_bytes = calls.CACHE_BYTES // 2  # reached after 2000 shapes, each of which takes 2 ms while memory is traced
    monkeypatch.setattr(calls.CALL_CACHE, "max_bytes", max_bytes)
    gpus.quiet()
    decode(1, 0)
    gc.collect()
    tracemalloc.start()
    try:
        for step in range(4000):
            decode(2 + step, step % 64)
            if step == 2500:
                early = tracemalloc.get_traced_memory()[0]
        gc.collect()
        most = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    assert most <= 1.1 * early  # the bound was reached long before
    assert 0.5 * calls.CALL_CACHE.num_bytes <= most <= calls.CALL_CACHE.num_bytes <= max_bytes
    entries = len(calls.CALL_CACHE)
    decode(4001, 0)
    assert len(calls.CALL_CACHE) == entries  # the last shapes are there


def test_merges_and_windows_in_lists_are_cached(gpus: Gpus) -> None:
    out, lse = Array.contiguous((1, 9, 2, 64), 2**30), Array.contiguous((1, 2, 9), 2**31, "float32")
    q = Array.contiguous((1, 200, 2, 64), 2**32)
    window: list[int] = [3, 4]
    repeated = (
        lambda: cuflash.merge_states([out, out], [lse, lse]),
        lambda: cuflash.forward(q, q, q, window_size=window),  # type: ignore[arg-type]
    )
    for merge_or_forward in repeated:
        merge_or_forward(), merge_or_forward()  # from their second use on, parameters are cached, too
        entries = len(calls.CALL_CACHE)
        merge_or_forward()
        assert len(calls.CALL_CACHE) == entries


def appended(**changes: Any) -> dict[str, Any]:
    """Calls `append_kv` on the recorded GPU: a new key for each of two sequences, q and tables with `pairs`."""
    shapes = {"k_cache": (2, 40, 8, 64), "v_cache": (2, 40, 8, 64), "k": (2, 1, 8, 64), "v": (2, 1, 8, 64)}
    if pairs := changes.pop("pairs", 0):
        shapes |= {"q": (2, 1, 16, 64), "rotary_cos": (50, pairs), "rotary_sin": (50, pairs)}
    call = {name: Array.contiguous(shape, 2**20 * (n + 1)) for n, (name, shape) in enumerate(shapes.items())}
    return call | {"seqused_k": Array((2,), (1,), "int32", 2**30)} | changes


@pytest.mark.parametrize("pairs", [0, 16])
def test_append_writes_the_callers_caches_and_only_q_is_new(
    gpus: Gpus, pairs: int, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("DEBUG", "cuflash")
    call = appended(pairs=pairs)
    for _ in range(3):
        result = cuflash.append_kv(**call)
        _, packed = gpus.launched[-1]
        struct = STRUCTS["AppendParams"].from_buffer_copy(packed)
        assert struct.k_cache.pointer == call["k_cache"].pointer  # type: ignore[attr-defined]
        assert struct.q_out.pointer == (result and result.pointer)  # type: ignore[attr-defined]
    assert (result is None) == (not pairs)
    assert len(gpus.launched) == 3
    assert "append_kv_portable_bf16" in caplog.text


def test_caches_that_share_memory_are_refused_before_anything_is_launched(gpus: Gpus) -> None:
    for name, pointer in (("v_cache", 2**20 + 2 * 40 * 8 * 64 * 2 - 2), ("k", 2**20), ("v", 2**21), ("q", 2**21 + 64)):
        call = appended(pairs=16)
        call[name] = call[name]._replace(pointer=pointer)
        written = "k_cache" if pointer < 2**21 else "v_cache"
        with pytest.raises(ProblemError, match=f"{written}, which is written to, shares memory with {name}"):
            cuflash.append_kv(**call)
    call = appended()  # two views whose elements alternate
    both = Array((2, 40, 8, 64), (2 * 40 * 8 * 128, 8 * 128, 128, 1), "bfloat16", 2**20)
    cuflash.append_kv(**call | {"k_cache": both, "v_cache": both._replace(pointer=2**20 + 128), "k": call["k"]})
    assert len(gpus.launched) == 1


@pytest.mark.parametrize("deterministic", [False, True])
def test_gradients_go_to_the_arrays_that_are_given_and_others_are_new(gpus: Gpus, deterministic: bool) -> None:
    shape, step = (2, 300, 8, 64), 8 * 64
    arrays = [Array.contiguous(shape, 2**30 * (n + 1), "float32") for n in range(5)]
    lse = Array.contiguous((2, 8, 300), 2**33, "float32")
    # The kernels of float32 have pointers and strides in their structs, not tensor maps.
    packed = [Array(shape, (300 * 3 * step, 3 * step, 64, 1), "float32", 2**40 + 4 * step * n) for n in range(3)]
    recorded = "BackwardParams", "BackwardDqParams" if deterministic else "ConvertParams"
    for grads_out in (packed, [None, packed[1], None]):
        got = cuflash.backward(*arrays, lse, deterministic=deterministic, grads_out=grads_out)
        assert [x is y for x, y in zip(got, grads_out, strict=True)] == [y is not None for y in grads_out]
        structs = [STRUCTS[name].from_buffer_copy(x) for name, (_, x) in zip(recorded, gpus.launched[-2:], strict=True)]
        for name, x in zip(("dq", "dk", "dv"), got, strict=True):
            for target in (getattr(struct, name) for struct in structs if hasattr(struct, name)):
                strides = target.stride_batch, target.stride_seqlen, target.stride_head
                assert (target.pointer, strides) == (x.pointer, x.strides[:3])
    count = len(gpus.launched)
    nearer = packed[1]._replace(pointer=packed[1].pointer - 4)
    with pytest.raises(ProblemError, match="dq, which is written to, shares memory with dk"):
        cuflash.backward(*arrays, lse, deterministic=deterministic, grads_out=[packed[0], nearer, None])
    assert len(gpus.launched) == count


def test_a_cache_with_gaps_is_refused_and_not_copied(gpus: Gpus) -> None:
    gaps = Array((2, 40, 8, 64), (40 * 8 * 128, 8 * 128, 128, 2), "bfloat16", 2**20)
    for name in ("k_cache", "v_cache"):
        with pytest.raises(ProblemError, match=f"{name} has shape .* its last dimension is not contiguous"):
            cuflash.append_kv(**appended(**{name: gaps}))
    assert not gpus.launched


def test_the_least_recently_used_value_is_dropped_first() -> None:
    cache = SecondChanceCache(100)
    for key in "abc":
        cache.put(key, key.upper(), 30)
    assert cache.get("a") == "A"
    cache.put("d", "D", 30)
    assert [cache.get(key) for key in "abcd"] == ["A", None, "C", "D"]
    cache.put("e", "E", 1000)
    assert len(cache) == 1
    cache.put("e", "F", 10)
    assert (cache.get("e"), cache.num_bytes) == ("F", 10)
    cache.clear()
    assert (len(cache), cache.num_bytes, cache.get("e")) == (0, 0, None)
    with pytest.raises(TypeError):
        cache.get([])  # type: ignore[arg-type]


def test_recent_keys_report_the_second_use_until_many_others_came() -> None:
    recent = RecentKeys(3)
    assert [recent.add(key) for key in "abab"] == [False, False, True, True]
    assert [recent.add(key) for key in "abcda"] == [False] * 5
