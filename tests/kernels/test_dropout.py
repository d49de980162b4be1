"""Dropout on a GPU: all kernels drop the same weights as NumPy.

With columns of the identity as v, out has columns of the weights: dropped ones are 0, and all others are above 0.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from libraries import recorded, torch_of
from mod_table import of_lengths

import cuflash
from cuflash.reference.dropout import SHARES, is_kept, share_kept
from cuflash.testing.cases import Case, numpy_dtype
from cuflash.testing.functions import FUNCTIONS, Put, dropped, joined
from cuflash.testing.layouts import host, identical
from cuflash.testing.mod_oracle import OracleInputs, check
from cuflash.testing.mods import check_backward, check_forward, check_of_lengths, check_repeated, make_oracle_mods
from cuflash.testing.sequences import Sequences, varlen_arrays

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("new_memory_holds_nan")]
SEED = 2**40 + 7
LENGTHS = ((1, 1), (64, 64), (65, 129), (130, 300), (200, 127))


def weights(case: Case, put: Put, **more: Any) -> Any:
    """Returns weights (batch, heads_q, seqlen_q, seqlen_k) after dropout, by calls with v from the identity."""
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


def check_weights(cupy: Any, case: Case, seed: Any = SEED, dropout_p: float = 0.3, **more: Any) -> Any:
    """Compares the dropped weights with NumPy's, and returns the weights. seed: an integer, or an array with SEED."""
    result = weights(case, cupy.asarray, dropout_p=dropout_p, dropout_seed=seed, **more)
    number = seed if isinstance(seed, int) else SEED
    keep = is_kept(number, dropout_p, *np.ogrid[: case.batch, : case.heads_q, : case.seqlen_q, : case.seqlen_k])
    np.testing.assert_array_equal(result != 0, keep)
    return result


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_the_weights_that_stay_are_those_of_numpy(cupy: Any, dtype: str, any_gpu: bool) -> None:
    for lengths in LENGTHS:
        case = of_lengths(lengths, dtype=dtype)
        result = check_weights(cupy, case)
    # In the last case, kept weights are weights without dropout, divided by the exact kept fraction.
    plain = weights(case, cupy.asarray)
    tolerance = {"float16": 2.0**-9, "bfloat16": 2.0**-6, "float32": 2.0**-18}[dtype]
    expected = np.where(result != 0, plain * (SHARES / share_kept(0.3)), 0)
    np.testing.assert_allclose(result, expected, rtol=tolerance, atol=1e-7)


def test_each_head_dim_and_algorithm_drops_the_same(cupy: Any) -> None:
    case = of_lengths((130, 200))
    for algorithm in ("flash1", "flashd"):
        check_weights(cupy, case, algorithm=algorithm)
    for dim in (128, 256):
        check_weights(cupy, replace(case, head_dim=dim, head_dim_v=dim))


def test_few_queries_over_many_keys_drop_the_same_for_any_splits(cupy: Any) -> None:
    for splits in (1, 4, 0):
        check_weights(cupy, of_lengths((2, 1000), heads_q=8, heads_kv=1), num_splits=splits)


def test_a_seed_may_be_given_in_many_ways(cupy: Any) -> None:
    case = of_lengths((70, 90))
    words = np.array([SEED & 0xFFFFFFFF, SEED >> 32], np.uint32)
    for seed in (np.array(SEED, np.int64), np.array([SEED], np.uint64), words, words.view(np.int32)):
        check_weights(cupy, case, cupy.asarray(seed))
    for number in (SEED, 0, -1, 2**64 - 1, 2**63):
        check_weights(cupy, case, number)


def test_any_share_may_be_dropped_by_one_kernel(cupy: Any) -> None:
    case = of_lengths((200, 300))
    for dropout_p in (1e-9, 1e-4, 0.1, 0.5, 0.9, 0.999, 0.99999):
        check_weights(cupy, case, dropout_p=dropout_p)
    arrays = [cupy.asarray(x) for x in case.arrays()]
    none = cuflash.forward(*arrays, dropout_p=0.0, dropout_seed=SEED, return_lse=True)
    assert identical(none, cuflash.forward(*arrays, return_lse=True))


def test_lse_knows_nothing_of_it(cupy: Any) -> None:
    for lengths in LENGTHS:
        check_forward(dropped, of_lengths(lengths, causal=True), cupy.asarray)


# Packed calls and backward.

PACKED = Sequences("dropped", (130, 0, 63, 1), (65, 5, 200, 64), bounded=True, used_k=True, spare_k=(1, 70, 4, 0))


def test_varlen_sequences_drop_by_their_own_numbers(cupy: Any, any_gpu: bool) -> None:
    inputs = varlen_arrays(PACKED)
    dim, most = PACKED.dims[1], max(PACKED.keys)
    parts = []
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


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_backward_drops_the_same(cupy: Any, dtype: str, any_gpu: bool) -> None:
    for lengths in LENGTHS:
        check_backward(dropped, of_lengths(lengths, dtype=dtype, causal=lengths[0] > 64), cupy.asarray)


def test_deterministic_backward_drops_the_same_and_is_bitwise_repeatable(cupy: Any, any_gpu: bool) -> None:
    for lengths in LENGTHS:
        check_repeated(dropped, of_lengths(lengths), cupy.asarray)


@pytest.mark.slow(50)
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
    # With this scale rows leave the main loop: their weights leave the range, in which dropped weights must not count.
    case = of_lengths((200, 700), head_dim=dim, head_dim_v=dim, dtype="bfloat16", causal=True, softmax_scale=1.0)
    check_forward(dropped if scores == "plain" else joined(FUNCTIONS[scores], dropped), case, cupy.asarray)


# Sm90 backward numbers rows from the first visible one, which may be any row here.
SHIFTED = replace(PACKED, causal=True, window_size=(20, -1))


@pytest.mark.parametrize("dims", [(64, 64), (192, 128)], ids=str)
@pytest.mark.parametrize("case", [PACKED, SHIFTED], ids=["packed", "shifted"])
def test_backward_of_variable_length_sequences(
    cupy: Any, case: Sequences, dims: tuple[int, int], any_gpu: bool
) -> None:
    dtype = "bfloat16" if dims[0] > 64 else "float16"
    check_of_lengths(dropped, varlen_arrays(replace(case, dims=dims, dtype=dtype)), cupy)


def test_a_graph_that_is_replayed_reads_the_seed_anew(cupy: Any) -> None:
    case = of_lengths((130, 200))
    q, k, v = (cupy.asarray((x.astype("f4") / 4).astype("f2")) for x in case.arrays())
    dout = cupy.asarray(np.random.default_rng(3).standard_normal(case.out_shape()).astype("f2"))
    seed, out = cupy.array(5, "int64"), cupy.zeros(case.out_shape(), "float16")
    mod_kwargs, stream = {"dropout_p": 0.3, "dropout_seed": seed}, cupy.cuda.Stream(non_blocking=True)
    cupy.cuda.Device().synchronize()

    def both() -> Any:
        _, lse = cuflash.forward(q, k, v, out=out, return_lse=True, **mod_kwargs)
        return cuflash.backward(dout, q, k, v, out, lse, deterministic=True, **mod_kwargs)

    with stream:
        graph, gradients = recorded(stream, both)
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
