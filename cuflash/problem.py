"""What is computed: one frozen, hashable `Problem` without pointers. The only place that judges user input."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from numbers import Real
from typing import Any, NamedTuple

from .errors import ProblemError
from .mask import Mask, WindowSize

ITEMSIZE = {"float16": 2, "bfloat16": 2, "float32": 4, "float64": 8}
ALGORITHMS = ("standard", "flash1", "flash2", "flashd")
MAX_SEQLEN = 2**30 - 4096  # the sum of a query index, a tile and a mask bound must fit 32 bits inside the kernels
LAYOUT = "(batch, seqlen, heads, head_dim), (seqlen, heads, head_dim) or (seqlen, head_dim)"


@lru_cache(maxsize=4096)
def dense_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Strides of a C-contiguous array, in elements."""
    return tuple(math.prod(shape[axis + 1 :]) for axis in range(len(shape)))


class ArraySpec(NamedTuple):
    """What is asked of an array before anything runs. `strides` count elements; `device` reads "cpu" or "cuda:0"."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: str
    device: str
    framework: str

    @classmethod
    def dense(cls, shape: tuple[int, ...], dtype: str, device: str = "cpu", framework: str = "numpy") -> ArraySpec:
        """A C-contiguous array of this shape."""
        return cls(shape, dense_strides(shape), dtype, device, framework)

    def as_4d(self) -> ArraySpec:
        """The same array seen as (batch, seqlen, heads, head_dim): a missing batch or heads axis has length 1."""
        shape, strides = self.shape, self.strides
        if len(shape) == 2:
            shape, strides = (shape[0], 1, shape[1]), (strides[0], 0, strides[1])
        if len(shape) == 3:
            shape, strides = (1, *shape), (0, *strides)
        return self._replace(shape=shape, strides=strides)

    def __str__(self) -> str:
        return f"{self.framework} {self.dtype}{list(self.shape)} on {self.device}"


class Arguments(NamedTuple):
    """The keyword arguments of the public calls that shape a problem, as given: hashable where they are legal."""

    softmax_scale: float | None = None
    causal: bool = False
    window_size: WindowSize = (-1, -1)
    diagonal_offset: int | None = None
    softcap: float = 0.0
    algorithm: str = "flash2"
    out_dtype: str | None = None

    def types(self) -> tuple[type, ...]:
        """What a cache asks beside: 1, 1.0 and True are equal, but not all of them are a scale or a window."""
        window = self.window_size
        return (*map(type, self), *(map(type, window) if isinstance(window, tuple) else ()))


@dataclass(frozen=True, slots=True)
class Problem:
    """A legal attention problem. Shapes are 4-D; `rank` is that of the caller's `q`, which the outputs take over.

    `head_dim_v` is 0 for an `lse` problem, which has no v. `strides` are those of q, k and v in elements.
    """

    batch: int
    seqlen_q: int
    seqlen_k: int
    heads_q: int
    heads_kv: int
    head_dim: int
    head_dim_v: int
    dtype: str
    out_dtype: str
    mask: Mask
    softmax_scale: float
    softcap: float
    algorithm: str
    rank: int
    device: str
    framework: str
    strides: tuple[tuple[int, ...], ...]

    @classmethod
    def of(
        cls,
        q: ArraySpec,
        k: ArraySpec,
        v: ArraySpec | None,
        *,
        softmax_scale: float | None = None,
        causal: bool = False,
        window_size: WindowSize = (-1, -1),
        diagonal_offset: int | None = None,
        softcap: float = 0.0,
        algorithm: str = "flash2",
        out_dtype: str | None = None,
    ) -> Problem:
        """Judges the arguments of a call; `ProblemError` if they fit no attention problem."""
        named = {"q": q, "k": k} | ({} if v is None else {"v": v})
        check_alike(named)
        rank = len(q.shape)
        for name, spec in named.items():
            if not 2 <= len(spec.shape) <= 4:
                raise ProblemError(f"{name} has shape {spec.shape}, rank {len(spec.shape)}; give {LAYOUT}")
            if len(spec.shape) != rank:
                raise ProblemError(
                    f"{name} has shape {spec.shape}, rank {len(spec.shape)}, but q has rank {rank}; "
                    f"give all of {', '.join(named)} the same layout: {LAYOUT}"
                )
        operands = [spec.as_4d() for spec in named.values()]
        batch, seqlen_q, heads_q, head_dim = operands[0].shape
        _, seqlen_k, heads_kv, head_dim_k = operands[1].shape
        head_dim_v = operands[2].shape[3] if v is not None else 0
        for name, spec in zip(named, operands, strict=True):
            if spec.shape[0] != batch:
                raise ProblemError(f"{name} has batch {spec.shape[0]}, but q has {batch}; give all the same batch")
        if head_dim_k != head_dim:
            raise ProblemError(f"k has head_dim {head_dim_k}, but q has {head_dim}; q and k must share head_dim")
        if v is not None and operands[2].shape[1:3] != (seqlen_k, heads_kv):
            raise ProblemError(
                f"v has seqlen {operands[2].shape[1]} and {operands[2].shape[2]} heads, but k has seqlen {seqlen_k} "
                f"and {heads_kv} heads; k and v must share both"
            )
        if heads_q < 1 or heads_kv < 1 or head_dim < 1 or (v is not None and head_dim_v < 1):
            raise ProblemError(
                f"shapes {', '.join(f'{n} {s.shape}' for n, s in named.items())}: heads and head_dim must be at "
                "least 1 (batch and seqlen may be 0)"
            )
        if heads_q % heads_kv:
            raise ProblemError(
                f"q has {heads_q} heads and k has {heads_kv}; heads_q must be a multiple of heads_kv "
                "(query head h uses kv head h // (heads_q // heads_kv))"
            )
        if max(seqlen_q, seqlen_k) > MAX_SEQLEN:
            raise ProblemError(f"seqlen {max(seqlen_q, seqlen_k)} is over the limit of {MAX_SEQLEN}")
        if not isinstance(algorithm, str) or algorithm not in ALGORITHMS:
            raise ProblemError(f"algorithm={algorithm!r} is not known; give one of {', '.join(ALGORITHMS)}")
        return cls(
            batch=batch,
            seqlen_q=seqlen_q,
            seqlen_k=seqlen_k,
            heads_q=heads_q,
            heads_kv=heads_kv,
            head_dim=head_dim,
            head_dim_v=head_dim_v,
            dtype=q.dtype,
            out_dtype=_out_dtype(out_dtype, q.dtype),
            mask=Mask.of(seqlen_q, seqlen_k, causal=causal, window_size=window_size, diagonal_offset=diagonal_offset),
            softmax_scale=_scale(softmax_scale, head_dim),
            softcap=_softcap(softcap),
            algorithm=algorithm,
            rank=rank,
            device=q.device,
            framework=q.framework,
            strides=tuple(spec.strides for spec in operands),
        )

    @classmethod
    def of_call(cls, specs: Sequence[ArraySpec], arguments: Arguments) -> Problem:
        """`of` for the operands of a public call: q, k and, but for lse, v."""
        return cls.of(specs[0], specs[1], specs[2] if len(specs) == 3 else None, **arguments._asdict())

    @classmethod
    def of_gradients(cls, specs: dict[str, ArraySpec], arguments: Arguments) -> Problem:
        """`of` for backward: q, k, v, dout, out, lse and perhaps dlse. out may be float32 where the inputs are not."""
        wide = specs["out"].dtype == "float32" and ITEMSIZE.get(specs["q"].dtype) == 2
        arguments = arguments._replace(out_dtype="float32" if wide else None)
        problem = cls.of_call([specs[name] for name in "qkv"], arguments)
        lse_dtype = "float64" if problem.dtype == "float64" else "float32"
        problem.check_operand("dout", specs["dout"], problem.out_shape, problem.dtype)
        out_dtypes = (problem.dtype, "float32") if ITEMSIZE[problem.dtype] == 2 else (problem.dtype,)
        problem.check_operand("out", specs["out"], problem.out_shape, *out_dtypes)
        for name in ("lse", "dlse"):
            if name in specs:
                problem.check_operand(name, specs[name], problem.lse_shape, lse_dtype)
        return problem

    @property
    def operand_shapes(self) -> tuple[tuple[int, int, int, int], ...]:
        """The 4-D shapes of q, k and, but for lse, v."""
        q = (self.batch, self.seqlen_q, self.heads_q, self.head_dim)
        dims = (self.head_dim, self.head_dim_v)[: len(self.strides) - 1]
        return q, *((self.batch, self.seqlen_k, self.heads_kv, dim) for dim in dims)

    @property
    def out_shape(self) -> tuple[int, ...]:
        """Shape of out in the caller's rank."""
        return self._in_rank((self.batch, self.seqlen_q, self.heads_q, self.head_dim_v), heads_axis=2)

    @property
    def lse_shape(self) -> tuple[int, ...]:
        """Shape of lse: (batch, heads_q, seqlen_q) without the axes that q does not have."""
        return self._in_rank((self.batch, self.heads_q, self.seqlen_q), heads_axis=1)

    @property
    def ordinal(self) -> int | None:
        """Number of the GPU that the arrays are on; None for the CPU."""
        return int(self.device.removeprefix("cuda:")) if self.device.startswith("cuda:") else None

    @property
    def flops(self) -> int:
        """Multiplications and additions of the two products over the visible pairs (one product for lse)."""
        return 2 * self.batch * self.heads_q * self.mask.num_visible() * (self.head_dim + self.head_dim_v)

    def check_out(self, spec: ArraySpec) -> None:
        """Judges the `out` that a call is to write to."""
        self.check_operand("out", spec, self.out_shape, self.out_dtype)
        repeated = any(stride == 0 and length > 1 for length, stride in zip(spec.shape, spec.strides, strict=True))
        if repeated and 0 not in spec.shape:
            raise ProblemError(
                f"out has shape {spec.shape} and strides {spec.strides}: rows share memory; give a dense out"
            )

    def check_operand(self, name: str, spec: ArraySpec, shape: tuple[int, ...], *dtypes: str) -> None:
        """Judges a further array of the call (`out`, `dout`, `lse` …) against this problem."""
        if spec.framework != self.framework or spec.device != self.device:
            raise ProblemError(
                f"{name} is a {spec}, but q is a {self.framework} array on {self.device}; give both alike"
            )
        if spec.shape != shape:
            raise ProblemError(f"{name} has shape {spec.shape}; this problem needs {shape}")
        if spec.dtype not in dtypes:
            raise ProblemError(f"{name} has dtype {spec.dtype}; this problem needs {' or '.join(dtypes)}")

    def _in_rank(self, shape: tuple[int, ...], heads_axis: int) -> tuple[int, ...]:
        if self.rank == 4:
            return shape
        kept = [n for axis, n in enumerate(shape) if axis != 0 and (self.rank == 3 or axis != heads_axis)]
        return tuple(kept)


