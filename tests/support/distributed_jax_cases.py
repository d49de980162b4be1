"""Drawn cases of `cuflash.distributed.jax` on devices of the host, beside one device: run by tests/distributed.

distributed_jax_cases.py RANKS FIRST COUNT    prints what is wrong, then "ran COUNT"
distributed_jax_cases.py RANKS refusals       tries bad calls, and calls under strict promotion
"""

from __future__ import annotations

import functools
import random
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from cuflash.distributed import Layout
from cuflash.distributed.jax import attention
from cuflash.errors import ProblemError, UnsupportedError
from cuflash.frameworks.jax import attention as whole_attention
from cuflash.mods import position_of, seqlen_k

MOST_ERROR = 1e-4  # of the largest element, for float32; sums have other orders


def over_ranks(function: Any, ranks: int, specs: Any, outs: Any) -> Any:
    """Returns a function run by shard_map over a mesh of so many devices."""
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:ranks]), ("context",))
    return jax.jit(jax.shard_map(function, mesh=mesh, in_specs=specs, out_specs=outs, check_vma=False))


def failures(seed: int, ranks: int) -> list[str]:
    """Returns what differs between a case's results of all ranks and those of one device."""
    rng = random.Random(seed)
    scheme = rng.choice(("ring", "ulysses", "gather", "auto"))
    heads_q = rng.choice((1, 2)) * ranks if scheme == "ulysses" else rng.choice((1, 4, 6, 2 * ranks))
    heads_kv = rng.choice([heads for heads in range(1, heads_q + 1) if heads_q % heads == 0])
    rows = 2 * ranks * rng.choice((1, 5, 16, 33))
    is_packed = rng.random() < 0.5
    bounds: Any = [0, *sorted(rng.randrange(rows + 1) for _ in range(rng.randrange(5))), rows] if is_packed else rows
    layout = Layout(bounds, ranks, rng.choice(("zigzag", "contiguous")))
    windows = [{}, {"causal": True}, {"causal": True}, {"window_size": (rng.randrange(40), 0)}]
    windows.append({"window_size": (rng.choice((-1, 5, 60)), rng.choice((0, 3, 70)))})
    options: dict[str, Any] = rng.choice(windows)
    options |= {"softcap": 5.0} if rng.random() < 0.3 else {}
    options |= {"softmax_scale": 0.3} if rng.random() < 0.3 else {}
    dim, dim_v = rng.choice(((16, 16), (8, 24)))
    batch = 1 if is_packed else rng.choice((1, 2))
    keys = jax.random.split(jax.random.key(seed), 8)
    shapes = [(batch, rows, heads_q, dim), (batch, rows, heads_kv, dim), (batch, rows, heads_kv, dim_v), (heads_q,)]
    q, k, v, sinks = (jax.random.normal(key, shape) for key, shape in zip(keys, shapes, strict=False))
    slopes = jax.random.normal(keys[4], (heads_q,)) * 0.01
    dout = jax.random.normal(keys[5], (batch, rows, heads_q, dim_v))
    dlse = jax.random.normal(keys[6], (batch, heads_q, rows))
    has_sinks, has_mods = rng.random() < 0.4, scheme != "ring" and rng.random() < 0.5
    has_bias = scheme != "ring" and not is_packed and rng.random() < 0.3
    bias = jax.random.normal(keys[7], (heads_q, 1 if scheme == "ulysses" else rows, rows) if has_bias else (1, 1))
    if scheme != "ring" and rng.random() < 0.5:
        options |= {"dropout_p": 0.3, "dropout_seed": seed}

    def mod_kwargs(sinks: Any, slopes: Any, bias: Any) -> dict[str, Any]:
        mods: dict[str, Any] = {"sinks": sinks} if has_sinks else {}
        if has_mods:
            mods["score_mod"] = lambda score, b, h, i, j: score + slopes[h] * (position_of(i) - j) + 0.01 * (h + b)
            mods["mask_mod"] = lambda b, h, i, j: (i * 3 + j + h + seqlen_k()) % 5 != 0
        return mods | ({"bias": bias} if has_bias else {})

    def whole(q: Any, k: Any, v: Any, sinks: Any, slopes: Any, bias: Any) -> Any:
        more = mod_kwargs(sinks, slopes, bias) | options
        if is_packed:
            cu_seqlens = np.array(bounds, np.int32)
            more |= {"cu_seqlens_q": cu_seqlens, "cu_seqlens_k": cu_seqlens}
            out, lse = whole_attention(q[0], k[0], v[0], return_lse=True, **more)
            return out[None], lse[None]
        return whole_attention(q, k, v, return_lse=True, **more)

    def part(q: Any, k: Any, v: Any, sinks: Any, slopes: Any, bias: Any) -> Any:
        return attention(q, k, v, axis_name="context", layout=layout, scheme=scheme, return_lse=True,
                         **mod_kwargs(sinks, slopes, bias), **options)  # fmt: skip

    by_rows, same = jax.P(None, "context"), jax.P()
    of_bias = jax.P(None, "context") if bias.shape[-2] > 1 else same
    specs = (by_rows, by_rows, by_rows, same, same, of_bias)
    of_ranks = over_ranks(part, ranks, specs, (by_rows, jax.P(None, None, "context")))
    order, back = layout.order, np.argsort(layout.order)

    def distributed(q: Any, k: Any, v: Any, sinks: Any, slopes: Any, bias: Any) -> Any:
        bias = bias[:, order] if bias.shape[-2] > 1 else bias
        out, lse = of_ranks(q[:, order], k[:, order], v[:, order], sinks, slopes, bias)
        return out[:, back], lse[:, :, back]

    arrays = q, k, v, sinks, slopes, bias
    names = ["out", "lse", "dq", "dk", "dv", "dsinks", "dslopes", "dbias"]

    def differentiated(function: Any) -> Any:
        """Returns results and gradients, by one compilation."""

        def run(*arrays: Any) -> Any:
            (out, lse), pull = jax.vjp(function, *arrays)
            return out, lse, *pull((dout, jnp.where(jnp.isfinite(lse), dlse, 0.0)))

        return jax.jit(run)(*arrays)

    wrong = []
    for name, a, b in zip(names, differentiated(distributed), differentiated(whole), strict=True):
        a, b = np.asarray(a), np.asarray(b)
        scale = max(1.0, np.abs(b[np.isfinite(b)]).max(initial=0.0))
        if not np.allclose(a, b, rtol=0.0, atol=MOST_ERROR * scale):
            wrong.append(f"{name} differs by {np.abs(a - b).max():.3g}")
    return [f"{text} in seed {seed}, {scheme}, {layout}, {options}, heads {heads_q, heads_kv}" for text in wrong]


