"""`cuflash.plan`: the plan of a call, which does not run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..arrays.find import library_of
from ..arrays.library import GpuLibrary
from ..errors import ProblemError, UnsupportedError
from ..mods.tracing.operand import is_integer
from ..planning import device as devices
from ..planning.device import Device
from ..planning.plan import Plan
from ..planning.planner import plan as make_plan
from ..problem.array_spec import ArraySpec
from ..problem.checks import check_output
from ..problem.dtypes import check_dtype, named_dtype
from ..problem.foreign import answers_foreign
from ..problem.mod_arrays import check_mod_array
from ..problem.operands import DROPOUT_SEED, INTEGERS, OPS, VARLEN_OPS, VarlenArgs, summing
from ..problem.options import (
    Algorithm,
    DtypeLike,
    OpName,
    OutDtype,
    WindowSize,
    check_algorithm,
    check_flag,
    check_integer,
    is_zero,
    options_key,
)
from ..problem.problem import Problem
from .dropout_seed import seed_number
from .mods import ModArgs, Shaped, resolve_mods

SHAPES = (tuple, list)  # types of shapes, which may stand for arrays


@answers_foreign
def plan(
    q: Any,
    k: Any,
    v: Any = None,
    *,
    op: OpName = "forward",
    deterministic: bool = False,
    device: str | None = None,
    dtype: DtypeLike | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: WindowSize = (-1, -1),
    diagonal_offset: int | None = None,
    softcap: float = 0.0,
    algorithm: Algorithm = "flash2",
    out: Any = None,
    out_dtype: OutDtype | None = None,
    accumulate: bool = False,
    cu_seqlens_q: Any = None,
    cu_seqlens_k: Any = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    seqused_q: Any = None,
    seqused_k: Any = None,
    page_table: Any = None,
    cache_batch_idx: Any = None,
    num_splits: int = 0,
    split_size: int | None = None,
    sm_margin: int = 0,
    score_mod: Any = None,
    mask_mod: Any = None,
    block_mask: Any = None,
    bias: Any = None,
    sinks: Any = None,
    dropout_p: float = 0.0,
    dropout_seed: Any = None,
    captured_grads: Sequence[Any] | None = None,
) -> Plan:
    """Returns the plan of a call: its kernels, tiles, grids and memory.

    Nothing runs. A plan can be printed, compared, pickled and copied. Shapes may stand for arrays, and the name of an
    architecture for a GPU.

    Parameters
    ----------
    q : array, or shape (batch, seqlen_q, heads_q, head_dim)
        Queries. Strides and alignment of an array count, as in `forward`. A shape is a tuple or list, needs dtype,
        and stands for a dense, aligned array.
    k : array, or shape (batch, seqlen_k, heads_kv, head_dim)
        Keys.
    v : array, or shape (batch, seqlen_k, heads_kv, head_dim_v)
        Values. Leave it out for op="lse".
    op : {"forward", "lse", "backward"}, default "forward"
        Name of the call.
    deterministic : bool, default False
        True plans bitwise repeatable gradients. Only for op="backward".
    device : str, optional
        "cpu", "cuda:0", or an architecture such as "sm_90", which needs no GPU. The default is the device of the
        arrays. For shapes it is the first GPU, or the CPU if there is none.
    dtype : str or dtype object, optional
        Dtype of q, only with shapes: "float16", "bfloat16", "float32", "float64", or an object such as numpy.float16.
    softmax_scale : float, default 1/sqrt(head_dim)
        Factor of the scores.
    causal : bool, default False
        Hides later keys.
    window_size : tuple (left, right), default (-1, -1)
        Numbers of keys that are visible left and right of the diagonal; -1 or None is open.
    diagonal_offset : int, default seqlen_k - seqlen_q
        Key index of the diagonal at query 0.
    softcap : float, default 0.0
        A cap c > 0 turns scores into c·tanh(score / c); 0 is no cap.
    algorithm : {"flash2", "flash1", "flashd", "standard"}, default "flash2"
        Algorithm. Only for op="forward".
    out : array, or shape (batch, seqlen_q, heads_q, head_dim_v), optional
        Array to write the result to. Only for op="forward".
    out_dtype : "float32" or dtype object, optional
        Dtype of out. Only for op="forward".
    accumulate : bool, default False
        True plans a call that adds to float32 arrays. Not for op="lse".
    cu_seqlens_q : int32 array, or shape (batch + 1,), optional
        Offsets of packed queries.
    cu_seqlens_k : int32 array, or shape (batch + 1,), optional
        Offsets of packed keys and values.
    max_seqlen_q : int, optional
        Upper bound of the queries of a variable-length sequence.
    max_seqlen_k : int, optional
        Upper bound of the keys of a variable-length sequence.
    seqused_q : int32 array, or shape (batch,), optional
        Number of used queries of each sequence.
    seqused_k : int32 array, or shape (batch,), optional
        Number of used keys of each sequence.
    page_table : int32 array, or shape (batch, max_pages), optional
        Pages of each sequence. Not for op="backward".
    cache_batch_idx : int32 array, or shape (batch,), optional
        Row of k and v that holds the keys of each sequence. Not for op="backward".
    num_splits : int, default 0
        Upper bound of the thread blocks that share the keys of a query; 0 chooses. Not for op="backward".
    split_size : int, optional
        Switch for equal bits in every layout. Not for op="backward".
    sm_margin : int, default 0
        Number of SMs that the kernels leave to others.
    score_mod : callable (score, b, h, q_idx, k_idx), optional
        Returns the score that replaces the scaled and capped one. It refers to arrays, as in calls.
    mask_mod : callable (b, h, q_idx, k_idx), optional
        Returns True for visible keys. It refers to arrays, as in calls.
    block_mask : BlockMask, optional
        Tiles of a mask, together with its mask_mod, from `create_block_mask`.
    bias : array, or shape broadcastable to (batch, heads_q, seqlen_q, seqlen_k), optional
        Floats to add to the scores, or bools: True is visible.
    sinks : array, or shape (heads_q,), optional
        One more logit of each head, without a value.
    dropout_p : float, default 0.0
        Fraction of weights to drop, in [0, 1). Not for op="lse".
    dropout_seed : int or array, optional
        Seed of dropout. It may be left out.
    captured_grads : tuple of arrays or shapes, optional
        Arrays whose gradients are returned; shapes stand for the bias and the sinks. Only for op="backward".

    Returns
    -------
    plan : Plan
        A frozen value whose fields hold what its text shows.

    Raises
    ------
    ProblemError, UnsupportedError
        As in the call.

    Notes
    -----
    Every argument that `forward` or `backward` has, too, has the meaning and the limits described there.

    Examples
    --------
    A causal forward on Hopper, by shapes.

    >>> import cuflash
    >>> q, kv = (1, 4096, 32, 128), (1, 4096, 8, 128)
    >>> cuflash.plan(q, kv, kv, dtype="bfloat16", causal=True, device="sm_90")
    problem    forward of bfloat16
    lengths    batch 1, seqlen_q 4096, seqlen_k 4096, heads_q 32, heads_kv 8, head_dim 128, head_dim_v 128
    kernel     forward_sm90_bf16_d128_q128_k128_s5
    device     H100
    tile       128 queries x 128 keys, head dims padded to (128, 128), 5 stages, 12 warps
    launch     132 blocks of 384 threads, 225 KiB of shared memory each
    memory     out 32 MiB, lse 512 KiB, workspace 0 B
    work       137 GFLOP
    """
    if not isinstance(op, str) or op not in OPS:
        raise ProblemError(f"op={op!r} is not known; give one of {', '.join(OPS)}")
    if op == "lse" and v is not None:
        raise ProblemError("op='lse' takes q and k alone; leave v=None")
    if op != "forward" and (check_algorithm(algorithm) != "flash2" or out_dtype is not None or out is not None):
        raise ProblemError(f"op={op!r} takes neither algorithm nor out nor out_dtype; leave them out")
    if op == "backward" and (check_integer("num_splits", num_splits) != 0 or split_size is not None):
        raise ProblemError("op='backward' takes neither num_splits nor split_size; leave them out")
    if check_flag("deterministic", deterministic) and op != "backward":
        raise ProblemError(f"deterministic={deterministic!r}, op={op!r}; give True or False, True only for backward")
    if op == "lse" and not is_zero(dropout_p):
        raise ProblemError(f"op='lse' takes no dropout, but dropout_p={dropout_p}; leave it out")
    if check_flag("accumulate", accumulate) and op == "lse":
        raise ProblemError("op='lse' takes no accumulate; leave it out")
    if op != "backward" and captured_grads is not None:
        raise ProblemError(f"op={op!r} takes no captured_grads; leave it out")
    q_dtype = None if dtype is None else check_dtype("q", named_dtype(dtype))
    options = options_key(
        softmax_scale=softmax_scale,
        causal=causal,
        window_size=window_size,
        diagonal_offset=diagonal_offset,
        softcap=softcap,
        algorithm=algorithm,
        out_dtype=out_dtype,
        deterministic=deterministic,
        max_seqlen_q=max_seqlen_q,
        max_seqlen_k=max_seqlen_k,
        num_splits=num_splits,
        split_size=split_size,
        sm_margin=sm_margin,
        dropout_p=dropout_p,
    ).options
    varlen_args = VarlenArgs(cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k, page_table, cache_batch_idx)
    varlen_kwargs = varlen_args._asdict()
    operands = {"q": q, "k": k} | ({} if op == "lse" else {"v": v})
    operands |= {name: operand for name, operand in (varlen_kwargs | {"out": out}).items() if operand is not None}
    dtypes = dict.fromkeys(varlen_kwargs, INTEGERS) if q_dtype else {}
    pairs = {name: _spec(name, operand, dtypes.get(name, q_dtype)) for name, operand in operands.items()}
    specs = {name: spec for name, (spec, _) in pairs.items()}
    misaligned = [name for name, (_, is_aligned) in pairs.items() if not is_aligned]
    is_dense = varlen_kwargs.keys().isdisjoint(operands)
    whole = OPS[op] if is_dense else VARLEN_OPS[op]
    whole = summing(whole, True) if accumulate else whole
    if unknown := operands.keys() - set(whole.names):
        raise UnsupportedError(f"op={op!r} takes no {', '.join(sorted(unknown))}; leave it out")
    is_plain = score_mod is mask_mod is block_mask is bias is sinks is captured_grads is dropout_seed is None
    if not (is_plain and is_zero(dropout_p)):
        of_sequences = () if is_dense else tuple(varlen_kwargs.values())
        shaped = {
            name: Shaped(_shape(name, x), q_dtype)
            for name, x in (("bias", bias), ("sinks", sinks))
            if q_dtype is not None and isinstance(x, SHAPES)
        }
        bias, sinks = shaped.get("bias", bias), shaped.get("sinks", sinks)
        captured_grads = _of_shapes(captured_grads, shaped)
        mod_args = ModArgs(score_mod, mask_mod, block_mask, bias, sinks, dropout_p)
        call = resolve_mods(whole, mod_args, of_sequences, options, captured_grads)
        is_array = dropout_seed is not None and seed_number(dropout_seed) is None
        seed = dropout_seed if is_array else Shaped((), "int64")
        if not call.needs_seed:
            check_mod_array(DROPOUT_SEED, _spec_like("dropout_seed", seed, specs["q"], q_dtype), specs["q"], {})
        for operand, x in zip(call.op.inputs[len(whole.inputs) :], call.inputs_with(seed), strict=True):
            specs[operand.name] = _spec_like(operand.name, x, specs["q"], q_dtype)
        whole = call.op
    problem = Problem.from_specs(whole, [specs.get(name) for name in whole.names], options)
    return make_plan(problem, _device(device, problem, isinstance(q, SHAPES)), misaligned)


def _spec(name: str, operand: Any, dtype: str | None) -> tuple[ArraySpec, bool]:
    """Returns an array as the kernels read it, and True if it is aligned. A strided last dimension is copied first."""
    if not isinstance(operand, SHAPES):
        library = library_of(name, operand)
        spec = library.spec(name, operand)
        if dtype is not None:
            raise ProblemError(f"dtype={dtype!r} goes with shapes; {name} is an array and has its own")
        if name == "out":
            check_output(name, spec)  # the copy below hides its strides
        if spec.last_dim_strided:
            return spec.with_packed_strides(), True
        if not library.on_gpu(operand):
            return spec, True
        if isinstance(library, GpuLibrary):
            return spec, library.pointers([operand])[0] % 16 == 0
        return spec, library.to_cupy(operand).data.ptr % 16 == 0
    if dtype is None:
        raise ProblemError(f"{name} is the shape {operand}; give dtype= too, such as dtype='bfloat16'")
    return ArraySpec.contiguous(_shape(name, operand), dtype), True


def _shape(name: str, lengths: Any) -> tuple[int, ...]:
    """Returns a shape given in place of an array, as ints: products of NumPy's integers would overflow."""
    if not all(is_integer(x) and int(x) >= 0 for x in lengths):
        raise ProblemError(f"{name} has shape {lengths}; give lengths that are integers of 0 and more")
    return tuple(map(int, lengths))


def _of_shapes(captured_grads: Any, shaped: dict[str, Shaped]) -> Any:
    """Returns captured_grads with stand-ins of the bias and the sinks in place of their shapes, each once."""
    if not isinstance(captured_grads, SHAPES):
        return captured_grads
    rest, arrays = list(shaped.values()), []
    for x in captured_grads:
        same = [each for each in rest if isinstance(x, SHAPES) and each.shape == tuple(x)]
        arrays.append(same[0] if same else x)
        rest = [each for each in rest if each is not arrays[-1]]
    return arrays


def _spec_like(name: str, x: Any, q: ArraySpec, dtype: str | None) -> ArraySpec:
    """Returns the spec of a captured array. Beside shapes it takes their framework and device."""
    if isinstance(x, Shaped):
        return ArraySpec.contiguous(x.shape, x.dtype, q.device, q.library)
    spec = library_of(name, x).spec(name, x)
    return spec if dtype is None else spec._replace(device=q.device, library=q.library)


def _device(device: str | None, problem: Problem, shapes_only: bool) -> Device | None:
    if device is None:
        device = problem.device
        if shapes_only and devices.count():
            device = "cuda:0"
    return None if isinstance(device, str) and device == "cpu" else devices.of_name(device)
