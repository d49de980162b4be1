"""Calls with mods in tests: cases, checks, and records of launches."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest import mock

import cuflash
from cuflash.runtime.call import LoadedPlan
from cuflash.testing.cases import Case
from cuflash.testing.functions import Maker
from cuflash.testing.mod_oracle import OracleInputs, check
from cuflash.testing.mods import bounds_case, make_oracle_mods, without_grads
from cuflash.testing.sequences import VarlenArrays

SMALL = Case("own", 2, 300, 300, 4, 2, 64, 64, "float16")


def of_lengths(lengths: tuple[int, int], case: Case = SMALL, **more: Any) -> Case:
    return replace(case, seqlen_q=lengths[0], seqlen_k=lengths[1], **more)


def forward_sequences(xp: Any, inputs: VarlenArrays, make: Maker, **more: Any) -> Any:
    """Returns `(out, lse)` of variable-length sequences with mods."""
    mod_kwargs = without_grads(make(xp.asarray, bounds_case(inputs)))
    return cuflash.forward(**inputs.arguments(xp) | mod_kwargs | more, return_lse=True)


def check_sequences(xp: Any, inputs: VarlenArrays, make: Maker, **more: Any) -> Any:
    """Checks a call on variable-length sequences with mods against float64; returns `(out, lse)`."""
    out, lse = forward_sequences(xp, inputs, make, **more)
    check(OracleInputs.from_varlen(inputs), make_oracle_mods(make, bounds_case(inputs)), out, lse)
    return out, lse


@contextmanager
def launched(record: Callable[..., Any] = lambda kernels, pointers: kernels.plan) -> Iterator[list[Any]]:
    """Yields a list of the plans that are launched inside, or of `record`'s result for each launch."""
    launch_it, ran = LoadedPlan.launch, []

    def noted(kernels: Any, pointers: tuple[int, ...], stream: int) -> Any:
        if is_launched := launch_it(kernels, pointers, stream):
            ran.append(record(kernels, pointers))
        return is_launched

    with mock.patch.object(LoadedPlan, "launch", noted):
        yield ran


def names_of(plans: Sequence[Any]) -> list[str]:
    """Returns the names of the kernels of plans."""
    return [each.variant.name for plan in plans for each in plan.launches]