def refusals(ranks: int) -> list[str]:
    """Returns the bad calls whose error is another one than expected."""
    q, wrong = jnp.ones((1, 8, 3, 8)), []
    layout = Layout(16, ranks)
    cases: list[tuple[Any, dict[str, Any], str]] = [
        ((q[:, :7], q, q), {"layout": layout}, "q has 7 rows, but each rank holds 8"),
        ((q[0], q, q), {}, "q has 3 axes"),
        ((q, q, q), {"scheme": "rings"}, "scheme='rings' is unknown"),
        ((q, q, q), {"scheme": "ulysses"}, "3 query heads are no multiple of 2 ranks"),
        ((q, q, q), {"scheme": "ring", "mask_mod": lambda b, h, i, j: i >= j}, "scheme='ring' has no mask_mod in JAX"),
        ((q, q, q), {"scheme": "ring", "dropout_p": 0.1, "dropout_seed": 0}, "'ring' has no dropout_p in JAX"),
        ((q, q, q), {"layout": 16}, "layout is an int; give a cuflash.distributed.Layout"),
        ((q, q, q), {"layout": Layout(16, 3)}, "the layout is for 3 ranks, but axis 'context' has 2"),
        ((q, q, q), {"layout": Layout(17, 2)}, "ranks hold 8 to 9 rows, but arrays of all devices have one shape"),
        ((q, q, q), {"scheme": "gather", "bias": q}, "bias has shape (1, 8, 3, 8); give one that broadcasts to"),
        ((q, q, q), {"sinks": q[0, 0, 0]}, "sinks has shape (8,); give (3,)"),
        ((q, q, q), {"sinks": [1.0] * 3}, "sinks is a list"),
        (
            (q[:, :, :2],) * 3,
            {"scheme": "ulysses", "bias": jnp.ones((8, 16))},
            "a bias with rows of its own is sharded",
        ),
        (
            (q[:, :, :2],) * 3,
            {"scheme": "ulysses", "layout": Layout([0, 5, 16], 2, "contiguous"), "bias": jnp.ones(16)},
            "a call over packed documents has no bias over the keys of all of them; give scheme='gather' or 'auto'",
        ),
    ]
    for arrays, keywords, text in cases:
        call = functools.partial(attention, axis_name="context", **keywords)
        try:
            over_ranks(call, ranks, jax.P(), jax.P())(*arrays)
            error = "no error"
        except (ProblemError, UnsupportedError) as caught:
            error = str(caught)
        wrong += [] if text in error else [f"{text} differs: {error}"]
    try:
        attention(q, q, q, axis_name="context")
        wrong.append("a call outside of shard_map differs: no error")
    except ProblemError as caught:
        wrong += [] if "within jax.shard_map" in str(caught) else [f"a call outside of shard_map differs: {caught}"]
    return wrong


def strict_promotion(ranks: int) -> list[str]:
    """Returns the schemes whose calls of 16 bits need implicit promotion of dtypes, which a program may forbid."""
    q, rows, wrong = jnp.ones((1, 4 * ranks, ranks, 8), jnp.bfloat16), jax.P(None, "context"), []
    with jax.numpy_dtype_promotion("strict"):
        for scheme in ("ring", "ulysses", "gather"):
            call: Any = functools.partial(attention, axis_name="context", scheme=scheme)
            try:
                out, pull = jax.vjp(over_ranks(call, ranks, (rows,) * 3, rows), q, q, q)
                pull(out)
            except Exception as error:
                wrong.append(f"{scheme} differs under strict promotion: {error}")
    return wrong


def main() -> None:
    """Runs cases; prints what is wrong."""
    ranks, first, *count = int(sys.argv[1]), *sys.argv[2:]
    if first == "refusals":
        wrong = refusals(ranks) + strict_promotion(ranks)
    else:
        wrong = [text for seed in range(int(first), int(first) + int(*count)) for text in failures(seed, ranks)]
    print(*wrong, f"ran {count[0] if count else first}", sep="\n")


if __name__ == "__main__":
    main()
