"""Dropout on a GPU: kernels drop the weights that NumPy drops, bit for bit, wherever a weight is computed.

With v that is a part of the identity, out is a part of the weights: what was dropped is 0, and all else is above it.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from libraries import torch_of
from mod_table import of_lengths
from plans import for_any_gpu

import cuflash
from cuflash.reference.dropout import SHARES, is_kept, share_kept
from cuflash.testing.cases import Case, numpy_dtype
from cuflash.testing.functions import FUNCTIONS, Arguments, Put, dropped, joined
from cuflash.testing.layouts import host, identical
from cuflash.testing.mod_oracle import OracleInputs, check, check_gradients
from cuflash.testing.mods import bounds_case, check_backward, check_forward, check_repeated, make_oracle_mods
from cuflash.testing.sequences import Sequences, upstream, varlen_arrays

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("new_memory_holds_nan")]
SEED = 2**40 + 7
LENGTHS = ((1, 1), (64, 64), (65, 129), (130, 300), (200, 127))
any_family = pytest.mark.parametrize("any_gpu", [False, True], ids=["", "any_gpu"])


def family(any_gpu: bool) -> AbstractContextManager[None]:
    return for_any_gpu() if any_gpu else nullcontext()


def weights(case: Case, put: Put, **more: Any) -> Any:
    """The weights (batch, heads_q, seqlen_q, seqlen_k) after dropout, from calls with parts of the identity for v."""
    q, k, _ = case.arrays()
    q, k = (put((x.astype("f4") / 4).astype(x.dtype)) for x in (q, k))
    step, parts = case.head_dim_v, []
    for begin in range(0, case.seqlen_k, step):
        v = np.zeros(case.shapes()[2], numpy_dtype(case.dtype))
        keys = np.arange(begin, min(begin + step, case.seqlen_k))
        v[:, keys, :, keys - begin] = 1
        out = cuflash.forward(q, k, put(v), **case.arguments(), **more)
        parts.append(host(out).astype("f4")[..., : len(keys)])
    return np.concatenate(parts, axis=3).swapaxes(1, 2)


def keep_mask(case: Case, seed: int = SEED, dropout_p: float = 0.3) -> Any:
    return is_kept(seed, dropout_p, *np.ogrid[: case.batch, : case.heads_q, : case.seqlen_q, : case.seqlen_k])


@any_family
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_the_weights_that_stay_are_those_of_numpy(cupy: Any, dtype: str, any_gpu: bool) -> None:
    with family(any_gpu):
        for lengths in LENGTHS:
            case = of_lengths(lengths, dtype=dtype)
            result = weights(case, cupy.asarray, dropout_p=0.3, dropout_seed=SEED)
            np.testing.assert_array_equal(result != 0, keep_mask(case))
        # Of the last ones, what stays is what would be there, over the exact share.
        plain = weights(case, cupy.asarray)
        tolerance = {"float16": 2.0**-9, "bfloat16": 2.0**-6, "float32": 2.0**-18}[dtype]
        expected = np.where(keep_mask(case), plain * (SHARES / share_kept(0.3)), 0)
        np.testing.assert_allclose(result, expected, rtol=tolerance, atol=1e-7)


def test_each_head_dim_and_algorithm_drops_the_same(cupy: Any) -> None:
    case = of_lengths((130, 200))
    for algorithm in ("flash1", "flashd"):
        result = weights(case, cupy.asarray, dropout_p=0.3, dropout_seed=SEED, algorithm=algorithm)
        np.testing.assert_array_equal(result != 0, keep_mask(case))
    for dim in (128, 256):
        wide = replace(case, head_dim=dim, head_dim_v=dim)
        result = weights(wide, cupy.asarray, dropout_p=0.3, dropout_seed=SEED)
        np.testing.assert_array_equal(result != 0, keep_mask(wide))


def test_few_queries_over_many_keys_drop_the_same_however_keys_are_shared_out(cupy: Any) -> None:
    case = of_lengths((2, 1000), heads_q=8, heads_kv=1)
    for splits in (1, 4, 0):
        result = weights(case, cupy.asarray, dropout_p=0.3, dropout_seed=SEED, num_splits=splits)
        np.testing.assert_array_equal(result != 0, keep_mask(case))


def test_a_seed_may_be_given_in_many_ways(cupy: Any) -> None:
    case = of_lengths((70, 90))
    words = np.array([SEED & 0xFFFFFFFF, SEED >> 32], np.uint32)
    seeds = [SEED, np.array(SEED, np.int64), np.array([SEED], np.uint64), words, words.view(np.int32)]
    for seed in seeds:
        argument = seed if isinstance(seed, int) else cupy.asarray(seed)
        result = weights(case, cupy.asarray, dropout_p=0.3, dropout_seed=argument)
        np.testing.assert_array_equal(result != 0, keep_mask(case))
    for seed in (0, -1, 2**64 - 1, 2**63):
        result = weights(case, cupy.asarray, dropout_p=0.3, dropout_seed=seed)
        np.testing.assert_array_equal(result != 0, keep_mask(case, seed))


def test_any_share_may_be_dropped_by_one_kernel(cupy: Any) -> None:
    case = of_lengths((200, 300))
    for dropout_p in (1e-9, 1e-4, 0.1, 0.5, 0.9, 0.999, 0.99999):
        result = weights(case, cupy.asarray, dropout_p=dropout_p, dropout_seed=SEED)
        np.testing.assert_array_equal(result != 0, keep_mask(case, SEED, dropout_p))
    arrays = [cupy.asarray(x) for x in case.arrays()]
    none = cuflash.forward(*arrays, dropout_p=0.0, dropout_seed=SEED, return_lse=True)
    assert identical(none, cuflash.forward(*arrays, return_lse=True))


def test_lse_knows_nothing_of_it(cupy: Any) -> None:
    for lengths in LENGTHS:
        check_forward(dropped, of_lengths(lengths, causal=True), cupy.asarray)


# Packed calls and backward.

PACKED = Sequences("dropped", (130, 0, 63, 1), (65, 5, 200, 64), bounded=True, used_k=True, spare_k=(1, 70, 4, 0))


@any_family
def test_sequences_of_several_lengths_drop_by_their_own_numbers(cupy: Any, any_gpu: bool) -> None:
    inputs = varlen_arrays(PACKED)
    dim, most = PACKED.dims[1], max(PACKED.keys)
    parts = []
    with family(any_gpu):
        for begin in range(0, most, dim):
            v = np.zeros_like(inputs.v)
            for rows in inputs.keys:
                keys = np.arange(begin, max(begin, min(begin + dim, len(rows[0]))))
                v[rows[0][keys], rows[1][keys], :, keys - begin] = 1
            q, k = ((x.astype("f4") / 4).astype("f2") for x in (inputs.q, inputs.k))
            arguments = inputs._replace(q=q, k=k, v=v).arguments(cupy)
            parts.append(host(cuflash.forward(**arguments, dropout_p=0.3, dropout_seed=SEED))[None])
    result = np.concatenate(parts, axis=3)
    for number, (rows, n) in enumerate(zip(inputs.queries, PACKED.keys, strict=True)):
        stay = is_kept(SEED, 0.3, number, *np.ogrid[: PACKED.heads[0], : len(rows[0]), :n])
        np.testing.assert_array_equal(result[rows].swapaxes(0, 1)[..., :n] != 0, stay)


@any_family
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_backward_drops_the_same(cupy: Any, dtype: str, any_gpu: bool) -> None:
    with family(any_gpu):
        for lengths in LENGTHS:
            check_backward(dropped, of_lengths(lengths, dtype=dtype, causal=lengths[0] > 64), cupy.asarray)


@any_family
def test_deterministic_backward_drops_the_same_and_is_bitwise_repeatable(cupy: Any, any_gpu: bool) -> None:
    with family(any_gpu):
        for lengths in LENGTHS:
            check_repeated(dropped, of_lengths(lengths), cupy.asarray)


def test_dropout_goes_with_all_of_it(cupy: Any) -> None:
    make = joined(FUNCTIONS["everything"], dropped)
    for lengths in ((130, 300), (257, 129)):
        case = of_lengths(lengths, softcap=3.0, window_size=(90, 40), diagonal_offset=20)
        check_forward(make, case, cupy.asarray)
        check_backward(make, case, cupy.asarray, grads=True)


@pytest.mark.parametrize("dim", [128, 256])
def test_backward_of_larger_head_dims(cupy: Any, dim: int) -> None:
    for lengths in ((65, 129), (200, 127)):
        case = of_lengths(lengths, head_dim=dim, head_dim_v=dim, dtype="bfloat16")
        check_forward(dropped, case, cupy.asarray)
        check_backward(dropped, case, cupy.asarray)


@pytest.mark.parametrize("scores", ["plain", "alibi"])
@pytest.mark.parametrize("dim", [64, 128, 256])
def test_rows_that_leave_the_main_loop_drop_the_same(cupy: Any, dim: int, scores: str) -> None:
    # why such a scale: rows leave where their weights leave the range, which must not count weights that were dropped.
    case = of_lengths((200, 700), head_dim=dim, head_dim_v=dim, dtype="bfloat16", causal=True, softmax_scale=1.0)
    check_forward(dropped if scores == "plain" else joined(FUNCTIONS[scores], dropped), case, cupy.asarray)


# Hopper's backward numbers rows from the first that sees a key, or that is seen: here from any one on.
SHIFTED = replace(PACKED, causal=True, window_size=(20, -1))


@any_family
@pytest.mark.parametrize("dims", [(64, 64), (192, 128)], ids=str)
@pytest.mark.parametrize("case", [PACKED, SHIFTED], ids=["packed", "shifted"])
def test_backward_of_sequences_of_several_lengths(
    cupy: Any, case: Sequences, dims: tuple[int, int], any_gpu: bool
) -> None:
    inputs = varlen_arrays(replace(case, dims=dims, dtype="bfloat16" if dims[0] > 64 else "float16"))
    arguments, mod_kwargs = inputs.arguments(cupy), dropped(cupy.asarray, bounds_case(inputs))
    whole, of_numpy = OracleInputs.from_varlen(inputs), make_oracle_mods(dropped, bounds_case(inputs))
    dout, dlse = (cupy.asarray(x) for x in upstream(inputs))
    with family(any_gpu):
        out, lse = cuflash.forward(**arguments, return_lse=True, **mod_kwargs)
        check(whole, of_numpy, out, lse)
        state: Arguments = {"out": out, "lse": lse, "dlse": dlse.reshape(lse.shape)}
        for deterministic in (False, True):
            state["deterministic"] = deterministic
            gradients = cuflash.backward(dout.reshape(out.shape), **state, **arguments, **mod_kwargs)
            check_gradients(whole, of_numpy, *upstream(inputs), gradients)


def test_a_graph_that_is_replayed_reads_the_seed_anew(cupy: Any) -> None:
    case = of_lengths((130, 200))
    q, k, v = (cupy.asarray((x.astype("f4") / 4).astype("f2")) for x in case.arrays())
    dout = cupy.asarray(np.random.default_rng(3).standard_normal(case.out_shape()).astype("f2"))
    seed, out = cupy.array(5, "int64"), cupy.zeros(case.out_shape(), "float16")
    mod_kwargs, stream = {"dropout_p": 0.3, "dropout_seed": seed}, cupy.cuda.Stream(non_blocking=True)
    cupy.cuda.Device().synchronize()
    with stream:
        for _ in range(2):
            _, lse = cuflash.forward(q, k, v, out=out, return_lse=True, **mod_kwargs)
            cuflash.backward(dout, q, k, v, out, lse, deterministic=True, **mod_kwargs)
        stream.begin_capture()
        _, lse = cuflash.forward(q, k, v, out=out, return_lse=True, **mod_kwargs)
        gradients = cuflash.backward(dout, q, k, v, out, lse, deterministic=True, **mod_kwargs)
        graph = stream.end_capture()
        for number in (5, 6, SEED):
            seed.fill(number)
            graph.launch()
            stream.synchronize()
            replayed = [x.copy() for x in (out, *gradients)]
            again = cuflash.forward(q, k, v, return_lse=True, dropout_p=0.3, dropout_seed=number)
            more = {"deterministic": True, "dropout_p": 0.3, "dropout_seed": number}
            expected = again[0], *cuflash.backward(dout, q, k, v, *again, **more)
            assert identical(replayed, expected)


def test_tensors_of_torch_take_a_tensor_for_the_seed(cupy: Any) -> None:
    torch = pytest.importorskip("torch")
    case = of_lengths((70, 90))
    seed = torch.tensor(SEED, device="cuda")
    q, k, v = (torch_of(x, "cuda") for x in case.arrays())
    out, lse = cuflash.forward(q, k, v, return_lse=True, dropout_p=0.3, dropout_seed=seed)
    outputs = out.cpu().numpy(), lse.cpu().numpy()
    check(OracleInputs.dense(case, case.arrays()), make_oracle_mods(dropped, case), *outputs)
