"""Keyword arguments of the public calls, each once: name, type, default, validator, and the ops that take it.

A new option is a row of `Options`, a keyword of `options_key`, of the calls that take it and of their types in
signatures.py. It is also a field in `frameworks/jax/handlers.py` and `frameworks/torch/ops.py`. A constant of scores
that kernels read is a field of `ScoreConstants`, which `ScoreParams` in `kernels_cu/common/score.cuh` repeats.
"""

import math
from collections.abc import Callable
from functools import lru_cache
from numbers import Number
from typing import Annotated, Any, Literal, NamedTuple, Protocol, TypeVar, get_args, get_type_hints

import numpy as np

from ..errors import ProblemError
from ..mods.tracing.operand import is_array, is_integer, is_real
from ..units import kind_of
from .dropout import SHARES, share_kept
from .dtypes import DTYPES, is_dtype, named_dtype


class DtypeObject(Protocol):
    """A dtype object, such as numpy.dtype or torch.dtype; strings have no itemsize."""

    @property
    def itemsize(self) -> int: ...


Array = TypeVar("Array")  # type of q and of the results
WindowSize = tuple[int | None, int | None]
Algorithm = Literal["standard", "flash1", "flash2", "flashd"]
DtypeLike = str | type[Any] | DtypeObject
OutDtype = Literal["float16", "bfloat16", "float32", "float64"] | type[Any] | DtypeObject
OpName = Literal["forward", "lse", "backward"]
ALGORITHMS: tuple[Algorithm, ...] = get_args(Algorithm)
SPLIT_STEP = 128  # keys: `split_size` is a multiple of it
LOG2_E = 1.4426950408889634


class OptionContext(NamedTuple):
    """Context for validators: some defaults depend on the arrays."""

    head_dim: int
    dtype: str


def check_flag(name: str, value: Any) -> bool:
    """Returns `value` if it is a bool; truthy values are rejected."""
    if not isinstance(value, (bool, np.bool_)):
        raise ProblemError(f"{name}={value!r} is {kind_of(value)}; give True or False{_of_array(value)}")
    return bool(value)


def check_integer(name: str, value: Any) -> int:
    """Returns `value` as an int. An array is rejected despite its `__index__`: it may change after validation."""
    if not is_integer(value):
        raise ProblemError(f"{name}={value!r} is {kind_of(value)}; give an integer{_of_array(value)}")
    return int(value)


def _of_array(value: Any) -> str:
    """Returns a hint for an array of one element in place of a number or a flag, else an empty string."""
    hint = " (item() of an array of one element is one; what is traced has none yet: make it static)"
    return hint if hasattr(value, "__dlpack__") and not isinstance(value, type) else ""


def check_window(window_size: Any) -> WindowSize:
    """Returns (left, right) with None for an open side."""
    # Other iterables are refused: sets have no order, and bytes or arrays are given by mistake.
    if not isinstance(window_size, (tuple, list)) or len(window_size) != 2:
        raise ProblemError(
            f"window_size={window_size!r} is not a pair; give a tuple (left, right), each a count of keys >= 0, or -1 "
            "or None for open"
        )
    sides: list[int | None] = []
    for name, side in zip(("left", "right"), window_size, strict=True):
        value = None if side is None else check_integer(f"window_size {name}", side)
        if value is not None and value < -1:
            raise ProblemError(
                f"window_size={window_size!r}: {name} is {value}; give a count of keys >= 0, or -1 or None for open"
            )
        sides.append(None if value == -1 else value)
    return sides[0], sides[1]


_SCALES = "a finite number above 0, or None for 1/sqrt(head_dim)"


def check_scale(name: str, scale: Any, accepted: str = _SCALES) -> float:
    """Returns `scale` if scores can be multiplied by it. accepted: the end of error texts."""
    number = _real(name, scale, accepted)
    if number <= 0.0:
        raise ProblemError(f"{name}={number} is not positive; give {accepted}")
    # Kernels take scale, softcap and their quotient as normal float32 numbers.
    if not 1e-15 <= number <= 1e15:
        raise ProblemError(f"{name}={number} is out of range; give a number from 1e-15 to 1e15")
    return number


def _real(name: str, value: Any, accepted: str) -> float:
    if not is_real(value):
        raise ProblemError(f"{name}={value!r} is {kind_of(value)}; give {accepted}{_of_array(value)}")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise ProblemError(f"{name}={number} is not finite; give {accepted}")
    return number


def _scale(value: Any, context: OptionContext) -> float:
    return 1.0 / math.sqrt(context.head_dim) if value is None else check_scale("softmax_scale", value)