def check_dtype(name: str, dtype: str) -> str:
    """`dtype` if it is one that attention is defined for here."""
    if not isinstance(dtype, str) or dtype not in ITEMSIZE:
        raise ProblemError(f"{name} has dtype {dtype}; give one of {', '.join(ITEMSIZE)} (cast with astype or to)")
    return dtype


def check_alike(named: dict[str, ArraySpec]) -> None:
    """Judges framework, device and dtype of operands, which must all be those of the first."""
    of, first = next(iter(named.items()))
    for name, spec in named.items():
        if spec.framework != first.framework:
            raise ProblemError(
                f"{name} is a {spec.framework} array, but {of} is a {first.framework} array; give all of one framework "
                "(convert with from_dlpack)"
            )
        if spec.device != first.device:
            raise ProblemError(f"{name} is on {spec.device}, but {of} is on {first.device}; move all to one device")
        check_dtype(name, spec.dtype)
        if spec.dtype != first.dtype:
            raise ProblemError(f"{name} has dtype {spec.dtype}, but {of} has {first.dtype}; cast all to one dtype")


def check_states(outs: list[ArraySpec], lses: list[ArraySpec]) -> tuple[int, int, int, int]:
    """Judges the states of `merge_states`; returns the 4-D shape of their outs."""
    if not outs or len(outs) != len(lses):
        raise ProblemError(f"{len(outs)} outs and {len(lses)} lses; give one lse for each out, and at least one state")
    check_alike({f"outs[{i}]": spec for i, spec in enumerate(outs)})
    shape = outs[0].shape
    if not 2 <= len(shape) <= 4:
        raise ProblemError(f"outs[0] has shape {shape}, rank {len(shape)}; give {LAYOUT}")
    b, s, h, d = outs[0].as_4d().shape
    if h < 1 or d < 1:
        raise ProblemError(f"outs[0] has shape {shape}; heads and head_dim must be at least 1 (others may be 0)")
    lse_shape = {4: (b, h, s), 3: (h, s), 2: (s,)}[len(shape)]
    lse_dtype = "float64" if outs[0].dtype == "float64" else "float32"
    for i, (out, lse) in enumerate(zip(outs, lses, strict=True)):
        if out.shape != shape:
            raise ProblemError(f"outs[{i}] has shape {out.shape}, but outs[0] has {shape}; give all the same shape")
        if (lse.shape, lse.dtype) != (lse_shape, lse_dtype):
            raise ProblemError(
                f"lses[{i}] has shape {lse.shape} and dtype {lse.dtype}; outs of shape {shape} need {lse_shape} in "
                f"{lse_dtype}"
            )
        if (lse.framework, lse.device) != (out.framework, out.device):
            raise ProblemError(f"lses[{i}] is a {lse}, but its out is a {out}; give both alike")
    return b, s, h, d


