"""What is computed: one frozen, hashable `Problem` without pointers. With `options`, the only judge of user input."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from ..errors import ProblemError
from .array_spec import ArraySpec
from .dtypes import DTYPES, check_dtype
from .mask import Mask
from .operands import Op
from .options import Known, Options

MAX_SEQLEN = 2**30 - 4096  # the sum of a query index, a tile and a mask bound must fit 32 bits inside the kernels
LAYOUT = "(batch, seqlen, heads, head_dim), (seqlen, heads, head_dim) or (seqlen, head_dim)"
Specs = Sequence[ArraySpec | None]
# The axes that arrays of this rank do not have.
_MISSING: dict[int, tuple[str, ...]] = {4: (), 3: ("batch",), 2: ("batch", "heads_q", "heads_kv")}
_LSES = ("lse", "dlse")
# The products that an op makes: of head_dim (backward's s, dq and dk), and of head_dim_v (dp and dv).
_PRODUCTS = {"backward": (3, 2)}


class Problem(NamedTuple):
    """A legal attention problem. Lengths are those of 4-D arrays; `head_dim_v` is 0 for `lse`, which has no v.

    `specs` are of the op's operands in the caller's rank, in their order: None for an input that is not there.
    """

    op: Op
    batch: int
    seqlen_q: int
    seqlen_k: int
    heads_q: int
    heads_kv: int
    head_dim: int
    head_dim_v: int
    dtype: str
    mask: Mask
    options: Options  # judged; the mask has what they said of it
    device: str
    library: str
    specs: tuple[ArraySpec | None, ...]

    @classmethod
    def of(cls, op: Op, specs: Specs, options: Options) -> Problem:
        """Judges a call: the specs of the op's operands in their order, and the keyword arguments as given.

        Operands at the end that are left out, and those that are None but are not optional, are dense.
        """
        specs = (*specs, *[None] * (len(op.operands) - len(specs)))
        q, k = _given("q", specs[0]), _given("k", specs[1])
        v = specs[2] if len(op.inputs) > 2 else None
        named = {"q": q, "k": k} | ({} if v is None else {"v": v})
        check_alike(named)
        _check_rank(named)
        batch, seqlen_q, heads_q, head_dim = q.as_4d().shape
        _, seqlen_k, heads_kv, _ = k.as_4d().shape
        head_dim_v = 0 if v is None else v.shape[-1]
        _check_lengths(named)
        if op.name == "backward" and (out := specs[op.index["out"]]) is not None:
            # why: out may have been made in float32 from 16-bit inputs, which is all that backward asks of it.
            wide = out.dtype == "float32" and DTYPES[q.dtype].itemsize == 2
            options = options._replace(out_dtype="float32" if wide else None)
        options = options.judged(Known(head_dim, q.dtype))
        mask = Mask.of(seqlen_q, seqlen_k, options.causal, options.window_size, options.diagonal_offset)
        lengths = {
            "batch": batch,
            "seqlen_q": seqlen_q,
            "seqlen_k": seqlen_k,
            "heads_q": heads_q,
            "heads_kv": heads_kv,
            "head_dim": head_dim,
            "head_dim_v": head_dim_v,
        }
        return cls(
            op=op,
            **lengths,
            dtype=q.dtype,
            mask=mask,
            # why: masks that hide the same keys make the same problem, however they were asked for.
            options=options._replace(causal=False, window_size=(None, None), diagonal_offset=None),
            device=q.device,
            library=q.library,
            specs=_checked(op, specs, lengths, options.out_dtype or q.dtype, len(named)),
        )

    def spec(self, name: str) -> ArraySpec:
        """The 4-D array of an operand that is there (lse: as it is)."""
        spec = self.specs[self.op.index[name]]
        assert spec is not None
        return spec if len(spec.shape) == 4 or name in _LSES else spec.as_4d()

    @property
    def outputs(self) -> Iterator[tuple[tuple[int, ...], str]]:
        """Shape and dtype of each result."""
        return ((spec.shape, spec.dtype) for spec in self.specs[len(self.op.inputs) :] if spec is not None)

    @property
    def lse_shape_4d(self) -> tuple[int, int, int]:
        """Shape of lse with all of its axes."""
        return self.batch, self.heads_q, self.seqlen_q

    @property
    def softmax_scale(self) -> float:
        """What products q kᵀ are multiplied by."""
        return self.options.scores.softmax_scale

    @property
    def out_dtype(self) -> str:
        """The dtype of out."""
        return self.options.out_dtype or self.dtype

    @property
    def ordinal(self) -> int | None:
        """Number of the GPU that the arrays are on; None for the CPU."""
        return int(self.device.removeprefix("cuda:")) if self.device.startswith("cuda:") else None

    @property
    def flops(self) -> int:
        """Multiplications and additions of the products over the visible pairs; one that is made twice counts once."""
        by_dim, by_dim_v = _PRODUCTS.get(self.op.name, (1, 1))
        pairs = self.batch * self.heads_q * self.mask.num_visible()
        return 2 * pairs * (by_dim * self.head_dim + by_dim_v * self.head_dim_v)


def _given(name: str, spec: ArraySpec | None) -> ArraySpec:
    if spec is None:
        raise ProblemError(f"{name} is None; give an array")
    return spec


def _check_rank(named: dict[str, ArraySpec]) -> None:
    """Judges the ranks of q, k and perhaps v, which must be alike."""
    rank = len(named["q"].shape)
    for name, spec in named.items():
        if not 2 <= len(spec.shape) <= 4:
            raise ProblemError(f"{name} has shape {spec.shape}, rank {len(spec.shape)}; give {LAYOUT}")
        if len(spec.shape) != rank:
            raise ProblemError(
                f"{name} has shape {spec.shape}, rank {len(spec.shape)}, but q has rank {rank}; "
                f"give all of {', '.join(named)} the same layout: {LAYOUT}"
            )


def _check_lengths(named: dict[str, ArraySpec]) -> None:
    """Judges the lengths of q, k and perhaps v against each other."""
    shapes = {name: spec.as_4d().shape for name, spec in named.items()}
    (batch, seqlen_q, heads_q, head_dim), (_, seqlen_k, heads_kv, head_dim_k) = shapes["q"], shapes["k"]
    for name, shape in shapes.items():
        if shape[0] != batch:
            raise ProblemError(f"{name} has batch {shape[0]}, but q has {batch}; give all the same batch")
    if head_dim_k != head_dim:
        raise ProblemError(f"k has head_dim {head_dim_k}, but q has {head_dim}; q and k must share head_dim")
    v = shapes.get("v", shapes["k"])
    if v[1:3] != (seqlen_k, heads_kv):
        raise ProblemError(
            f"v has seqlen {v[1]} and {v[2]} heads, but k has seqlen {seqlen_k} and {heads_kv} heads; k and v must "
            "share both"
        )
    if heads_q < 1 or heads_kv < 1 or head_dim < 1 or v[3] < 1:
        raise ProblemError(
            f"shapes {', '.join(f'{n} {s.shape}' for n, s in named.items())}: heads and head_dim must be at least 1 "
            "(batch and seqlen may be 0)"
        )
    if heads_q % heads_kv:
        raise ProblemError(
            f"q has {heads_q} heads and k has {heads_kv}; heads_q must be a multiple of heads_kv "
            "(query head h uses kv head h // (heads_q // heads_kv))"
        )
    if max(seqlen_q, seqlen_k) > MAX_SEQLEN:
        raise ProblemError(f"seqlen {max(seqlen_q, seqlen_k)} is over the limit of {MAX_SEQLEN}")


def _checked(
    op: Op, specs: Specs, lengths: Mapping[str, int], out_dtype: str, judged: int
) -> tuple[ArraySpec | None, ...]:
    """The specs of all operands, the first `judged` of which are judged already; dense where there are none yet."""
    q = _given("q", specs[0])
    missing, narrow = _MISSING[len(q.shape)], DTYPES[q.dtype].itemsize == 2
    dtypes = {
        "inputs": (q.dtype,),
        "lse": (DTYPES[q.dtype].accumulator,),
        "out": (out_dtype,),
        "any out": (q.dtype, "float32") if narrow else (q.dtype,),
    }
    checked: list[ArraySpec | None] = list(specs[:judged])
    for number, operand in enumerate(op.operands[judged:], judged):
        spec = specs[number]
        is_output = number >= len(op.inputs)
        if spec is not None or is_output or not operand.optional:
            shape = tuple([lengths[axis] for axis in operand.axes if axis not in missing])
            allowed = dtypes[operand.dtype]
            if spec is None:
                spec = ArraySpec.dense(shape, allowed[0], q.device, q.library)
            else:
                _check_operand(operand.name, spec, q, shape, allowed)
                if is_output:
                    _check_output(operand.name, spec)
        checked.append(spec)
    return tuple(checked)


def _check_operand(name: str, spec: ArraySpec, q: ArraySpec, shape: tuple[int, ...], dtypes: tuple[str, ...]) -> None:
    """Judges a further array of a call against the problem that q, k and v describe."""
    if spec.library != q.library or spec.device != q.device:
        raise ProblemError(f"{name} is a {spec}, but q is a {q.library} array on {q.device}; give both alike")
    if spec.shape != shape:
        raise ProblemError(f"{name} has shape {spec.shape}; this problem needs {shape}")
    if spec.dtype not in dtypes:
        raise ProblemError(f"{name} has dtype {spec.dtype}; this problem needs {' or '.join(dtypes)}")


def _check_output(name: str, spec: ArraySpec) -> None:
    """Judges an array that a call is to write to."""
    repeated = any(stride == 0 and length > 1 for length, stride in zip(spec.shape, spec.strides, strict=True))
    if repeated and 0 not in spec.shape:
        raise ProblemError(
            f"{name} has shape {spec.shape} and strides {spec.strides}: rows share memory; give a dense {name}"
        )


def check_alike(named: dict[str, ArraySpec]) -> None:
    """Judges library, device and dtype of operands, which must all be those of the first."""
    of, first = next(iter(named.items()))
    for name, spec in named.items():
        if spec.library != first.library:
            raise ProblemError(
                f"{name} is a {spec.library} array, but {of} is a {first.library} array; give all of one framework "
                "(convert with from_dlpack)"
            )
        if spec.device != first.device:
            raise ProblemError(f"{name} is on {spec.device}, but {of} is on {first.device}; move all to one device")
        check_dtype(name, spec.dtype)
        if spec.dtype != first.dtype:
            raise ProblemError(f"{name} has dtype {spec.dtype}, but {of} has {first.dtype}; cast all to one dtype")


class States(NamedTuple):
    """A legal call of `merge_states`. Lengths are those of 4-D outs."""

    op: Op
    batch: int
    seqlen_q: int
    heads_q: int
    head_dim_v: int
    dtype: str
    rank: int
    device: str
    library: str
    specs: tuple[ArraySpec | None, ...]
    flops: int = 0  # merging is no product
    options: Options = Options()

    @classmethod
    def of(cls, op: Op, specs: Specs, options: Options) -> States:
        """Judges the states of a call: outs, then as many lses."""
        count = len(op.inputs) // 2
        given = [_given(operand.name, spec) for operand, spec in zip(op.inputs, specs, strict=False)]
        outs, lses = given[:count], given[count:]
        check_alike({f"outs[{i}]": spec for i, spec in enumerate(outs)})
        shape = outs[0].shape
        if not 2 <= len(shape) <= 4:
            raise ProblemError(f"outs[0] has shape {shape}, rank {len(shape)}; give {LAYOUT}")
        b, s, h, d = outs[0].as_4d().shape
        if h < 1 or d < 1:
            raise ProblemError(f"outs[0] has shape {shape}; heads and head_dim must be at least 1 (others may be 0)")
        lse_shape = {4: (b, h, s), 3: (h, s), 2: (s,)}[len(shape)]
        lse_dtype = DTYPES[outs[0].dtype].accumulator
        for i, (out, lse) in enumerate(zip(outs, lses, strict=True)):
            if out.shape != shape:
                raise ProblemError(f"outs[{i}] has shape {out.shape}, but outs[0] has {shape}; give all the same shape")
            if (lse.shape, lse.dtype) != (lse_shape, lse_dtype):
                raise ProblemError(
                    f"lses[{i}] has shape {lse.shape} and dtype {lse.dtype}; outs of shape {shape} need {lse_shape} in "
                    f"{lse_dtype}"
                )
            if (lse.library, lse.device) != (out.library, out.device):
                raise ProblemError(f"lses[{i}] is a {lse}, but its out is a {out}; give both alike")
        return cls(op, b, s, h, d, outs[0].dtype, len(shape), outs[0].device, outs[0].library, tuple(given))

    @property
    def outputs(self) -> Iterator[tuple[tuple[int, ...], str]]:
        """Shape and dtype of out and lse: those of each state."""
        states = [self.specs[0], self.specs[len(self.specs) // 2]]
        return ((spec.shape, spec.dtype) for spec in states if spec is not None)

    @property
    def lse_shape_4d(self) -> tuple[int, int, int]:
        """Shape of an lse with all of its axes."""
        return self.batch, self.heads_q, self.seqlen_q

    def spec(self, name: str) -> ArraySpec:
        """The array of an operand as it is."""
        spec = self.specs[self.op.index[name]]
        assert spec is not None
        return spec

    @property
    def num_elements(self) -> int:
        """Elements of one out."""
        return math.prod((self.batch, self.seqlen_q, self.heads_q, self.head_dim_v))


def judge(op: Op, specs: Specs, options: Options) -> Problem | States:
    """The problem of a call: the specs of its operands in their order, and its keyword arguments as given."""
    return States.of(op, specs, options) if op.name == "merge" else Problem.of(op, specs, options)
