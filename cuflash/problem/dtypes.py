"""Dtypes of attention: one row for each holds all that the host treats differently."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from ..errors import ProblemError
from ..mods.tracing.operand import name_of_dtype


class Dtype(NamedTuple):
    """A dtype of attention. Codes are None if no kernel takes the dtype.

    Sources: CUDA driver API, "Tensor Map Object Management" (tma); `xla/ffi/api/c_api.h` (xla).
    """

    name: str
    itemsize: int
    short: str  # its part of a kernel's name
    cuda: int | None  # DType in kernels_cu/common/config.cuh
    tma: int | None  # CUtensorMapDataType
    xla: int  # XLA_FFI_DataType
    accumulator: str  # the dtype of scores, sums and lse


DTYPES = {
    row.name: row
    for row in (
        Dtype("float16", 2, "fp16", 0, 6, 10, "float32"),
        Dtype("bfloat16", 2, "bf16", 1, 9, 16, "float32"),
        Dtype("float32", 4, "fp32", 2, 7, 11, "float32"),
        Dtype("float64", 8, "fp64", None, None, 12, "float64"),
    )
}
_INTEGERS = {"bool": 1} | {f"{sign}int{bits}": bits // 8 for sign in ("", "u") for bits in (8, 16, 32, 64)}
ITEMSIZE = _INTEGERS | {name: row.itemsize for name, row in DTYPES.items()}  # bytes of an element
GPU_DTYPES = tuple(name for name, row in DTYPES.items() if row.cuda is not None)


def is_dtype(value: Any) -> bool:
    """Returns True for a dtype object of an array library, such as numpy.float16; False for the name of a dtype."""
    return isinstance(value, (np.dtype, type)) or type(value).__name__ in ("dtype", "DType")


def named_dtype(value: Any) -> Any:
    """Returns the name of a dtype object. Any other value is returned unchanged, for `check_dtype`."""
    is_native = getattr(value, "isnative", True)  # kernels read native byte order
    name = name_of_dtype(value) if is_dtype(value) and is_native is not False else None
    return name if name in DTYPES else value


def check_dtype(name: str, dtype: str) -> str:
    """Returns `dtype` if attention is defined for it."""
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise ProblemError(f"{name} has dtype {dtype}; give one of {', '.join(DTYPES)} (cast with astype or to)")
    return dtype