def _real(name: str, value: Any, wanted: str) -> float:
    if isinstance(value, bool) or not isinstance(value, Real):
        raise ProblemError(f"{name}={value!r} is a {type(value).__name__}; give {wanted}")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise ProblemError(f"{name}={number} is not finite; give {wanted}")
    return number


def _in_range(name: str, number: float) -> float:
    # why: the kernels take these, and their quotient, as normal float32 numbers.
    if not 1e-15 <= number <= 1e15:
        raise ProblemError(f"{name}={number} is out of range; give a number from 1e-15 to 1e15")
    return number


def check_scale(name: str, scale: Any) -> float:
    """`scale` if scores can be multiplied by it."""
    wanted = "a finite number above 0, or None for 1/sqrt(head_dim)"
    number = _real(name, scale, wanted)
    if number <= 0.0:
        raise ProblemError(f"{name}={number} is not positive; give {wanted}")
    return _in_range(name, number)


def _scale(softmax_scale: Any, head_dim: int) -> float:
    return 1.0 / math.sqrt(head_dim) if softmax_scale is None else check_scale("softmax_scale", softmax_scale)


def _softcap(softcap: Any) -> float:
    wanted = "a finite number above 0, or 0 for none"
    number = _real("softcap", softcap, wanted)
    if number < 0.0:
        raise ProblemError(f"softcap={number} is negative; give {wanted}")
    return _in_range("softcap", number) if number else 0.0


def _out_dtype(out_dtype: str | None, dtype: str) -> str:
    named = isinstance(out_dtype, str)
    if out_dtype is None or (named and out_dtype == dtype):
        return dtype
    if named and out_dtype == "float32" and ITEMSIZE[dtype] == 2:
        return "float32"
    raise ProblemError(
        f"out_dtype={out_dtype!r} with {dtype} inputs; give None for {dtype}"
        + (", or float32" if ITEMSIZE[dtype] == 2 else "")
    )
