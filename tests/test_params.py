"""The bytes of the kernels' parameters: every field stands where the C++ struct has it, told apart by its value.

Each field is packed with a value of its own and found in the packed bytes; NVRTC is then asked by `static_assert`
whether the struct has the field at that place. Needs NVRTC but no GPU.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
from variants import variants

from cuflash import jit, params, tensor_map
from cuflash.device import KNOWN
from cuflash.errors import UnsupportedError
from cuflash.plan import plan
from cuflash.plan_backward import DELTA_ROWS
from cuflash.problem import ArraySpec, Problem
from cuflash.tiles_sm80 import TILES, BackwardTile
from cuflash.tiles_sm90 import TILES as HOPPER_TILES
from cuflash.tiles_sm90 import WarpgroupBackwardTile
from cuflash.variant import BACKWARD_OPS, PARAMS_BYTES, WARPGROUP_PARAMS_BYTES, SharedKeys

FORWARD_INTS = ("seqlen_q", "seqlen_k", "heads_q", "heads_per_kv", "head_dim", "head_dim_v", "mask_lo", "mask_hi",
                "key_begin", "key_end", "num_q_blocks", "num_slices")  # fmt: skip
BACKWARD_INTS = ("batch", *FORWARD_INTS, "row_begin", "row_end")  # and three that follow from seqlens and tile
OPERANDS = ("q", "k", "v", "dout", "out", "dq", "dk", "dv")
STORED = ("q", "k", "v", "out")
STRIDES = ("stride_batch", "stride_seqlen", "stride_head")


def place(packed: bytes, layout: str, value: float) -> tuple[int, int]:
    """(offset, bytes) of the one place in the packed bytes that holds the value."""
    wanted = struct.pack("<" + layout, value)
    offsets = [at for at in range(0, len(packed), len(wanted)) if packed[at : at + len(wanted)] == wanted]
    assert len(offsets) == 1, (value, offsets)
    return offsets[0], len(wanted)


Packed = tuple[bytes, dict[str, tuple[int, int]]]


def packed_forward(tile: Any = TILES["float16"][0], **more: int) -> Packed:
    """Packed parameters in which every field has another value, and where each was found."""
    value = dict(zip(FORWARD_INTS, range(1001, 2000), strict=False)) | {"heads_q": 1003 * 7, "heads_per_kv": 1003}
    strides = [(*(10**10 * (4 * operand + axis + 1) for axis in range(3)), 1) for operand in range(4)]
    keys = value["key_begin"], value["key_end"]
    mask = SimpleNamespace(lo=value["mask_lo"], hi=value["mask_hi"], key_range=lambda begin, end: keys)
    problem: Any = SimpleNamespace(
        **value,
        heads_kv=7,
        mask=mask,
        strides=strides[:3],
        softmax_scale=3.0,
        softcap=0.5,
        batch=3,
        dtype="float16",
        out_dtype="float16",
        operand_shapes=3 * [(3, 5, 7, 9)],
    )
    counts = {name: value[name] for name in ("num_q_blocks", "num_slices")}
    plan: Any = SimpleNamespace(**counts, **more, variant=SimpleNamespace(tile=tile))
    parameters = params.forward_parameters(problem, plan, strides[3])
    pointers = (2**40 + 1, 2**40 + 16, 2**40 + 3, 2**40 + 32, 2**40 + 5)
    parameters.write(pointers)
    if isinstance(parameters, params.WarpgroupParameters):
        parameters.count_with(2**40 + 6)
    packed = bytes(parameters)
    places = {name: place(packed, "i", number) for name, number in value.items()}
    for name, operand, pointer in zip(("q", "k", "v", "out"), strides, pointers, strict=False):
        places[f"{name}.pointer"] = place(packed, "Q", pointer)
        places |= {f"{name}.{axis}": place(packed, "q", n) for axis, n in zip(STRIDES, operand, strict=False)}
    places["lse"] = place(packed, "Q", pointers[4])
    places["scale_log2"] = place(packed, "f", 0.5 * params.LOG2_E)
    places["softcap_scale"] = place(packed, "f", 6.0)
    places["aligned"] = place(packed, "i", 0b1010)
    return packed, places


def packed_with_maps(inner: str, pack: Callable[[], Packed], stored: Sequence[str]) -> Packed:
    """The same of a struct that has another one as `inner`; a tensor map is 128 equal bytes here, in the order made."""
    made: list[int] = []

    def encode(address: ctypes.c_void_p, *more: Any) -> int:
        made.append(0xE1 + len(made))
        ctypes.memset(address.value or 0, made[-1], 128)
        return 0

    with patch.object(tensor_map, "function", lambda *_: encode):
        packed, places = pack()
    assert made == list(range(0xE1, 0xE1 + len(stored)))
    places = {f"{inner}.{name}": at for name, at in places.items()}
    places |= {name: (packed.index(bytes([byte]) * 128), 128) for name, byte in zip(stored, made, strict=True)}
    return packed, places


def packed_hopper() -> Packed:
    """The same of the kernels that Hopper has of its own."""
    packed, places = packed_with_maps("forward", lambda: packed_forward(HOPPER_TILES[0], heads_together=5555), STORED)
    places["counter"] = place(packed, "Q", 2**40 + 6)
    places["num_tiles"] = place(packed, "i", 3 * 1003 * 7 * 1011)
    places["heads_together"] = place(packed, "i", 5555)
    return packed, places


TILE = BackwardTile(2048, 3072, 64, 16, 1, 4, 1, 16, 32)


def packed_backward(tile: Any = TILE) -> Packed:
    """The same of the kernels of backward."""
    value = dict(zip(BACKWARD_INTS, range(1001, 2000), strict=False))
    value |= {"heads_q": value["heads_per_kv"] * 7, "seqlen_k": 10**5}
    strides = [(*(10**10 * (4 * operand + axis + 1) for axis in range(3)), 1) for operand in range(8)]
    ranges = {name: (value[f"{name}_begin"], value[f"{name}_end"]) for name in ("key", "row")}
    bounds = {"lo": value["mask_lo"], "hi": value["mask_hi"]}
    mask = SimpleNamespace(**bounds, key_range=lambda *_: ranges["key"], row_range=lambda *_: ranges["row"])
    scales = {"softmax_scale": 3.0, "softcap": 0.5}
    shapes = 3 * [(3, 5, 7, 9)]
    problem: Any = SimpleNamespace(
        **value,
        **scales,
        heads_kv=7,
        mask=mask,
        strides=strides[:3],
        dtype="float16",
        out_dtype="float16",
        operand_shapes=shapes,
    )
    value |= {"num_k_blocks": 9999, "splits": 7777, "key_blocks": 6666, "heads_together": 5555}
    value |= {"deterministic": 8888}
    value |= {"stats_rows": 1024, "padded_dim": 2048, "padded_dim_v": 3072}
    counted = "num_q_blocks", "num_slices", "num_k_blocks", "key_blocks", "heads_together", "stats_rows"
    counts = {name: value[name] for name in (*counted, "deterministic")}
    shared = {"whole_blocks": 4441, "shared_first": 4442, "shared_keys": 4443, "shared_steps": 4444}
    value |= shared
    variant = SimpleNamespace(tile=tile)
    made: Any = SimpleNamespace(**counts, num_splits=7777, variant=variant, shared=SharedKeys(*shared.values()))
    parameters = params.backward_parameters(problem, made, strides[3:])
    pointers = tuple(2**40 + n * (16 if 0b101101100 >> n & 1 else 1) for n in range(1, 16))
    parameters.write(pointers)
    packed = bytes(parameters)
    places = {name: place(packed, "i", number) for name, number in value.items()}
    for name, operand, pointer in zip(OPERANDS, strides, pointers, strict=False):
        places[f"{name}.pointer"] = place(packed, "Q", pointer)
        places |= {f"{name}.{axis}": place(packed, "q", n) for axis, n in zip(STRIDES, operand, strict=False)}
    others = "lse", "dlse", "stats", "dq_acc", "dk_acc", "dv_acc", "turns"
    places |= {name: place(packed, "Q", pointer) for name, pointer in zip(others, pointers[8:], strict=True)}
    places["softmax_scale"] = place(packed, "f", 3.0)
    places["scale_log2"] = place(packed, "f", 0.5 * params.LOG2_E)
    places["softcap_scale"] = place(packed, "f", 6.0)
    places["aligned"] = place(packed, "i", 0b10110110)
    places["sm90"] = places["deterministic"][0] + 4, 4  # a flag
    assert struct.unpack_from("<i", packed, places["sm90"][0])[0] == isinstance(tile, WarpgroupBackwardTile)
    return packed, places


def packed_merge() -> Packed:
    """The same of `merge_states`, with as many states as there is room for."""
    count = params.MAX_MERGE_STATES
    outs, lses = [[base + 16 * i for i in range(count)] for base in (2**40, 2**41)]
    shape = (10**6, 1003, 1005, 104)

    def pack(head_dim_v: int) -> bytes:
        return bytes(params.merge_parameters(outs, lses, 2**42, 2**43, (*shape[:3], head_dim_v), "float16"))

    packed = pack(104)
    places = {
        "outs[0]": place(packed, "Q", outs[0]),
        f"outs[{count - 1}]": place(packed, "Q", outs[-1]),
        "lses[0]": place(packed, "Q", lses[0]),
        f"lses[{count - 1}]": place(packed, "Q", lses[-1]),
        "out": place(packed, "Q", 2**42),
        "lse": place(packed, "Q", 2**43),
        "num_elements": place(packed, "q", 10**6 * 1003 * 1005 * 104),
        "head_dim_v": place(packed, "i", 104),
        "heads": place(packed, "i", 1005),
        "seqlen": place(packed, "i", 1003),
        "num_states": place(packed, "i", count),
    }
    # `vector` is a flag: what changes, head_dim_v and num_elements aside, when rows are no multiples of 16 bytes
    fields = range(places["head_dim_v"][0] + 4, len(packed), 4)
    changed = [at for at in fields if packed[at : at + 4] != pack(103)[at : at + 4]]
    assert [packed[at : at + 4] for at in changed] == [struct.pack("<i", 1)]
    places["vector"] = changed[0], 4
    return packed, places


def packed_hopper_backward() -> Packed:
    """The same of the backward that Hopper has of its own."""
    tile, stored = WarpgroupBackwardTile(2048, 3072, 64, 1, 16), [name for name in OPERANDS if name != "out"]
    return packed_with_maps("backward", lambda: packed_backward(tile), stored)


STRUCTS: dict[str, tuple[str, int, Callable[[], Packed]]] = {  # and the alignment
    "forward": ("ForwardParams", 8, packed_forward),
    "hopper": ("TiledParams", 64, packed_hopper),
    "backward": ("BackwardParams", 8, packed_backward),
    "hopper_backward": ("TiledBackwardParams", 64, packed_hopper_backward),
    "merge": ("MergeParams", 8, packed_merge),
}


def asserts(name: str, alignment: int, packed: bytes, places: dict[str, tuple[int, int]]) -> list[str]:
    """The places as C++."""
    lines = [f"static_assert(sizeof({name}) == {len(packed)} && alignof({name}) == {alignment});"]
    for field, (offset, size) in places.items():
        # why: NVRTC has no offsetof; __INTADDR__ is what its front end makes of one, in every version.
        member = f"(({name}*)0)->{field}"
        lines.append(f'static_assert(__INTADDR__(&{member}) == {offset}, "{field} is elsewhere");')
        lines.append(f'static_assert(sizeof({member}) == {size}, "{field} has another size");')
    return lines


def compiles(lines: list[str]) -> str:
    """Compiles lines below `params.cuh`; the compiler's log, empty where it has nothing to say."""
    from cupy.cuda import nvrtc

    variant = variants("sm_80")[0]
    options = [option for option in jit.options(variant) if not option.startswith("--ptxas")]
    program = nvrtc.createProgram("\n".join(['#include "common/params.cuh"', *lines]), "layout.cu", (), ())
    try:
        nvrtc.compileProgram(program, (*options, f"-I{jit.source_root()}"))
        return ""
    except nvrtc.NVRTCError:
        return str(nvrtc.getProgramLog(program))
    finally:
        nvrtc.destroyProgram(program)


