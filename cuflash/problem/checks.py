"""Checks of one array of a call, or of all its arrays, for every op."""

from __future__ import annotations

from collections.abc import Sequence

from ..errors import ProblemError
from ..mods.graph.graph import MAX_INDEX
from ..units import with_article
from .array_spec import ArraySpec, repeats_memory
from .dtypes import check_dtype

# Kernels add a query index, a tile and a mask bound in 32 bits, and for a new key a used length and a row number.
MAX_SEQLEN = MAX_INDEX + 1 - 4096


# Names of axes in errors, for axes of operands with other names.
_AXES = {
    "batch_q": "batch",
    "batch_k": "batch",
    "rows_q": "seqlen_q",
    "rows_k": "seqlen_k",
    "bounds": "batch + 1",
    "pairs": "rotary_dim / 2",
}


def axes_text(axes: Sequence[str]) -> str:
    """Returns the names of an operand's axes as in the documentation."""
    names = [_AXES.get(axis, axis) for axis in axes]
    return f"({', '.join(names)}{',' * (len(names) == 1)})"


def check_operand(
    name: str,
    spec: ArraySpec,
    first: ArraySpec,
    shape: tuple[int, ...],
    dtypes: tuple[str, ...],
    axes: Sequence[str],
    first_name: str = "q",
) -> None:
    """Validates an array against the problem that the first arrays describe.

    axes: names of the axes of `shape`. first_name: the name of the first array.
    """
    if spec.library != first.library or spec.device != first.device:
        expected = f"{first.library} array on {first.device}"
        raise ProblemError(
            f"{name} is {with_article(spec)}, but {first_name} is {with_article(expected)}; give both alike"
        )
    if spec.shape != shape:
        raise ProblemError(f"{name} has shape {spec.shape}; this problem needs {shape}: {axes_text(axes)}")
    if spec.dtype not in dtypes:
        raise ProblemError(f"{name} has dtype {spec.dtype}; this problem needs {' or '.join(dtypes)}")


def check_output(name: str, spec: ArraySpec) -> None:
    """Validates an array that a call writes to: its elements must not share memory."""
    repeats = repeats_memory(spec.shape, spec.strides)
    if repeats is not False:
        cause = "rows share memory" if repeats else "it takes too long to tell whether rows share memory"
        raise ProblemError(f"{name} has shape {spec.shape} and strides {spec.strides}: {cause}; give a dense {name}")


def check_alike(named: dict[str, ArraySpec]) -> None:
    """Validates that all operands have the library, device and dtype of the first."""
    first_name, first = next(iter(named.items()))
    check_dtype(first_name, first.dtype)
    home = first.dtype, first.device, first.library
    for name, spec in named.items():
        if (spec.dtype, spec.device, spec.library) == home:
            continue
        if spec.library != first.library:
            raise ProblemError(
                f"{name} is {with_article(spec.library)} array, but {first_name} is {with_article(first.library)} "
                "array; give all of one framework (convert with from_dlpack)"
            )
        if spec.device != first.device:
            raise ProblemError(
                f"{name} is on {spec.device}, but {first_name} is on {first.device}; move all to one device"
            )
        check_dtype(name, spec.dtype)
        raise ProblemError(f"{name} has dtype {spec.dtype}, but {first_name} has {first.dtype}; cast all to one dtype")
