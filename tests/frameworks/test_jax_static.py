"""Keywords that choose kernels: a traced one raises an error that says how to make it static."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from cuflash.errors import ProblemError

jax = pytest.importorskip("jax")
import jax.numpy as jnp

from cuflash.frameworks.jax import attention, dot_product_attention, ragged_paged_attention, triangle_attention

X = (1, 4, 2, 8)


def shaped(*shapes: tuple[int, ...]) -> list[Any]:
    return [np.zeros(shape, np.float32) for shape in shapes]


# By function: values of all keywords that choose kernels.
STATIC: dict[Callable[..., Any], dict[str, Any]] = {
    attention: {"softmax_scale": 0.5, "causal": True, "window_size": (1, 2), "diagonal_offset": 1, "softcap": 2.0,
                "deterministic": True, "return_lse": True, "max_seqlen_q": 4, "max_seqlen_k": 4, "num_splits": 2,
                "split_size": 128, "dropout_p": 0.5, "index_offsets": (1, 2)},
    dot_product_attention: {"scale": 0.5, "is_causal": True, "local_window_size": 3, "return_residual": True,
                            "implementation": 1},
    triangle_attention: {"softmax_scale": 0.5},
    ragged_paged_attention: {"sm_scale": 0.5, "sliding_window": 3, "soft_cap": 2.0, "mask_value": -1e9,
                             "k_scale": 2.0, "v_scale": 2.0},
}  # fmt: skip
OPERANDS: dict[Callable[..., Any], list[Any]] = {
    attention: shaped(X, X, X),
    dot_product_attention: shaped(X, X, X),
    triangle_attention: [*shaped(*[(1, 3, 2, 4, 8)] * 3), np.zeros((1, 2, 4, 4), np.float32)],
    ragged_paged_attention: [
        *shaped((3, 2, 8), (5, 4, 4, 8)), *map(np.int32, ([3], [[0, 1]], [0, 3], [1])),
    ],
}  # fmt: skip
MAY_BE_TRACED = {"cu_seqlens_q", "cu_seqlens_k", "seqused_q", "seqused_k", "page_table", "cache_batch_idx", "bias",
                 "sinks", "dropout_seed", "query_seq_lengths", "key_value_seq_lengths"}  # fmt: skip
NO_ARRAYS = {"score_mod", "mask_mod", "block_mask", "num_kv_pages_per_block", "num_queries_per_block",
             "vmem_limit_bytes"}  # functions and pytrees of arrays, and what changes no result  # fmt: skip


def test_every_keyword_is_listed_as_static_or_traced() -> None:
    for function, static in STATIC.items():
        parameters = inspect.signature(function).parameters.values()
        keywords = {x.name for x in parameters if x.kind is x.KEYWORD_ONLY}
        assert keywords - MAY_BE_TRACED - NO_ARRAYS == set(static)


@pytest.mark.parametrize(
    ("function", "name"), [(function, name) for function, names in STATIC.items() for name in names],
    ids=lambda x: getattr(x, "__name__", x),
)  # fmt: skip
def test_a_traced_keyword_gets_the_way_to_make_it_static(function: Callable[..., Any], name: str) -> None:
    value, arrays = STATIC[function][name], OPERANDS[function]
    more = {"dropout_seed": jax.random.key(0)} if name == "dropout_p" else {}
    expected = rf"^{name}=.*Tracer.*make it static, by jax.jit\({function.__name__}, static_argnames=\('{name}',\)\)"
    expected += rf".* functools.partial\({function.__name__}, {name}=value\)"
    with pytest.raises(ProblemError, match=expected) as caught:
        jax.jit(function)(*arrays, **{name: value}, **more)
    assert ("or multiply q by it" in str(caught.value)) == (name in ("softmax_scale", "scale", "sm_scale"))
    with pytest.raises(ProblemError, match=expected):
        jax.vmap(lambda x: function(*arrays, **{name: (x, x) if isinstance(value, tuple) else x}, **more))(
            jnp.zeros(2, jnp.int32)
        )
    if name not in ("implementation", "max_seqlen_q", "max_seqlen_k"):  # they take None, or belong to packed rows
        by_name = jax.jit(function, static_argnames=name)(*arrays, **{name: value}, **more)
        jax.tree.map(
            np.testing.assert_array_equal,
            by_name,
            jax.jit(functools.partial(function, **{name: value}))(*arrays, **more),
        )
