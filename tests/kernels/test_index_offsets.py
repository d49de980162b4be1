"""Index offsets on a GPU: a call on slices is the part of one call on the whole."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from mod_table import of_lengths

import cuflash
from cuflash.reference.dropout import is_kept
from cuflash.testing.cases import Case, numpy_dtype
from cuflash.testing.layouts import host

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("new_memory_holds_nan")]
SEED = 2**40 + 7
# Offsets of query, key, head and sequence: keys at a multiple of 32, of 8 and of 2, and at odd ones.
OFFSETS = ((0, 0, 5, 0), (7, 64, 0, 3), (0, 40, 1, 0), (2**29, 2**29 + 6, 0, 1), (3, 77, 1, 1), (0, 31))
SLOPES = np.linspace(0.01, 0.5, 8, dtype=np.float32)
TABLE = np.random.default_rng(0).standard_normal((8, 700)).astype(np.float32)


def check_weights(cupy: Any, case: Case, index_offsets: tuple[int, ...], **more: Any) -> None:
    """Compares the dropped weights with NumPy's, by calls with v from the identity: dropped weights are 0 in out."""
    q, k, _ = case.arrays()
    q, k = (cupy.asarray((x.astype("f4") / 4).astype(x.dtype)) for x in (q, k))
    call = case.arguments() | {"dropout_p": 0.3, "dropout_seed": SEED, "index_offsets": index_offsets} | more
    b, h, i, j = np.ogrid[: case.batch, : case.heads_q, : case.seqlen_q, : case.seqlen_k]
    query, key, head, sequence = (*index_offsets, 0, 0)[:4]
    keep = is_kept(SEED, 0.3, b + sequence, h + head, i + query, j + key)
    for begin in range(0, case.seqlen_k, case.head_dim_v):
        v = np.zeros(case.shapes()[2], numpy_dtype(case.dtype))
        keys = np.arange(begin, min(begin + case.head_dim_v, case.seqlen_k))
        v[:, keys, :, keys - begin] = 1
        out = host(cuflash.forward(q, k, cupy.asarray(v), **call)).swapaxes(1, 2)[..., : len(keys)]
        np.testing.assert_array_equal(out != 0, keep[..., keys])


@pytest.mark.parametrize("index_offsets", OFFSETS)
@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_forward_drops_the_weights_of_the_larger_call(
    cupy: Any, dtype: str, index_offsets: tuple[int, ...], any_gpu: bool
) -> None:
    for lengths in ((65, 129), (130, 300)):
        check_weights(cupy, of_lengths(lengths, dtype=dtype), index_offsets)


@pytest.mark.parametrize("index_offsets", OFFSETS[1::3])
def test_each_head_dim_and_few_queries_drop_the_same(cupy: Any, index_offsets: tuple[int, ...]) -> None:
    for dim in (128, 256):
        check_weights(cupy, replace(of_lengths((130, 200)), head_dim=dim, head_dim_v=dim), index_offsets)
    check_weights(cupy, of_lengths((2, 1000), heads_q=8, heads_kv=1), index_offsets)
    lengths = {"seqused_k": cupy.full(of_lengths((70, 90)).batch, 90, "int32")}
    check_weights(cupy, of_lengths((70, 90)), index_offsets, **lengths)