def _softcap(value: Any, context: OptionContext) -> float:
    accepted = "a finite number above 0, or 0 for none"
    return check_scale("softcap", value, accepted) if _real("softcap", value, accepted) else 0.0


def check_dropout(value: Any) -> float:
    """Returns `value` if it is a fraction of weights that may be dropped."""
    accepted = "the fraction of weights to drop, from 0 up to but not 1"
    if is_array(value) and value.shape != ():
        raise ProblemError(f"dropout_p is an array of shape {tuple(value.shape)}; give a number, {accepted}")
    number = _real("dropout_p", value, accepted)
    if not 0.0 <= number < 1.0:
        raise ProblemError(f"dropout_p={number} is outside [0, 1); give {accepted}")
    if not share_kept(number):
        raise ProblemError(f"dropout_p={number} drops all weights, as fractions are multiples of 1/{SHARES}; give less")
    return number


def is_zero(dropout_p: Any) -> bool:
    """Returns True for a plain int or float 0, which needs no validator. `==` alone fails for arrays."""
    return type(dropout_p) in (float, int) and dropout_p == 0


def _offset(value: Any, context: OptionContext) -> int | None:
    return None if value is None else check_integer("diagonal_offset", value)


def _bound(name: str, value: Any) -> int | None:
    bound = None if value is None else check_integer(name, value)
    if bound is not None and bound < 0:
        raise ProblemError(f"{name}={bound} is negative; give a bound on the lengths, or None for the arrays' shapes")
    return bound


def _num_splits(value: Any, context: OptionContext) -> int:
    if (number := check_integer("num_splits", value)) < 0:
        raise ProblemError(f"num_splits={number} is negative; give how many blocks share the keys of a query, or 0")
    return number


def _split_size(value: Any, context: OptionContext) -> int | None:
    size = None if value is None else check_integer("split_size", value)
    if size is not None and (size < 1 or size % SPLIT_STEP):
        raise ProblemError(f"split_size={size}; give a positive multiple of {SPLIT_STEP} keys, or None")
    return size


def _sm_margin(value: Any, context: OptionContext) -> int:
    if (margin := check_integer("sm_margin", value)) < 0:
        raise ProblemError(f"sm_margin={margin} is negative; give how many SMs other kernels need, or 0")
    return margin


def _flag(name: str) -> Callable[[Any, OptionContext], bool]:
    return lambda value, _: check_flag(name, value)


def check_algorithm(value: Any) -> str:
    """Returns `value` if it names one of the algorithms."""
    if not isinstance(value, str) or value not in ALGORITHMS:
        raise ProblemError(f"algorithm={value!r} is not known; give one of {', '.join(ALGORITHMS)}")
    return value


def _out_dtype(value: Any, context: OptionContext) -> str:
    name, narrow = named_dtype(value), DTYPES[context.dtype].itemsize == 2
    is_name = isinstance(name, str)
    if value is None or (is_name and name == context.dtype):
        return context.dtype
    if is_name and name == "float32" and narrow:
        return "float32"
    raise ProblemError(
        f"out_dtype={value!r} with {context.dtype} inputs; give None for {context.dtype}"
        + (", or float32" if narrow else "")
    )


class Option(NamedTuple):
    """Validator of an argument, and the ops that take it."""

    validate: Callable[[Any, OptionContext], Any]
    ops: tuple[str, ...] = ("forward", "lse", "backward")


class ScoreConstants(NamedTuple):
    """Parameters of scores in kernels: the fields of `ScoreParams`, in its order."""

    softmax_scale: float
    scale_log2: float  # the exponent, in powers of two, of one unit of q kᵀ
    cap: float  # softcap in units of q kᵀ, or 0
    inverse_cap: float


