"""Gradients of captured arrays: launches are simulated on the host and compared with the definition."""

from __future__ import annotations

import dataclasses
from itertools import product
from typing import Any

import numpy as np
import pytest
from plans import planned_with

import cuflash
from cuflash.errors import UnsupportedError
from cuflash.mods import scores
from cuflash.mods.graph.derivative import differentiate
from cuflash.mods.tracing.trace import trace
from cuflash.planning import captured_gradients
from cuflash.planning.captured_gradients import Term, sums_of, terms_of
from cuflash.planning.device import DEVICES
from cuflash.planning.plan import Launch, Plan
from cuflash.planning.planner import plan as make_plan
from cuflash.problem.mod_spec import captured
from cuflash.problem.problem import Problem
from cuflash.reference.evaluate import evaluate, place_of

BATCH, ROWS, KEYS, HEADS, HEADS_KV, DIM = 2, 150, 200, 4, 2, 8
NAMES = ("b", "h", "q_idx", "k_idx")
RANDOM = np.random.default_rng(7)
Arrays = dict[str, Any]


def normal(*shape: int) -> Any:
    return RANDOM.standard_normal(shape).astype(np.float32)


SLOPES, BY_BATCH, TABLE, FACTOR = normal(HEADS), normal(BATCH, HEADS), normal(HEADS, 9), normal()
DISTANCES, BUCKETS, LONG = normal(HEADS, ROWS + KEYS - 1), normal(8, HEADS), normal(HEADS, KEYS + 50, 3)
TURNED, SHORT, ROWS_TWICE = normal(KEYS, HEADS, ROWS), normal(ROWS - 40, KEYS), normal(ROWS, ROWS)


def tilted(score: Any, b: Any, h: Any, q_idx: Any, k_idx: Any) -> Any:
    return score * (1.0 + 0.125 * b) - SLOPES[h] * abs(q_idx - k_idx)


def by_batch(score: Any, b: Any, h: Any, q_idx: Any, k_idx: Any) -> Any:
    return score - BY_BATCH[b, h] * abs(q_idx - k_idx)


def bounded(score: Any, b: Any, h: Any, q_idx: Any, k_idx: Any) -> Any:
    return 2.0 * np.tanh(score / 2.0) + TABLE[h, (q_idx - k_idx) % 9]


def relative(score: Any, b: Any, h: Any, q_idx: Any, k_idx: Any) -> Any:
    return score + DISTANCES[h, q_idx - k_idx + KEYS - 1]


def long(score: Any, b: Any, h: Any, q_idx: Any, k_idx: Any) -> Any:
    return score + LONG[h, k_idx, 1] * 0.5 + LONG[h, k_idx, 2] * score


def turned(score: Any, b: Any, h: Any, q_idx: Any, k_idx: Any) -> Any:
    return score + TURNED[k_idx, h, q_idx]


def short(score: Any, b: Any, h: Any, q_idx: Any, k_idx: Any) -> Any:
    return score + SHORT[q_idx, k_idx] + SHORT[-1, 3]


def twice(score: Any, b: Any, h: Any, q_idx: Any, k_idx: Any) -> Any:
    return score * ROWS_TWICE[q_idx, q_idx]


def scaled(score: Any, b: Any, h: Any, q_idx: Any, k_idx: Any) -> Any:
    return FACTOR * score


# Mods; for each term, the axes with separate sums, and True if the index is computed.
CALLS: dict[str, tuple[Arrays, list[tuple[str, bool]]]] = {
    "slopes": ({"score_mod": tilted, "causal": True}, [("h", False)]),
    "slopes by batch": ({"score_mod": by_batch}, [("b h", False)]),
    "table": ({"score_mod": bounded, "window_size": (70, 20)}, [("h", True)]),
    "distances": ({"score_mod": relative, "causal": True}, [("h", True)]),
    "buckets": ({"score_mod": scores.relative_position(BUCKETS, bidirectional=True)}, [("h", True)]),
    "longer than the keys": ({"score_mod": long}, [("h k_idx", False)] * 2),
    "other order": ({"score_mod": turned}, [("h q_idx k_idx", False)]),
    "shorter than the queries": ({"score_mod": short}, [("", True), ("", False)]),
    "an index twice": ({"score_mod": twice}, [("", True)]),
    "a number": ({"score_mod": scaled, "softcap": 2.0}, [("", False)]),
    "bias": ({"bias": normal(BATCH, HEADS, ROWS, KEYS)}, [("b h q_idx k_idx", False)]),
    "pair bias": ({"bias": normal(1, HEADS, ROWS, KEYS)}, [("h q_idx k_idx", False)]),
    "bias of all": ({"bias": normal(ROWS, KEYS)}, [("q_idx k_idx", False)]),
    "bias of rows": ({"bias": normal(BATCH, 1, ROWS, 1)}, [("b q_idx", False)]),
    "bias of keys": ({"bias": normal(1, HEADS, 1, KEYS)}, [("h k_idx", False)]),
    "one bias": ({"bias": normal(1, 1, 1, 1)}, [("", False)]),
}  # fmt: skip
SINKS = {"sinks": SLOPES, "causal": True, "diagonal_offset": -20}


