"""Checks of integer arrays on a GPU, which the host reads only with `check=True`."""

from __future__ import annotations

from typing import Any

from ..arrays.find import libraries_of
from ..arrays.library import GpuLibrary
from ..arrays.operands import specs_of
from ..errors import UnsupportedError
from ..problem.integers import check_integers, integer_names
from ..problem.operands import Op
from ..problem.options import OptionsKey, check_flag
from ..problem.validate import validated
from .driver import is_capturing


def check_on_device(op: Op, operands: tuple[Any, ...], options: OptionsKey, check: Any) -> None:
    """Validates lengths and indices of a call on GPU arrays if `check` is True, after waiting for the caller's stream.

    Calls on host arrays check their own as they run.
    """
    if not check_flag("check", check):
        return
    library, on_gpu = libraries_of(op, operands)
    if not on_gpu:
        return
    if not isinstance(library, GpuLibrary):
        crossed = tuple([None if x is None else library.to_cupy(x) for x in operands])
        check_on_device(op, crossed, options, check)
        return
    problem = validated(op, specs_of(op, library, operands), options.options).problem
    arrays = {name: operands[op.index[name]] for name in integer_names(problem)}
    if not arrays:
        return
    assert problem.ordinal is not None
    with library.device(problem.ordinal):
        if is_capturing(library.stream(problem.ordinal)):
            raise UnsupportedError(
                f"check=True reads {', '.join(arrays)} from the GPU, which a capture of a CUDA graph forbids; call "
                "with check=True before the capture, and leave it out inside"
            )
        check_integers(problem, {name: library.read(x) for name, x in arrays.items()})
