"""TMA descriptors: arguments of the driver's calls and, on a GPU, that it accepts them."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import pytest
from drivers import FakeDriver

from cuflash.errors import UnsupportedError
from cuflash.planning.plan import TmaBox
from cuflash.problem.array_spec import ArraySpec, packed_strides
from cuflash.runtime import driver as driver_module
from cuflash.runtime import structs
from cuflash.runtime.structs import ParamBuffer
from cuflash.runtime.tensor_map import MAP_BYTES, encoded, first_byte, mover

SHAPE = (2, 300, 4, 64)
DENSE = packed_strides(SHAPE)


def spec(shape: tuple[int, ...] = SHAPE, strides: Sequence[int] = DENSE, dtype: str = "float16") -> ArraySpec:
    return ArraySpec(shape, tuple(strides), dtype, "cuda:0", "cupy")


def encode_arguments(driver: FakeDriver, array: ArraySpec, box: TmaBox) -> dict[str, Any]:
    """Returns the arguments of the only call, by the names of the driver's documentation."""
    assert len(structs.encoded(array, box)) == MAP_BYTES
    ((name, *arguments),) = driver.calls
    driver.calls.clear()
    assert name == "cuTensorMapEncodeTiled"
    names = ("tensorMap", "tensorDataType", "tensorRank", "globalAddress", "globalDim", "globalStrides", "boxDim",
             "elementStrides", "interleave", "swizzle", "l2Promotion", "oobFill")  # fmt: skip
    return dict(zip(names, (arguments[0], *arguments[1]), strict=True))


def test_a_descriptor_begins_at_its_first_row_or_its_length_before() -> None:
    array = ArraySpec.contiguous((2, 300, 4, 64), "float16")
    row = 4 * 64 * 2
    assert first_byte(array, TmaBox(128, 0, 300)) == 0
    assert first_byte(array, TmaBox(128, 199, 300)) == 199 * row
    assert first_byte(array, TmaBox(128, 199, 200)) == 199 * row  # one row, whose stride is unused
    assert first_byte(array, TmaBox(128, 0, 300, varlen=True)) == -300 * row
    assert first_byte(ArraySpec.contiguous((2, 1, 4, 64), "float16"), TmaBox(128, 0, 1, varlen=True)) == -16


def test_dims_strides_and_boxes_begin_with_the_innermost_dimension(driver: FakeDriver) -> None:
    arguments = encode_arguments(driver, spec(strides=(80000, 260, 65, 1)), TmaBox(128, 0, 300))
    assert arguments["tensorMap"] % 64 == 0
    assert arguments["tensorRank"] == 4
    assert arguments["globalDim"] == (64, 300, 4, 2)  # dim, seqlen, heads, batch
    assert arguments["globalStrides"] == (2 * 260, 2 * 65, 2 * 80000)  # bytes of seqlen, heads, batch
    assert arguments["boxDim"] == (64, 128, 1, 1)
    assert arguments["elementStrides"] == (1, 1, 1, 1)
    assert (arguments["interleave"], arguments["swizzle"], arguments["oobFill"]) == (0, 3, 0)  # 128 bytes, zeros


@pytest.mark.parametrize(
    ("dtype", "code", "size", "columns"), [("float16", 6, 2, 64), ("bfloat16", 9, 2, 64), ("float32", 7, 4, 32)]
)
def test_a_box_is_128_bytes_wide_in_every_dtype(
    driver: FakeDriver, dtype: str, code: int, size: int, columns: int
) -> None:
    arguments = encode_arguments(driver, spec(dtype=dtype), TmaBox(16, 0, 300))
    assert arguments["tensorDataType"] == code
    assert arguments["globalStrides"] == (size * 256, size * 64, size * 76800)
    assert arguments["boxDim"] == (columns, 16, 1, 1)


