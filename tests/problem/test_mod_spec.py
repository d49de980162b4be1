"""Mods of calls: equal mods make one spec, and the arrays of a spec become operands of an op."""

from __future__ import annotations

from typing import Any

import numpy as np

from cuflash.mods.graph.graph import variable
from cuflash.mods.tracing.trace import trace
from cuflash.problem.dropout import SHARES, share_kept
from cuflash.problem.mod_spec import SCORE, Bias, captured, exchanged, make_mod_spec
from cuflash.problem.operands import BACKWARD, FORWARD, mod_op

TABLE, SLOPES = np.zeros((4, 9), np.float16), np.zeros(4)


def score_mod(score: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
    return score + TABLE[h, k] - SLOPES[h]


def mask_mod(b: Any, h: Any, q: Any, k: Any) -> Any:
    return SLOPES[k] > q


def test_specs_of_equal_calls_are_equal_and_number_their_arrays() -> None:
    graphs = trace(score_mod, "score_mod"), trace(mask_mod, "mask_mod")
    bias = Bias("bfloat16", (True, False, True))
    mod_spec = make_mod_spec(*graphs, bias, has_sinks=True)
    same = make_mod_spec(trace(score_mod, "score_mod"), trace(mask_mod, "mask_mod"), bias, has_sinks=True)
    assert (mod_spec, hash(mod_spec)) == (same, hash(same))
    assert mod_op(FORWARD, mod_spec) is mod_op(FORWARD, same)
    assert mod_spec != make_mod_spec(*graphs, bias)
    assert [(each.name, each.dtype, each.rank) for each in mod_spec.arrays] == [
        ("captured0", "float16", 2), ("captured1", "float64", 1), ("captured2", "float64", 1), ("bias", "bfloat16", 3)
    ]  # fmt: skip
    assert [each.array is x for each, x in zip(captured(graphs), (TABLE, SLOPES, SLOPES), strict=True)] == [True] * 3
    assert "load3(h, 0, k_idx)" in repr(mod_spec.score)
    assert "load2(k_idx)" in repr(mod_spec.mask)


def test_a_bias_of_bools_is_a_part_of_the_mask() -> None:
    mod_spec = make_mod_spec(None, trace(mask_mod, "mask_mod"), Bias("bool", (True, True)))
    assert mod_spec.score is None
    assert mod_spec.mask is not None
    assert mod_spec.mask.op == "bitwise_and"


def test_mods_that_change_nothing_have_changes_false() -> None:
    for score, mask in ((lambda s, b, h, q, k: s, None), (None, lambda b, h, q, k: k >= 0)):
        mod_spec = make_mod_spec(score and trace(score, "score_mod"), mask and trace(mask, "mask_mod"))
        assert not mod_spec.changes
    assert make_mod_spec(None, None, has_sinks=True).changes
    assert make_mod_spec(None, None, drops=True).changes
    assert make_mod_spec(None, None, Bias("float32", ())).changes


def test_queries_and_keys_change_places() -> None:
    root = trace(lambda s, b, h, q, k: s + q - 2 * k, "score_mod").root
    again = exchanged(exchanged(root))
    assert exchanged(root) is not root
    assert again is root
    assert exchanged(SCORE) is SCORE
    assert variable("q_idx") is exchanged(variable("k_idx"))


def test_mod_op_reads_the_arrays_and_returns_the_requested_gradients() -> None:
    mod_spec = make_mod_spec(trace(score_mod, "score_mod"), None, Bias("float32", (True,)), has_sinks=True, drops=True)
    op = mod_op(BACKWARD, mod_spec, (2, 0, 3))
    assert op.names[-11:] == ("captured0", "captured1", "bias", "sinks", "dropout_seed", "dq", "dk", "dv",
                              "dbias", "dcaptured0", "dsinks")  # fmt: skip
    assert op.plain is not None
    assert op.plain.mod_spec is None
    assert op is mod_op(BACKWARD, mod_spec, (2, 0, 3))


def test_share_kept_counts_weights_out_of_2_to_the_16() -> None:
    assert share_kept(0.0) == SHARES
    assert share_kept(0.25) == 49152
    assert share_kept(1 - 1e-9) == 0