def problem_of(call: Arrays, dtype: str = "float32", grads: tuple[int, ...] = (0,), **options: Any) -> Problem:
    q, k = ((BATCH, rows, heads, DIM) for rows, heads in ((ROWS, HEADS), (KEYS, HEADS_KV)))
    arrays = [*arrays_of(call), *(call[name] for name in ("sinks",) if name in call)]
    options |= {**call, "captured_grads": [arrays[number] for number in grads] or None}
    return cuflash.plan(q, k, k, op="backward", dtype=dtype, device="cpu", **options).problem


def arrays_of(call: Arrays) -> list[Any]:
    graph = trace(call["score_mod"], "score_mod") if "score_mod" in call else None
    return [np.asarray(each.array) for each in captured([graph])] + [x for x in (call.get("bias"),) if x is not None]


INPUTS = {**dict(zip(NAMES, np.ogrid[:BATCH, :HEADS, :ROWS, :KEYS], strict=True)), "seqlen_q": ROWS, "seqlen_k": KEYS}


def gradient(problem: Problem, call: Arrays, ds: Any, raw: Any) -> Any:
    """Returns the gradient of the array by the definition, as in cuflash/reference/mods.py."""
    arrays, score = arrays_of(call), problem.op.mod_spec.score
    total = np.zeros(arrays[0].shape)
    for load, derivative in differentiate(score).items():
        if load.op == "load":
            slope, *index_values = evaluate([derivative, *load.arguments], INPUTS | {"score": raw}, arrays, np.float64)
            indices = [place_of(index, length) for index, length in zip(index_values, total.shape, strict=True)]
            where: Any = tuple(np.broadcast_to(each, ds.shape) for each in indices)
            np.add.at(total, where, ds * slope if where else (ds * slope).sum())
    return total