@pytest.mark.parametrize("axis", [0, 1, 2])
@pytest.mark.parametrize("stride", [0, -3, 5, 2**45])
def test_a_dimension_of_length_1_has_a_stride_that_the_driver_takes(driver: FakeDriver, axis: int, stride: int) -> None:
    shape, strides = list(SHAPE), list(DENSE)
    shape[axis], strides[axis] = 1, stride
    arguments = encode_arguments(driver, spec(tuple(shape), strides), TmaBox(16, 0, shape[1]))
    expected = [2 * 256, 2 * 64, 2 * 76800]
    expected[(2, 0, 1)[axis]] = 16
    assert list(arguments["globalStrides"]) == expected


def test_a_box_of_some_rows_changes_only_the_length(driver: FakeDriver) -> None:
    whole, part = (encode_arguments(driver, spec(), TmaBox(128, first, 300)) for first in (0, 7))
    assert part["globalDim"] == (64, 293, 4, 2)
    assert {name for name in whole if whole[name] != part[name]} <= {"globalDim", "tensorMap"}


def test_descriptors_are_moved_to_addresses_of_64_bits(driver: FakeDriver) -> None:
    mover()
    assert driver.argtypes["cuTensorMapReplaceAddress"] == (ctypes.c_void_p, ctypes.c_void_p)


def test_a_refused_descriptor_names_the_operand(driver: FakeDriver) -> None:
    driver.result = 1
    with pytest.raises(UnsupportedError, match=r"refuses.*float16\[2, 300, 4, 64\].*rows=128"):
        structs.encoded(spec(), TmaBox(128, 0, 300))


def test_an_older_error_is_reported_as_itself(driver: FakeDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(driver_module, "function", lambda *_: lambda result, name: 1)
    driver.result = 700
    with pytest.raises(RuntimeError, match=r"a TMA descriptor of.*float16\[2, 300, 4, 64\].*CUDA error \(700\)"):
        structs.encoded(spec(), TmaBox(128, 0, 300))


REAL = {
    "dense": (SHAPE, DENSE, 128),
    "largest_box": (SHAPE, DENSE, 256),
    "heads_first": (SHAPE, (76800, 64, 19200, 1), 192),
    "slice_of_wider_rows": (SHAPE, (4 * 300 * 72, 4 * 72, 72, 1), 96),
    "overlapping_rows": (SHAPE, (300 * 8, 8, 16, 1), 64),
    "odd_dim": ((2, 300, 4, 33), (40 * 1200, 160, 40, 1), 128),
    "one_of_all": ((1, 1, 1, 1), (0, 0, 0, 1), 128),
    "few_rows": ((2, 3, 4, 64), packed_strides((2, 3, 4, 64)), 128),
    "wide": ((2, 300, 4, 256), packed_strides((2, 300, 4, 256)), 64),
    "far": ((2, 300, 4, 64), (2**38 - 8, 256, 64, 1), 128),
    "long": ((1, 2**30 - 4096, 1, 64), (0, 64, 0, 1), 128),
}


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize("name", REAL)
def test_gpu_the_driver_takes_the_maps_of_real_operands(cupy: Any, name: str, dtype: str) -> None:
    shape, strides, rows = REAL[name]
    pointer = cupy.zeros(4096, "float32").data.ptr
    tensor_map = encoded(spec(shape, strides, dtype), TmaBox(rows, 0, shape[1]))
    buffer = ParamBuffer(MAP_BYTES)
    buffer.memory[:] = tensor_map
    assert mover()(buffer.address, pointer) == 0
    there = bytes(buffer.memory)
    assert there != tensor_map
    assert mover()(buffer.address, pointer + 512) == 0
    assert bytes(buffer.memory) != there
    assert mover()(buffer.address, pointer) == 0
    assert bytes(buffer.memory) == there


@pytest.mark.gpu
def test_gpu_the_driver_refuses_an_address_that_is_not_aligned(cupy: Any) -> None:
    buffer = ParamBuffer(MAP_BYTES)
    buffer.memory[:] = encoded(spec(), TmaBox(128, 0, 300))
    assert mover()(buffer.address, cupy.zeros(4096, "float32").data.ptr + 2) != 0