def need_nvrtc() -> None:
    try:
        jit.nvrtc_version()
    except UnsupportedError as error:
        pytest.skip(f"needs NVRTC: {error}")


@pytest.mark.parametrize("op", STRUCTS)
def test_every_field_stands_where_the_kernel_reads_it(op: str) -> None:
    need_nvrtc()
    name, alignment, pack = STRUCTS[op]
    assert compiles(asserts(name, alignment, *pack())) == ""


@pytest.mark.parametrize("op", STRUCTS)
def test_a_field_elsewhere_would_be_noticed(op: str) -> None:
    need_nvrtc()
    name, alignment, pack = STRUCTS[op]
    packed, places = pack()
    for field, (offset, size) in places.items():
        if field in ("lse", "num_states", "aligned", "counter", "v", "num_tiles"):
            for wrong in ((offset + size, size), (offset, 2 * size)):
                assert "static assertion failed" in compiles(asserts(name, alignment, packed, {field: wrong}))


@pytest.mark.parametrize("op", STRUCTS)
def test_every_field_of_the_struct_is_checked(op: str) -> None:
    name, _, pack = STRUCTS[op]
    packed, places = pack()
    text = (jit.source_root() / "common" / "params.cuh").read_text("utf-8").split(f"struct {name} {{")[1].split("};")[0]
    declared = {
        word.strip(" *").split("[")[0]
        for line in text.splitlines()
        if ";" in line
        for word in line.split(";")[0].replace("const ", "").strip().split(" ", 1)[1].removeprefix("long ").split(",")
    }
    checked = {field.split(".")[0].split("[")[0] for field in places}
    assert declared - {"unused", ""} == {field.removeprefix("void* ").removeprefix("float* ") for field in checked}
    hopper = {"hopper": "forward", "hopper_backward": "backward"}
    assert len(packed) == (WARPGROUP_PARAMS_BYTES[hopper[op]] if op in hopper else PARAMS_BYTES[op])