class Options(NamedTuple):
    """Keyword arguments of a call: hashable if they are legal; `validated` returns them with defaults filled in."""

    softmax_scale: Annotated[float | None, Option(_scale)] = None
    causal: Annotated[bool, Option(_flag("causal"))] = False
    window_size: Annotated[WindowSize, Option(lambda value, _: check_window(value))] = (-1, -1)
    diagonal_offset: Annotated[int | None, Option(_offset)] = None
    softcap: Annotated[float, Option(_softcap)] = 0.0
    algorithm: Annotated[str, Option(lambda value, _: check_algorithm(value), ("forward",))] = "flash2"
    out_dtype: Annotated[str | None, Option(_out_dtype, ("forward",))] = None
    deterministic: Annotated[bool, Option(_flag("deterministic"), ("backward",))] = False
    max_seqlen_q: Annotated[int | None, Option(lambda value, _: _bound("max_seqlen_q", value))] = None
    max_seqlen_k: Annotated[int | None, Option(lambda value, _: _bound("max_seqlen_k", value))] = None
    num_splits: Annotated[int, Option(_num_splits, ("forward", "lse"))] = 0
    split_size: Annotated[int | None, Option(_split_size, ("forward", "lse"))] = None
    dropout_p: Annotated[float, Option(lambda value, _: check_dropout(value), ("forward", "backward"))] = 0.0
    sm_margin: Annotated[int, Option(_sm_margin)] = 0
    q_same_position: Annotated[bool, Option(_flag("q_same_position"), ("append_kv",))] = False
    rotary_interleaved: Annotated[bool, Option(_flag("rotary_interleaved"), ("append_kv",))] = False

    def key(self) -> tuple[Any, ...]:
        """Returns the options with the types of their values: 1, 1.0 and True are equal, but not all are legal."""
        window = self.window_size
        if isinstance(window, list):  # which has no hash
            return self._replace(window_size=tuple(window)).key()
        return self, *map(type, self), *(map(type, window) if isinstance(window, tuple) else ())

    def validated(self, context: OptionContext) -> "Options":
        """Returns the validated arguments with their defaults; raises ProblemError for the first that is not legal."""
        try:
            return _validated(self.key(), context)
        except ProblemError:
            raise
        except (TypeError, ValueError):  # an argument without a hash is validated anew each time
            return _validated.__wrapped__((self,), context)

    @property
    def scores(self) -> ScoreConstants:
        """Parameters of the kernels, from validated arguments."""
        return _scores(self.softmax_scale, self.softcap)


DEFAULTS: dict[str, Any] = Options._field_defaults
ROWS: dict[str, Option] = {
    name: get_args(hint)[1] for name, hint in get_type_hints(Options, include_extras=True).items()
}


class OptionsKey:
    """Interned options. Compared by identity, which makes cache lookups cheapest.

    Calls with equal arguments have the same key if `is_cacheable`; two threads at once may have two.
    """

    __slots__ = ("is_cacheable", "options")

    def __init__(self, options: Options, is_cacheable: bool) -> None:
        self.options, self.is_cacheable = options, is_cacheable


MAX_KEYS = 1024
# Types of cached arguments. An array given by mistake would live as long as its key.
_PLAIN = (type(None), str, np.bool_, Number)


def options_key(
    *,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: WindowSize = (-1, -1),
    diagonal_offset: int | None = None,
    softcap: float = 0.0,
    algorithm: Algorithm = "flash2",
    out_dtype: Any = None,
    deterministic: bool = False,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    num_splits: int = 0,
    split_size: int | None = None,
    dropout_p: float = 0.0,
    sm_margin: int = 0,
    q_same_position: bool = False,
    rotary_interleaved: bool = False,
) -> OptionsKey:
    """Returns the key of a call's keyword arguments, which `Problem.from_specs` validates."""
    if type(window_size) is not tuple and isinstance(window_size, (tuple, list)):
        window_size = tuple(window_size)  # type: ignore[assignment]
    values = (
        softmax_scale, causal, window_size, diagonal_offset, softcap, algorithm, out_dtype, deterministic,
        max_seqlen_q, max_seqlen_k, num_splits, split_size, dropout_p, sm_margin, q_same_position, rotary_interleaved,
    )  # fmt: skip
    if type(window_size) is tuple and len(window_size) == 2:
        try:
            return _cached_key(*window_size, *values)
        except (TypeError, ValueError):  # an argument is not plain, or has no hash
            pass
    return OptionsKey(Options._make(values), False)


# Sides of the window are separate arguments, as `typed` only compares types of arguments (see `Options.key`).
@lru_cache(MAX_KEYS, typed=True)
def _cached_key(left: Any, right: Any, *values: Any) -> OptionsKey:
    options = Options(*values)
    if not all(isinstance(x, _PLAIN) or is_dtype(x) for x in (left, right, *values) if x is not options.window_size):
        raise TypeError
    return OptionsKey(options, True)


@lru_cache(maxsize=256)
def _validated(key: tuple[Any, ...], context: OptionContext) -> Options:
    return Options._make([row.validate(value, context) for value, row in zip(key[0], ROWS.values(), strict=True)])


@lru_cache(maxsize=256)
def _scores(scale: float, softcap: float) -> ScoreConstants:
    capped = (softcap / scale, scale / softcap) if softcap else (0.0, 0.0)
    return ScoreConstants(scale, scale * LOG2_E, *capped)
