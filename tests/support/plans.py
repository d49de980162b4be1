"""Problems for tests of planners, shared names, and contexts that change the planner."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import cuflash
from cuflash.planning import backward as plan_backward
from cuflash.planning import forward as plan_forward
from cuflash.planning.plan import Plan
from cuflash.problem.array_spec import ArraySpec
from cuflash.problem.mod_spec import make_mod_spec
from cuflash.problem.operands import OPS, mod_op
from cuflash.problem.options import Options
from cuflash.problem.problem import Problem
from cuflash.runtime.call import CALL_CACHE

DTYPES = ("float16", "bfloat16", "float32")
ARCHS = ("sm_80", "sm_86", "sm_87", "sm_89", "sm_90", "sm_100", "sm_103", "sm_110", "sm_120", "sm_121")


def problem(head_dim: int = 64, head_dim_v: int = 64, op: str = "forward", **more: Any) -> Problem:
    """Returns a problem of dense arrays. more: `dims` (batch, lengths, heads), dtype and options of the call."""
    b, sq, sk, hq, hkv = more.pop("dims", (2, 300, 500, 4, 2))
    dtype = more.pop("dtype", "bfloat16")
    shapes = (b, sq, hq, head_dim), (b, sk, hkv, head_dim), (b, sk, hkv, head_dim_v)
    return problem_of(*(ArraySpec.contiguous(shape, dtype) for shape in shapes), op=op, **more)


def problem_of(q: ArraySpec, k: ArraySpec, v: ArraySpec | None = None, op: str = "forward", **options: Any) -> Problem:
    """Returns the problem of a call; lse ignores v, and backward has other arrays dense."""
    specs = [q, k] if v is None or op == "lse" else [q, k, v]
    return Problem.from_specs(OPS["lse" if v is None else op], specs, Options(**options))


def mod_problem(op: str = "forward", head_dim: int = 64, seqlen: int = 2048, **options: Any) -> Problem:
    """Returns the problem of a dense call with a sink for each head."""
    q = ArraySpec.contiguous((2, seqlen, 4, head_dim), "bfloat16")
    specs = [q] * (2 if op == "lse" else 3) + [ArraySpec.contiguous((4,), "float32")]
    return Problem.from_specs(mod_op(OPS[op], make_mod_spec(None, None, has_sinks=True)), specs, Options(**options))


def of_lengths(head_dim: int, batch: int = 4, rows: int = 4096, heads: tuple[int, int] = (16, 16), **more: Any) -> Plan:
    """Returns the plan of backward on an H100 for `batch` packed sequences of `rows` rows."""
    q, k = ((batch * rows, count, head_dim) for count in heads)
    varlen_kwargs: dict[str, Any] = dict.fromkeys(("cu_seqlens_q", "cu_seqlens_k"), (batch + 1,))
    varlen_kwargs |= dict.fromkeys(("max_seqlen_q", "max_seqlen_k"), rows)
    return cuflash.plan(q, k, k, dtype="bfloat16", device="sm_90", op="backward", **varlen_kwargs | more)


@contextmanager
def planned_with(module: Any, **others: Any) -> Iterator[None]:
    """Replaces constants, tables or functions in a module of `planning`, for plans made inside."""
    with mock.patch.multiple(module, **others):
        try:
            CALL_CACHE.clear()
            yield
        finally:
            CALL_CACHE.clear()


@contextmanager
def for_any_gpu() -> Iterator[None]:
    """Runs all ops inside with sm80 kernels, also on Hopper."""
    others = {"reason_against": lambda *_: "the test asks for it"}
    with planned_with(plan_forward, **others), planned_with(plan_backward, **others):
        yield