def test_the_ops_of_one_struct_have_one_size() -> None:
    assert PARAMS_BYTES["lse"] == PARAMS_BYTES["forward"]
    assert {PARAMS_BYTES[op] for op in BACKWARD_OPS} == {PARAMS_BYTES["backward"]}
    assert set(PARAMS_BYTES) == {"forward", "lse", "merge", *BACKWARD_OPS}
    assert WARPGROUP_PARAMS_BYTES["lse"] == WARPGROUP_PARAMS_BYTES["forward"]
    assert max(*WARPGROUP_PARAMS_BYTES.values(), *PARAMS_BYTES.values()) <= 4096  # what every architecture takes


@pytest.mark.parametrize(
    ("strides", "dtype", "allowed"),
    [
        ((640, 64, 8, 1), "float16", True),
        ((640, 64, 4, 1), "float16", False),
        ((640, 64, 4, 1), "float32", True),
        ((641, 64, 8, 1), "bfloat16", False),
        ((640, 66, 8, 1), "bfloat16", False),
        ((0, 64, 0, 1), "float16", True),
    ],
)
def test_wide_accesses_are_allowed_where_every_row_starts_at_16_bytes(
    strides: tuple[int, ...], dtype: str, allowed: bool
) -> None:
    assert params.allows_vectors(strides, dtype) is allowed


