"""Trials of variable-length sequences, of caches and pages, and of mods."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np

import cuflash

from . import appends, sequences
from .cases import Case
from .draw import DTYPES, LENGTHS, Draw
from .functions import FUNCTIONS, SHAPES, Maker, bias_of, blocked, dropped, joined
from .gradients import Targets
from .layouts import LAYOUTS, WRITABLE, identical
from .mods import check_backward, check_forward, check_of_lengths, check_repeated, forward
from .oracle import demand
from .sequences import Sequences, VarlenArrays


@dataclass(frozen=True, slots=True)
class Several:
    """A trial of variable-length sequences: gradients, or forward twice and lse if `backward` is None.

    grads_out: layouts of the caller's arrays for dq, dk and dv, "" for none.
    """

    problem: Sequences
    seed: int
    layout: str = "dense"
    pages_are_lost: bool = False
    forward: dict[str, Any] = field(default_factory=dict)
    backward: dict[str, Any] | None = None
    grads_out: tuple[str, str, str] = ("", "", "")

    @classmethod
    def drawn(cls, family: Draw, draw: Draw) -> Several:
        gradients, dims, dtype = family.chance(0.4), family.dims(), family.one_of(*DTYPES)
        gradients = gradients and max(dims) <= 256
        problem = sequences.drawn(draw.seed(), LENGTHS, [dims], gradients=gradients, dtypes=[dtype])
        layout = draw.one_of(*sequences.LAYOUTS) if draw.chance(0.5) else "dense"
        if gradients:
            options = {"deterministic": draw.chance(0.5)}
            return cls(problem, draw.seed(), layout, backward=options, grads_out=draw.grads_out())
        forward = draw.one_of({}, {}, {"num_splits": 1}, {"num_splits": 3}, {"split_size": 256})
        return cls(problem, draw.seed(), layout, problem.place_k == "paged" and draw.chance(0.2), forward)

    def run(self, xp: Any) -> None:
        """Makes the calls in this array library, and raises MismatchError if one is wrong."""
        arrays = sequences.varlen_arrays(self.problem, self.seed)
        if self.backward is not None:
            self._check_gradients(arrays, self.backward, xp)
            return
        if self.pages_are_lost and xp is not np:  # pages that do not exist are an error in host memory
            arrays = arrays.without_pages(self.seed)
        arguments = arrays.arguments(xp, self.layout)
        out, lse = cuflash.forward(**arguments, return_lse=True, **self.forward)
        alone = cuflash.lse(**{name: x for name, x in arguments.items() if name != "v"})
        sequences.check(arrays, out, lse, alone)
        again = cuflash.forward(**arguments, return_lse=True, **self.forward)
        demand(identical(again, (out, lse)), "forward does not repeat")

    def _check_gradients(self, arrays: VarlenArrays, options: dict[str, Any], xp: Any) -> None:
        arguments = arrays.arguments(xp)
        targets = Targets(self.grads_out, [arguments[name] for name in "qkv"])
        call = partial(sequences.gradients, arrays, xp, self.layout, **options)
        # 4 units: in sequences of few rows, the naive computation may happen to have no errors.
        check = partial(sequences.check_gradients, arrays, ulps=4.0)
        targets.check(call, check, repeats=options["deterministic"])


@dataclass(frozen=True, slots=True)
class Append:
    """A trial of `append_kv`, with or without rotation, compared bit by bit. layouts: layouts of arrays by name."""

    arguments: dict[str, Any]
    layouts: dict[str, str]

    @classmethod
    def drawn(cls, family: Draw, draw: Draw) -> Append:
        batch = draw.one_of(1, 2, 3, 5)

        def some(most: int) -> tuple[int, ...]:
            return tuple(draw.random.integers(0, most, batch).tolist())

        arguments = {
            "dtype": family.one_of(*DTYPES),
            "place": draw.one_of(*appends.PLACES),
            "lengths": some(34),
            "new": draw.one_of(0, 1, 5, some(9)),
            "queries": draw.one_of(1, 3, some(9)),
            "dims": family.one_of((64, 64), (128, 128), (40, 72), (17, 3), (264, 512)),
            "heads": draw.one_of((4, 2), (1, 1), (8, 1)),
        }
        if rotary := draw.one_of(0, 0, 8, 16):
            arguments |= {"rotary_dim": rotary, "rotary_interleaved": draw.chance(0.5), "wide": draw.chance(0.3)}
            arguments |= {"q_same_position": draw.chance(0.3), "positions": draw.one_of(60, 20)}
        written = "dense", "heads_first", "reversed_keys", "odd_start", "even_start"
        layouts = {name: draw.one_of(*written) for name in appends.WRITTEN}
        return cls(arguments, layouts | {name: draw.one_of(*WRITABLE) for name in ("k", "v", "q")})

    def run(self, xp: Any) -> None:
        """Makes the call in this array library, and raises MismatchError if a bit is wrong."""
        layouts = {name: LAYOUTS[layout] for name, layout in self.layouts.items()}
        room = {"capacity": 42} if xp is np else {}  # host arrays must fit the cache
        appends.check(appends.drawn(**self.arguments | room), xp, **layouts)


def maker_of(names: Sequence[str]) -> Maker:
    """Returns the maker of a call with all of these mods: names of functions, "dropout", or "bias" and its axes."""
    table = {"dropout": dropped} | FUNCTIONS
    return joined(*(table[name] if name in table else bias_of(name.removeprefix("bias ")) for name in names))


@dataclass(frozen=True, slots=True)
class ModVarlen:
    """A trial of mods on variable-length sequences, with a block mask of the mask_mod if `block_mask`."""

    problem: Sequences
    seed: int
    names: tuple[str, ...]
    deterministic: bool
    block_mask: bool

    @classmethod
    def drawn(cls, family: Draw, draw: Draw) -> ModVarlen:
        names = family.one_of(*FUNCTIONS), *family.one_of((), ("dropout",), ("bias bhqk",))
        gradients, dtype, dim = family.chance(0.5), family.one_of(*DTYPES), family.one_of(64, 64, 128)
        options: dict[str, Any] = {"gradients": gradients, "dtypes": [dtype], "batch": (1, 2, 3)}
        problem = sequences.drawn(draw.seed(), LENGTHS, [(dim, dim)], **options)
        problem = replace(
            problem, bounded=True
        )  # a bias has the axes of the longest sequences, whose lengths must then be given
        names = names[:1] if "everything" in names else names
        return cls(problem, draw.seed(), names, draw.chance(0.5), draw.chance(0.5))

    def run(self, xp: Any) -> None:
        """Makes the calls in this array library, and raises MismatchError if one is wrong."""
        make, arrays = maker_of(self.names), sequences.varlen_arrays(self.problem, self.seed)
        make = blocked(make, **arrays.varlen_kwargs) if self.block_mask else make
        check_of_lengths(make, arrays, xp, [self.deterministic])


@dataclass(frozen=True, slots=True)
class ModDense:
    """A trial of mods in a dense call, with a block mask of the mask_mod if `block_mask`."""

    case: Case
    seed: int
    names: tuple[str, ...]
    deterministic: bool
    block_mask: bool

    @classmethod
    def drawn(cls, family: Draw, draw: Draw) -> ModDense:
        names = [family.one_of(*FUNCTIONS)] if family.chance(0.8) else []
        names += [f"bias {family.one_of(*SHAPES)}"] if family.chance(0.3) and "everything" not in names else []
        names += ["dropout"] if family.chance(0.3) or not names else []
        dtype, dim = family.one_of(*DTYPES), family.one_of(64, 64, 128)
        mask = draw.mask() | {"softcap": family.one_of(0.0, 0.0, 0.0, 5.0), "softmax_scale": None}
        case = draw.case("mods", dtype, (dim, dim), **mask)
        return cls(case, draw.seed(), tuple(names), draw.chance(0.5), draw.chance(0.5))

    def run(self, xp: Any) -> None:
        """Makes the calls in this array library, and raises MismatchError if one is wrong."""
        make, arrays = maker_of(self.names), [xp.asarray(x) for x in self.case.arrays(self.seed)]
        make = blocked(make) if self.block_mask else make
        results = check_forward(make, self.case, xp.asarray, with_lse=True, seed=self.seed)
        demand(identical(forward(make, self.case, xp.asarray, arrays), results), "forward does not repeat")
        check_gradients = check_repeated if self.deterministic else check_backward
        check_gradients(make, self.case, xp.asarray, grads=True, seed=self.seed)
