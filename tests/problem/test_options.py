"""The keyword arguments: one table that the public calls agree with. `test_bad_input` has what is refused."""

from __future__ import annotations

import inspect

import numpy as np
import pytest

import cuflash
from cuflash.problem.operands import APPEND_KV, INTEGERS, OF_SEQUENCES
from cuflash.problem.options import DEFAULTS, DENSE, Known, Options, names, sequence_options

KNOWN = Known(64, "float16")


@pytest.mark.parametrize("op", ["forward", "lse", "backward"])
def test_a_public_call_has_the_options_of_the_table_with_their_defaults(op: str) -> None:
    signature = inspect.signature(getattr(cuflash, op)).parameters
    of_backward = {"dlse", "grads_out", "page_table", "cache_batch_idx"}
    own = {"forward": {"return_lse", "out"}, "lse": set(), "backward": of_backward}[op]
    own |= {operand.name for operand in OF_SEQUENCES[op].inputs if operand.dtype == INTEGERS}
    keywords = {name for name, parameter in signature.items() if parameter.kind is parameter.KEYWORD_ONLY}
    assert keywords == set(names(op)) | own
    assert {name: signature[name].default for name in names(op)} == {
        name: DEFAULTS[name] for name in names(op)
    }
    assert set(names(op)) <= set(inspect.signature(cuflash.plan).parameters)


def test_append_kv_takes_its_operands_in_their_order_and_the_options_of_the_table() -> None:
    signature = inspect.signature(cuflash.append_kv).parameters
    assert [name for name in signature if name not in names("append_kv")] == [x.name for x in APPEND_KV.inputs]
    for operand in APPEND_KV.inputs:
        assert signature[operand.name].default is (None if operand.optional else inspect.Parameter.empty)
    assert {name: signature[name].default for name in names("append_kv")} == {
        "q_same_position": False, "rotary_interleaved": False}  # fmt: skip
    for name in names("append_kv"):
        assert signature[name].default is DEFAULTS[name]


def test_equal_numbers_of_other_types_are_other_keys() -> None:
    assert Options(softmax_scale=1).key() != Options(softmax_scale=1.0).key()
    assert Options(window_size=(1, 2)).key() != Options(window_size=(True, 2)).key()
    assert Options(window_size=[1, 2]).key() == Options(window_size=[1, 2]).key()  # type: ignore[arg-type]
    hash(Options(window_size=[1, 2]).key())  # type: ignore[arg-type]
    ones = [sequence_options(one, None) for one in (1, True, 1.0)]  # type: ignore[arg-type]
    made = [Options(window_size=window, sequences=one) for one in ones for window in ((1, 2), (1, True))]
    assert len({options.key() for options in made}) == 6


def test_options_of_sequences_that_are_defaults_are_those_of_dense_calls() -> None:
    assert sequence_options(None, None, 0, None) is DENSE
    for more in ((None, None, False), (None, None, 0.0), (0, None), (None, 0), (None, None, 0, 0)):
        assert sequence_options(*more) is not DENSE  # type: ignore[arg-type]
    assert Options(causal=True).judged(KNOWN).sequences == DENSE


def test_defaults_are_filled_in() -> None:
    judged = Options().judged(KNOWN)
    assert (judged.softmax_scale, judged.out_dtype, judged.window_size) == (1 / 8, "float16", (None, None))
    assert Options(window_size=(-1, 3), causal=np.True_).judged(KNOWN)[1:3] == (True, (None, 3))


def test_scores_are_in_units_of_products() -> None:
    scores = Options(softmax_scale=0.5, softcap=30.0).judged(KNOWN).scores
    assert (scores.cap, scores.inverse_cap) == (60.0, 1 / 60)
    assert scores.scale_log2 == pytest.approx(0.5 / np.log(2))
    assert Options().judged(KNOWN).scores[2:] == (0.0, 0.0)