def functions(cupy: Any) -> dict[str, dict[str, Any]]:
    """Returns calls with arrays on the GPU, by name."""
    slopes, table = cupy.asarray(SLOPES), cupy.asarray(TABLE)

    def score_mod(score: Any, b: Any, h: Any, q_idx: Any, k_idx: Any) -> Any:
        return score - slopes[h] * abs(q_idx - k_idx) + table[h, k_idx]

    def mask_mod(b: Any, h: Any, q_idx: Any, k_idx: Any) -> Any:
        return (q_idx // 40 + b) % 3 != k_idx // 50 % 3

    score = {"score_mod": score_mod, "captured_grads": (slopes, table)}
    dropout = {"dropout_p": 0.3, "dropout_seed": SEED}
    window = {"mask_mod": lambda b, h, q_idx, k_idx: (k_idx <= q_idx + 200) & (q_idx - k_idx < 90)}
    return {
        "dropout": dropout, "score_mod": score, "mask_mod": {"mask_mod": mask_mod}, "band": window,
        "all": score | dropout | {"mask_mod": mask_mod},
    }  # fmt: skip


ALIGNED, ANY = (0, 224, 480, 500), (0, 211, 500)  # bounds of the keys of parts


@pytest.mark.parametrize("name", ["dropout", "score_mod", "mask_mod", "band", "all"])
def test_parts_have_the_results_of_the_whole(cupy: Any, name: str, any_gpu: bool) -> None:
    check_parts(cupy, name, 64, ALIGNED)


@pytest.mark.parametrize("bounds", [ALIGNED, ANY], ids=["aligned", "any"])
@pytest.mark.parametrize("dim", [64, 192])
def test_parts_with_dropout_have_the_results_of_the_whole(cupy: Any, dim: int, bounds: tuple[int, ...]) -> None:
    check_parts(cupy, "dropout", dim, bounds)
    check_parts(cupy, "all", dim, bounds)


def check_parts(cupy: Any, name: str, dim: int, bounds: tuple[int, ...]) -> None:
    """Compares parts of a call's queries, and of its keys, with the whole."""
    call = functions(cupy)[name]
    captured = call.pop("captured_grads", ())
    rng = np.random.default_rng(1)
    q, dout = (cupy.asarray(rng.standard_normal((2, 300, 8, dim)).astype("f2")) for _ in range(2))
    k, v = (cupy.asarray(rng.standard_normal((2, bounds[-1], 2, dim)).astype("f2")) for _ in range(2))
    whole = {**call, "diagonal_offset": 0}
    out, lse = cuflash.forward(q, k, v, return_lse=True, **whole)
    *grads, more = cuflash.backward(dout, q, k, v, out, lse, captured_grads=captured, **whole)
    # The last heads of the last sequence: two groups of four query heads have a kv head each.
    rows, heads, kv_head = slice(37, 290), slice(4, 8), slice(1, 2)
    some, some_lse = cuflash.forward(
        q[1:, rows, heads], k[1:, :, kv_head], v[1:, :, kv_head], return_lse=True, index_offsets=(37, 0, 4, 1), **whole
    )
    np.testing.assert_allclose(host(some), host(out[1:, rows, heads]), rtol=4e-3, atol=4e-3)
    np.testing.assert_allclose(host(some_lse), host(lse[1:, heads, rows]), rtol=1e-4, atol=1e-4)
    # Gradients over ranges of keys add up.
    dq, sums = 0.0, [0.0] * len(captured)
    for begin, end in pairwise(bounds):
        keys = slice(begin, end)
        some_q, some_k, some_v, some_more = cuflash.backward(
            dout, q, k[:, keys], v[:, keys], out, lse, captured_grads=captured, index_offsets=(0, begin), **whole
        )
        for one, correct in ((some_k, grads[1]), (some_v, grads[2])):
            np.testing.assert_allclose(host(one), host(correct[:, keys]), rtol=2e-2, atol=2e-2)
        dq = dq + host(some_q).astype("f4")
        sums = [total + host(x) for total, x in zip(sums, some_more, strict=True)]
    np.testing.assert_allclose(dq, host(grads[0]).astype("f4"), rtol=2e-2, atol=2e-2)
    for total, correct in zip(sums, more, strict=True):
        np.testing.assert_allclose(total, host(correct), rtol=2e-2, atol=2e-2 * abs(host(correct)).max())


def test_pages_have_the_offsets_too(cupy: Any) -> None:
    rng = np.random.default_rng(2)
    q = cupy.asarray(rng.standard_normal((2, 100, 4, 64)).astype("f2"))
    k, v = (cupy.asarray(rng.standard_normal((2, 256, 4, 64)).astype("f2")) for _ in range(2))
    table, used = cupy.arange(8, dtype="int32").reshape(2, 4), cupy.full(2, 256, "int32")
    pages = [x.reshape(8, 64, 4, 64) for x in (k, v)]
    for index_offsets in ((5, 33, 2, 1), (5, 32, 2, 1)):
        call = functions(cupy)["all"] | {"index_offsets": index_offsets}
        call.pop("captured_grads")
        expected = cuflash.forward(q, k, v, **call)
        out = cuflash.forward(q, *pages, page_table=table, seqused_k=used, **call)
        np.testing.assert_allclose(host(out), host(expected), rtol=4e-3, atol=4e-3)
