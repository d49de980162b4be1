"""Keyword arguments: one table that the public calls agree with. `test_bad_input` has bad values."""

from __future__ import annotations

import importlib
import inspect
from typing import Any

import numpy as np
import pytest

import cuflash
from cuflash.problem import options as options_module
from cuflash.problem.operands import APPEND_KV, INTEGERS, VARLEN_OPS
from cuflash.problem.options import DEFAULTS, MAX_KEYS, ROWS, OptionContext, Options, options_key

CONTEXT = OptionContext(64, "float16")


def names(op: str) -> list[str]:
    return [name for name, row in ROWS.items() if op in row.ops]


@pytest.mark.parametrize("op", ["forward", "lse", "backward"])
def test_a_public_call_has_the_options_of_the_table_with_their_defaults(op: str) -> None:
    signature = inspect.signature(getattr(cuflash, op)).parameters
    of_backward = {"dlse", "grads_out", "page_table", "cache_batch_idx", "captured_grads"}
    of_backward |= {"accumulate", "delta", "return_delta"}
    keywords = {"forward": {"return_lse", "out", "lse", "accumulate"}, "lse": set(), "backward": of_backward}[op]
    keywords |= {operand.name for operand in VARLEN_OPS[op].inputs if operand.dtype == INTEGERS}
    keywords |= {"score_mod", "mask_mod", "block_mask", "bias", "sinks"} | ({"dropout_seed"} if op != "lse" else set())
    keyword_only = {name for name, parameter in signature.items() if parameter.kind is parameter.KEYWORD_ONLY}
    assert keyword_only == set(names(op)) | keywords | {"check"}
    assert {name: signature[name].default for name in names(op)} == {name: DEFAULTS[name] for name in names(op)}
    assert set(names(op)) <= set(inspect.signature(cuflash.plan).parameters)


def test_append_kv_has_its_operands_in_order_and_the_options_of_the_table() -> None:
    signature = inspect.signature(cuflash.append_kv).parameters
    others = [name for name in signature if name not in names("append_kv")]
    assert others == [*[x.name for x in APPEND_KV.inputs], "check"]
    for operand in APPEND_KV.inputs:
        assert signature[operand.name].default is (None if operand.optional else inspect.Parameter.empty)
    assert {name: signature[name].default for name in names("append_kv")} == {
        "q_same_position": False, "rotary_interleaved": False}  # fmt: skip
    for name in names("append_kv"):
        assert signature[name].default is DEFAULTS[name]


class StoppedError(Exception):
    """Ends a call after it has built its options."""


@pytest.mark.parametrize("op", ["forward", "lse", "backward", "append_kv"])
def test_every_option_of_a_call_reaches_its_key(op: str, monkeypatch: pytest.MonkeyPatch) -> None:
    values = {name: object() for name in names(op)}

    def options_key(**keywords: Any) -> Any:
        assert {name: keywords[name] for name in values} == values
        raise StoppedError

    module = importlib.import_module(f"cuflash.ops.{'append' if op == 'append_kv' else op}")
    monkeypatch.setattr(module, "options_key", options_key)
    arrays: list[Any] = [None] * {"forward": 3, "lse": 2, "backward": 6, "append_kv": 5}[op]
    with pytest.raises(StoppedError):
        getattr(cuflash, op)(*arrays, **values)


@pytest.mark.parametrize("name", ROWS)
def test_every_keyword_of_a_key_is_its_option(name: str) -> None:
    value = {"window_size": (3, 4), "index_offsets": (1, 2, 3, 4)}.get(name, "a value")
    keywords: dict[str, Any] = {name: value}
    assert options_key(**keywords).options == Options(**keywords) != Options()


def test_equal_numbers_of_other_types_are_other_keys() -> None:
    assert Options(softmax_scale=1).key() != Options(softmax_scale=1.0).key()
    assert Options(window_size=(1, 2)).key() != Options(window_size=(True, 2)).key()
    assert Options(window_size=[1, 2]).key() == Options(window_size=[1, 2]).key()  # type: ignore[arg-type]
    hash(Options(window_size=[1, 2]).key())  # type: ignore[arg-type]
    windows, bounds = ((1, 2), (1, True)), (1, True, 1.0)
    variants = [Options(window_size=window, max_seqlen_q=bound) for bound in bounds for window in windows]
    assert len({options.key() for options in variants}) == 6
    assert len({options_key(**options._asdict()) for options in variants}) == 6


def test_equal_arguments_are_one_key_and_each_key_has_its_options() -> None:
    scale, window = 2.5e-1, tuple([3, 4])
    first = options_key(softmax_scale=scale, causal=True, window_size=window)
    assert first.options == Options(0.25, True, (3, 4), None, 0.0)
    assert first is options_key(softmax_scale=float("0.25"), causal=True, window_size=[3, 4])  # type: ignore[arg-type]
    assert first is not options_key(softmax_scale=0.25, causal=True, window_size=(3, 4), softcap=0)
    assert first.is_cacheable
    assert options_key(causal=np.True_, window_size=(np.int64(3), 4)).is_cacheable  # type: ignore[arg-type]


CHANGEABLE = {
    "iterator": (None, False, iter((1, 2))),
    "array": (np.ones(()), False, (-1, -1)),
    "array in a window": (None, False, (np.ones(()), 1)),
    "no window": (None, False, None),
    "long window": (None, False, (1, 2, 3)),
    "list": ([1], False, (-1, -1)),
    "object": (object(), False, (-1, -1)),
}


@pytest.mark.parametrize("values", CHANGEABLE.values(), ids=CHANGEABLE)
def test_arguments_that_may_change_or_hold_memory_are_not_cached(values: tuple[Any, ...]) -> None:
    named = dict(zip(Options._fields, values, strict=False))
    first, second = options_key(**named), options_key(**named)
    assert not first.is_cacheable
    assert first is not second
    assert first.options[0] is values[0]


def test_the_number_of_cached_keys_is_bounded() -> None:
    for number in range(2 * MAX_KEYS):
        assert options_key(window_size=(number, 0)).options.window_size == (number, 0)
    assert options_module._cached_key.cache_info().currsize <= MAX_KEYS


def test_defaults_are_filled_in() -> None:
    validated = Options().validated(CONTEXT)
    assert (validated.softmax_scale, validated.out_dtype, validated.window_size) == (1 / 8, "float16", (None, None))
    assert Options(window_size=(-1, 3), causal=np.True_).validated(CONTEXT)[1:3] == (True, (None, 3))


def test_scores_are_in_units_of_products() -> None:
    scores = Options(softmax_scale=0.5, softcap=30.0).validated(CONTEXT).scores
    assert (scores.cap, scores.inverse_cap) == (60.0, 1 / 60)
    assert scores.scale_log2 == pytest.approx(0.5 / np.log(2))
    assert Options().validated(CONTEXT).scores[2:] == (0.0, 0.0)