@pytest.mark.parametrize("pack", [packed_forward, packed_backward])
def test_softcap_and_scale_are_folded_into_two_factors(pack: Callable[[], Any]) -> None:
    packed, places = pack()
    capped = [struct.unpack_from("<f", packed, places[name][0])[0] for name in ("scale_log2", "softcap_scale")]
    assert capped == pytest.approx([0.5 * params.LOG2_E, 3.0 / 0.5])


def test_vectors_are_allowed_where_every_row_starts_at_a_multiple_of_16_bytes() -> None:
    q, k = (ArraySpec.dense((2, 9, 3, dim), "float16") for dim in (4, 4))
    v = ArraySpec.dense((2, 9, 3, 8), "float16")
    for wide in (True, False):
        problem = Problem.of(q, k, v, out_dtype="float32" if wide else None)
        out = ArraySpec.dense((2, 9, 3, 8), problem.out_dtype).strides
        narrow = ArraySpec.dense((2, 9, 3, 8), "float16").strides
        made = plan(problem, "forward", KNOWN["sm_80"])
        odd = (*(2 * stride - 4 for stride in out[:3]), 1)  # multiples of 8 bytes in float16, of 16 in float32
        for strides, allowed in ((out, True), (odd, wide)):
            parameters = params.forward_parameters(problem, made, strides)
            for pointers, bits in (((16, 32, 48, 64, 2), 0b1100), ((16, 32, 56, 64, 2), 0b1000)):
                parameters.write(pointers)
                assert aligned(parameters, params.FORWARD) == (bits if allowed else bits & 0b0111)
        made = plan(problem, "backward", KNOWN["sm_80"])
        parameters = params.backward_parameters(problem, made, [narrow, odd, q.strides, k.strides, v.strides])
        parameters.write((*range(16, 16 * 16, 16),))
        assert aligned(parameters, params.BACKWARD) == 0b10001100 | wide << 4


