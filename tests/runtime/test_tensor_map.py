"""TMA descriptors: what the driver is asked for, and, on a GPU, that it takes it."""

from __future__ import annotations

import ctypes
from typing import Any

import pytest
from drivers import FakeDriver

from cuflash.errors import UnsupportedError
from cuflash.problem.array_spec import dense_strides
from cuflash.runtime.tensor_map import MAP_BYTES, TensorMap

SHAPE = (2, 300, 4, 64)
DENSE = dense_strides(SHAPE)


def encoded(driver: FakeDriver, of: TensorMap, address: int = 2**20, pointer: int = 2**30) -> dict[str, Any]:
    """The arguments of the one call, by the names of the driver's documentation."""
    of.encode(address, pointer)
    ((name, *arguments),) = driver.calls
    driver.calls.clear()
    assert name == "cuTensorMapEncodeTiled"
    names = ("tensorMap", "tensorDataType", "tensorRank", "globalAddress", "globalDim", "globalStrides", "boxDim",
             "elementStrides", "interleave", "swizzle", "l2Promotion", "oobFill")  # fmt: skip
    return dict(zip(names, (arguments[0], *arguments[1]), strict=True))


def test_dims_strides_and_boxes_are_told_from_the_innermost_dimension_on(driver: FakeDriver) -> None:
    asked = encoded(driver, TensorMap("float16", SHAPE, (80000, 260, 65, 1), rows=128))
    assert asked["tensorMap"] == 2**20
    assert asked["globalAddress"] == 2**30
    assert asked["tensorRank"] == 4
    assert asked["globalDim"] == (64, 300, 4, 2)  # dim, seqlen, heads, batch
    assert asked["globalStrides"] == (2 * 260, 2 * 65, 2 * 80000)  # in bytes, those of seqlen, heads, batch
    assert asked["boxDim"] == (64, 128, 1, 1)
    assert asked["elementStrides"] == (1, 1, 1, 1)
    assert (asked["interleave"], asked["swizzle"], asked["oobFill"]) == (0, 3, 0)  # 128 bytes, zeros


@pytest.mark.parametrize(
    ("dtype", "code", "size", "columns"), [("float16", 6, 2, 64), ("bfloat16", 9, 2, 64), ("float32", 7, 4, 32)]
)
def test_a_box_is_128_bytes_wide_in_every_dtype(
    driver: FakeDriver, dtype: str, code: int, size: int, columns: int
) -> None:
    asked = encoded(driver, TensorMap(dtype, SHAPE, DENSE, rows=16))
    assert asked["tensorDataType"] == code
    assert asked["globalStrides"] == (size * 256, size * 64, size * 76800)
    assert asked["boxDim"] == (columns, 16, 1, 1)


@pytest.mark.parametrize("axis", [0, 1, 2])
@pytest.mark.parametrize("stride", [0, -3, 5, 2**45])
def test_the_stride_of_a_dimension_of_length_1_is_one_that_the_driver_takes(
    driver: FakeDriver, axis: int, stride: int
) -> None:
    shape, strides = list(SHAPE), list(DENSE)
    shape[axis], strides[axis] = 1, stride
    asked = encoded(driver, TensorMap("float16", tuple(shape), strides, rows=16))  # type: ignore[arg-type]
    wanted = [2 * 256, 2 * 64, 2 * 76800]
    wanted[(2, 0, 1)[axis]] = 16
    assert list(asked["globalStrides"]) == wanted


def test_the_first_row_is_a_matter_of_the_address_alone(driver: FakeDriver) -> None:
    whole, part = (TensorMap("bfloat16", SHAPE, (80000, 264, 64, 1), 128, first) for first in (0, 7))
    assert (whole.offset, part.offset) == (0, 7 * 264 * 2)
    first, second = encoded(driver, whole), encoded(driver, part)
    assert second == first | {"globalAddress": 2**30 + 7 * 264 * 2}


def test_a_moved_descriptor_gets_the_address_of_the_first_row(driver: FakeDriver) -> None:
    TensorMap("float16", SHAPE, DENSE, 128, first=3).move(2**20, 2**33)
    assert driver.calls == [("cuTensorMapReplaceAddress", 2**20, (2**33 + 3 * 256 * 2,))]
    # addresses do not fit the int that is the default
    assert driver.argtypes["cuTensorMapReplaceAddress"] == (ctypes.c_void_p, ctypes.c_void_p)


def test_what_the_driver_refuses_is_told_with_the_operand(driver: FakeDriver) -> None:
    driver.result = 1
    of = TensorMap("float16", SHAPE, DENSE, 128)
    with pytest.raises(UnsupportedError, match=r"refuses.*float16.*\(2, 300, 4, 64\).*CUresult 1"):
        of.encode(2**20, 2**30)
    with pytest.raises(UnsupportedError, match=r"refuses the address 0x40000000.*\(2, 300, 4, 64\)"):
        of.move(2**20, 2**30)


class Memory:
    """128 bytes of host memory at a multiple of 64."""

    def __init__(self) -> None:
        self.owner = (ctypes.c_char * (MAP_BYTES + 64))()
        self.address = -(-ctypes.addressof(self.owner) // 64) * 64

    def __bytes__(self) -> bytes:
        return ctypes.string_at(self.address, MAP_BYTES)


REAL = {
    "dense": (SHAPE, DENSE, 128),
    "largest_box": (SHAPE, DENSE, 256),
    "heads_first": (SHAPE, (76800, 64, 19200, 1), 192),
    "slice_of_wider_rows": (SHAPE, (4 * 300 * 72, 4 * 72, 72, 1), 96),
    "overlapping_rows": (SHAPE, (300 * 8, 8, 16, 1), 64),
    "odd_dim": ((2, 300, 4, 33), (40 * 1200, 160, 40, 1), 128),
    "one_of_all": ((1, 1, 1, 1), (0, 0, 0, 1), 128),
    "few_rows": ((2, 3, 4, 64), dense_strides((2, 3, 4, 64)), 128),
    "wide": ((2, 300, 4, 256), dense_strides((2, 300, 4, 256)), 64),
    "far": ((2, 300, 4, 64), (2**38 - 8, 256, 64, 1), 128),
    "long": ((1, 2**30 - 4096, 1, 64), (0, 64, 0, 1), 128),
}


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize("name", REAL)
def test_gpu_the_driver_takes_the_maps_of_real_operands(cupy: Any, name: str, dtype: str) -> None:
    shape, strides, rows = REAL[name]
    pointer = cupy.zeros(4096, "float32").data.ptr
    of, memory, other = TensorMap(dtype, shape, strides, rows), Memory(), Memory()
    of.encode(memory.address, pointer)
    made = bytes(memory)
    assert any(made)
    of.move(memory.address, pointer + 512)
    assert bytes(memory) != made
    of.encode(other.address, pointer + 512)
    assert bytes(memory) == bytes(other)
    of.move(memory.address, pointer)
    assert bytes(memory) == made


@pytest.mark.gpu
def test_gpu_the_driver_refuses_an_address_that_is_not_aligned(cupy: Any) -> None:
    pointer = cupy.zeros(4096, "float32").data.ptr
    with pytest.raises(UnsupportedError, match="refuses a TMA descriptor"):
        TensorMap("float16", SHAPE, DENSE, 128).encode(Memory().address, pointer + 2)