def summed(launch: Launch, term: Term, problem: Problem, call: Arrays, ds: Any, raw: Any) -> Any:
    """Returns the tables that a launch of backward_mods writes, (tables, elements of a table)."""
    f, tile = launch.fields, launch.variant.tile
    indices = [index for axis, index in enumerate(term.load.arguments) if axis in _looked_up(term, problem, call)]
    slope, *table_indices = evaluate([term.derivative, *indices], INPUTS | {"score": raw}, arrays_of(call), np.float64)
    values = ds * slope
    way = np.zeros((1, 1, 1, 1), int)
    for number, table_index in enumerate(table_indices):
        way = way + place_of(table_index, f[f"extents[{number}]"]) * f[f"strides[{number}]"]
    way = np.broadcast_to(way, ds.shape)
    counts = {"b": BATCH, "h": HEADS, "q": f["num_q_tiles"], "k": f["num_k_tiles"]}
    apart = dict(zip("bhqk", (f["by_sequence"], f["by_head"], f["by_query"], f["by_key"]), strict=True))
    walked = [counts[x] if not apart[x] else 1 for x in "bhq"]
    assert np.prod(walked) == f["num_steps"]
    lengths = [n if by else 1 for n, by in zip((BATCH, HEADS, ROWS, KEYS), apart.values(), strict=True)]
    if f["table_places"]:
        lengths[2:] = [f["table_places"], 1]
    tables = np.zeros((f["parts"], *lengths))
    blocks = list(product(range(f["parts"]), *(range(counts[x] if apart[x] else 1) for x in "bhqk")))
    assert len(blocks) == launch.num_blocks
    for part, *block in blocks:
        for step in range(f["num_steps"] * part // f["parts"], f["num_steps"] * (part + 1) // f["parts"]):
            steps = dict(zip("bhq", np.unravel_index(step, walked), strict=True))
            b, h, q = (block["bhq".index(x)] if apart[x] else int(steps[x]) for x in "bhq")
            rows = slice(q * tile.block_q, (q + 1) * tile.block_q)
            for k in [block[3]] if apart["k"] else range(counts["k"]):
                keys = slice(k * tile.block_k, (k + 1) * tile.block_k)
                to = [part, b * apart["b"], h * apart["h"]]
                x = values[b, h, rows, keys]
                if f["table_places"]:
                    np.add.at(tables[*to][:, 0], way[b, h, rows, keys], x)
                    continue
                x = x if apart["q"] else x.sum(0, keepdims=True)
                x = x if apart["k"] else x.sum(1, keepdims=True)
                tables[*to][rows if apart["q"] else slice(1), keys if apart["k"] else slice(1)] += x
    return tables.reshape(f["parts"], -1)


def _looked_up(term: Term, problem: Problem, call: Arrays) -> tuple[int, ...]:
    lengths = dict(zip(NAMES, (BATCH, HEADS, ROWS, KEYS), strict=True))
    return sums_of(term, problem.outputs[3][0], lengths).gathered_axes


def added(f: Any, tables: Any, total: Any) -> Any:
    """Returns the result of a launch of sum_tables."""
    extents, firsts, counts, strides = (
        [f[f"{name}[{axis}]"] for axis in range(f["rank"])] for name in ("extents", "firsts", "counts", "strides")
    )
    result = np.zeros(f["num_elements"])
    for element, place in enumerate(np.ndindex(*extents)):
        inside = [i - first for i, first in zip(place, firsts, strict=True)]
        if all(0 <= i < count for i, count in zip(inside, counts, strict=True)):
            result[element] = tables[:, np.dot(inside, strides)].sum() if inside else tables[:, 0].sum()
    return result + total if f["adds"] else result


def done(plan: Plan, call: Arrays, ds: Any, raw: Any) -> Any:
    """Returns the gradient that the launches of a plan compute."""
    problem, launches = plan.problem, [x for x in plan.launches if x.variant.op in ("backward_mods", "sum_tables")]
    terms, (shape, _) = iter(terms_of(problem.op.mod_spec)[0]), problem.outputs[3]
    tables, total = np.zeros((0, 0)), np.zeros(1)
    for launch in launches:
        f = launch.fields
        if launch.variant.op == "backward_mods":
            tables = summed(launch, next(terms), problem, call, ds, raw)
            if "tables" not in launch.aliases:
                return tables.reshape(shape)
            if f["adds_atomically"]:
                tables = tables.sum(0, keepdims=True)
            size, per_warp = plan.workspace[launch.aliases["tables"]].size // 4, 1
            if f["table_places"] and not f["adds_atomically"]:
                per_warp = launch.variant.tile.warps
            assert size == tables.size * per_warp
        elif not launch.aliases.get("result", "").endswith("_tables"):
            assert f["table_step"] == tables.shape[1]
            total = added(f, tables, total)
    assert launches[-1].aliases["result"] == plan.problem.op.outputs[3].name
    return total.reshape(shape)


@pytest.mark.parametrize("atomic", [False, True])
@pytest.mark.parametrize("name", CALLS)
def test_launches_make_the_gradient_of_the_definition(name: str, atomic: bool) -> None:
    call, expected = CALLS[name]
    problem, random = problem_of(call), np.random.default_rng(3)
    visible = problem.mask.visible(np.arange(ROWS), np.arange(KEYS))
    ds, raw = random.standard_normal((2, BATCH, HEADS, ROWS, KEYS)) * visible
    with planned_with(captured_gradients, MOST_TABLE_BYTES=64 if atomic else 2**26):
        plan = make_plan(problem, DEVICES["sm_80"])
    terms = terms_of(plan.problem.op.mod_spec)[0]
    lengths = dict(zip(NAMES, (BATCH, HEADS, ROWS, KEYS), strict=True))
    all_sums = [sums_of(term, plan.problem.outputs[3][0], lengths) for term in terms]
    assert sorted((" ".join(x.separate_axes), bool(x.gathered_axes)) for x in all_sums) == sorted(expected)
    launches = [x for x in plan.launches if x.variant.op == "backward_mods"]
    assert [x.fields["adds_atomically"] for x in launches] == [int(atomic and bool(x.gathered_axes)) for x in all_sums]
    np.testing.assert_allclose(done(plan, call, ds, raw), gradient(problem, call, ds, raw), rtol=1e-9, atol=1e-9)


def test_sums_that_need_too_much_room_are_refused_if_deterministic() -> None:
    call = CALLS["distances"][0]
    with planned_with(captured_gradients, MOST_TABLE_BYTES=64):
        with pytest.raises(UnsupportedError, match="deterministic=True"):
            make_plan(problem_of(call, deterministic=True), DEVICES["sm_80"])
        assert make_plan(problem_of(CALLS["pair bias"][0], deterministic=True), DEVICES["sm_80"])


@pytest.mark.parametrize("deterministic", [False, True])
def test_a_table_that_32_bits_do_not_count_is_refused(deterministic: bool) -> None:
    """Arrays with strides of 0 replace arrays that are too large for memory."""
    for more, is_refused in ((0, False), (1, True)):
        table = np.broadcast_to(np.float32(1.0), (HEADS, 2**31 // 4 - 1 + more, 4)[1:])
        call = {"score_mod": lambda score, b, h, q_idx, k_idx, table=table: score + table[q_idx - k_idx, k_idx % 4]}
        problem = problem_of(call, deterministic=deterministic)
        if is_refused:
            message = (
                r"dcaptured0, the gradient of an array of shape \(536870912, 4\).*2147483648 places; 2147483647 are"
            )
            with pytest.raises(UnsupportedError, match=message):
                make_plan(problem, DEVICES["sm_80"])
        elif not deterministic:
            launch = next(x for x in make_plan(problem, DEVICES["sm_80"]).launches if x.variant.op == "backward_mods")
            assert launch.fields["table_places"] == 2**31 - 4


def test_an_array_of_more_axes_than_kernels_count_is_refused() -> None:
    array = np.zeros((1,) * (captured_gradients.MAX_AXES + 1), np.float32)
    call = {"score_mod": lambda score, b, h, q_idx, k_idx: score + array[(b,) * array.ndim]}
    with pytest.raises(UnsupportedError, match=f"{array.ndim} axes; up to {captured_gradients.MAX_AXES} are supported"):
        make_plan(problem_of(call), DEVICES["sm_80"])


@pytest.mark.parametrize("arch", ["sm_80", "sm_90"])
def test_sinks_are_summed_over_all_queries(arch: str) -> None:
    plan = make_plan(problem_of(SINKS, "float16"), DEVICES[arch])
    *_, first, last = plan.launches
    assert (first.variant.op, last.variant.op) == ("sinks_gradient", "sum_tables")
    assert first.variant.constants["SINKS"] == 1
    parts = first.num_blocks // HEADS
    assert parts * first.fields["slots_each"] >= first.fields["num_slots"] == BATCH * 2
    assert last.fields["num_tables"] == parts
    assert plan.workspace["sinks_tables"].size == 4 * parts * HEADS
    assert last.aliases == {"result": "dsinks", "tables": "sinks_tables"}
    delta = plan.launches[0].fields
    assert {name: first.fields[name] for name in ("stats_rows", "stats_step", "stats_delta")}.items() <= delta.items()


def test_what_scores_do_not_load_from_has_gradient_zero() -> None:
    def mask_only(score: Any, b: Any, h: Any, q_idx: Any, k_idx: Any) -> Any:
        return score + (SLOPES[h] > 0.5)

    plan = make_plan(problem_of({"score_mod": mask_only}), DEVICES["sm_80"])
    launch = plan.launches[-1]
    assert launch.variant.op == "sum_tables"
    assert (launch.fields["num_tables"], launch.fields["num_elements"]) == (0, HEADS)
    assert launch.aliases == {"result": "dcaptured0"}


def test_only_what_is_wanted_is_launched() -> None:
    plain, plan = (make_plan(problem_of(CALLS["bias"][0], grads=grads), DEVICES["sm_80"]) for grads in ((), (0,)))
    assert {x.variant.op for x in plain.launches} == {"delta", "backward", "convert"}
    assert [x.variant.op for x in plan.launches[3:]] == ["backward_mods"]  # no block adds to another's sums
    assert plan.launches[3].aliases == {"result": "dbias"}
    assert plan.workspace == plain.workspace
    half = dataclasses.replace(DEVICES["sm_80"], smem_per_block=1000)
    with pytest.raises(UnsupportedError):
        make_plan(plan.problem, half)