def aligned(parameters: params.Parameters, layout: params.Layout) -> int:
    """Which operands are marked as aligned."""
    return int(struct.unpack_from("<i", bytes(parameters), 4 * layout.aligned)[0])


@pytest.mark.parametrize("deterministic", [False, True])
def test_the_counts_that_backward_divides_its_block_index_by_make_up_its_grids(deterministic: bool) -> None:
    _, places = packed_backward()
    for dtype, head_dim, dims in (("float16", 40, (3, 300, 500, 6, 2)), ("float32", 256, (1, 1, 129, 7, 7))):
        batch, seqlen_q, seqlen_k, heads_q, heads_kv = dims
        q, k = (ArraySpec.dense((batch, s, h, head_dim), dtype) for s, h in ((seqlen_q, heads_q), (seqlen_k, heads_kv)))
        problem = Problem.of(q, k, k, causal=True)
        made = plan(problem, "backward", KNOWN["sm_80"], deterministic)
        packed = bytes(params.backward_parameters(problem, made, [problem.strides[at] for at in (0, 0, 0, 1, 2)]))
        field = {name: struct.unpack_from("<i", packed, at)[0] for name, (at, size) in places.items() if size == 4}
        blocks = {launch.variant.op: launch.num_blocks for launch in made.launches}
        assert blocks["delta"] * DELTA_ROWS == batch * heads_q * field["stats_rows"]
        assert field["stats_rows"] == -(-seqlen_q // 128) * 128
        key_blocks = batch * heads_kv * field["num_k_blocks"] * field["splits"]
        assert blocks["backward_dkdv" if deterministic else "backward"] == key_blocks
        assert field["heads_per_kv"] * heads_kv == field["heads_q"] == heads_q
        assert (field["row_begin"], field["row_end"]) == problem.mask.row_range(0, seqlen_k)
        if deterministic:
            assert blocks["backward_dq"] == batch * heads_q * field["num_q_blocks"] * field["num_slices"]
        else:
            assert made.workspace[1] == 8 * batch * heads_q * field["stats_rows"]
            end = made.workspace[2] if field["splits"] > 1 else made.workspace_bytes
            accumulator = 4 * batch * heads_q * -(-seqlen_q // 16) * 16 * field["padded_dim"]
            assert end - made.workspace[1] == accumulator
