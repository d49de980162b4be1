"""Source text of kernels with score_mod and mask_mod: its dependencies and parameters."""

from __future__ import annotations

import re
from typing import Any

import numpy as np

import cuflash
from cuflash.planning.mod_code import MORE_WORDS, ModCode, make_mod_code, words_of
from cuflash.problem.problem import Problem

SLOPES, TABLE = np.zeros(4, np.float32), np.zeros((4, 9), np.float32)
BY_SEQUENCE = np.zeros((3, 4), np.float32)


def alibi(score: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
    return score - SLOPES[h] * abs(q - k)


def make_problem(**call: Any) -> Problem:
    shape = (2, 300, 4, 64)
    return cuflash.plan(shape, shape, shape, dtype="bfloat16", device="cpu", **call).problem


def code(keys_as_rows: bool = False, **call: Any) -> ModCode:
    mod_code = make_mod_code(make_problem(**call), keys_as_rows)
    assert mod_code is not None
    return mod_code


def test_a_plain_call_has_none() -> None:
    assert make_mod_code(make_problem(causal=True)) is None


def test_functions_that_are_equal_have_one_text_whatever_their_arrays_are() -> None:
    other = np.ones(4, np.float32)
    first, second = code(score_mod=alibi), code(score_mod=lambda s, b, h, q, k: s - other[h] * abs(q - k))
    assert first is second
    assert code(score_mod=alibi, sinks=(4,)).digest != first.digest
    assert code(score_mod=alibi, keys_as_rows=True).digest != first.digest
    assert code(score_mod=lambda s, b, h, q, k: s - SLOPES[h] * abs(q - k) * 2.0).digest != first.digest


def test_masks_are_the_same_functions_in_all_kernels() -> None:
    def mask_mod(b: Any, h: Any, q: Any, k: Any) -> Any:
        return np.tanh(SLOPES[h] * q) * TABLE[h, k] + 0.5 > k

    def score_mod(score: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        return np.tanh(score) * 2.0

    def of_mask(text: str) -> list[int]:
        return [text.count(f"{name}(") for name in ("tanhf", "__fmul_rn", "fmaf", "hyperbolic_tangent")]

    for keys_as_rows in (False, True):
        assert of_mask(code(mask_mod=mask_mod, keys_as_rows=keys_as_rows).text) == [1, 2, 0, 0]
        both = code(mask_mod=mask_mod, score_mod=score_mod, keys_as_rows=keys_as_rows).text
        assert of_mask(both)[:2] == [1, 2]
        assert of_mask(both)[3] == 1


def test_macros_tell_what_a_call_has() -> None:
    def macros(**call: Any) -> dict[str, int]:
        return {name: value for name, value in code(**call).constants if value}

    assert macros(score_mod=alibi) == {"SCORE_MOD": 1, "SHORT_OFFSETS": 1}
    assert macros(mask_mod=lambda b, h, q, k: (q + k) % 3 > 0) == {"MASK_MOD": 1, "SHORT_OFFSETS": 1}
    assert macros(score_mod=lambda s, b, h, q, k: 5 * np.tanh(s)) == {
        "SCORE_MOD": 1,
        "SCORE_MOD_GRAD": 1,
        "SHORT_OFFSETS": 1,
    }
    assert macros(score_mod=lambda s, b, h, q, k: s * s) == {"SCORE_MOD": 1, "SCORE_MOD_GRAD": 2, "SHORT_OFFSETS": 1}
    assert macros(sinks=(4,), dropout_p=0.5) == {"SINKS": 1, "DROPOUT": 1, "SHORT_OFFSETS": 1}
    for hides in (lambda s, b, h, q, k: np.where(q > k, s, -np.inf), lambda s, b, h, q, k: np.where(q > k, s, -1e38)):
        assert macros(score_mod=hides)["SCORE_MOD_MAY_MASK"] == 1
    wide = macros(bias=strided((2, 4, 300, 300), (2**31, 1, 1, 1)))
    assert wide["SCORE_MOD"] == wide["SCORE_MOD_MAY_MASK"] == 1
    assert "SHORT_OFFSETS" not in macros(bias=strided((2, 4, 300, 300), (2**31, 1, 1, 1)))


def test_elements_are_loaded_together_where_pairs_of_them_lie_so() -> None:
    def pairs(keys_as_rows: bool = False, **call: Any) -> list[str]:
        return re.findall(r"template pair<(\w+)>", code(keys_as_rows, **call).text)

    row = np.zeros(300, np.int32)
    assert pairs(bias=(2, 4, 300, 300)) == pairs(mask_mod=lambda b, h, q, k: row[q] == row[k]) == ["true"]
    # An odd stride from row to row, and elements of which two do not fit one load.
    assert pairs(bias=strided((1, 4, 300, 300), (1, 90301, 301, 1))) == pairs(bias=np.zeros((300, 300))) == ["false"]
    # A stride, queries in the columns, fewer elements than keys, varlen.
    assert pairs(bias=strided((1, 4, 300, 300), (1, 90000, 1, 300))) == pairs(True, bias=(2, 4, 300, 300)) == []
    assert pairs(True, bias=strided((1, 4, 300, 300), (1, 90000, 1, 300))) == ["true"]
    assert pairs(score_mod=lambda s, b, h, q, k: s + TABLE[h, k]) == []
    assert pairs(mask_mod=lambda b, h, q, k: row[q] == row[k], seqused_k=(2,)) == []


def test_light_functions_load_all_elements_of_a_step_together() -> None:
    def together(**call: Any) -> bool:
        return bool(dict(code(**call).constants)["MODS_TOGETHER"])

    bias = (2, 4, 300, 300)
    assert together(bias=bias)
    assert together(bias=bias, score_mod=lambda s, b, h, q, k: s * 2 - SLOPES[h] * (q - k))
    assert not together(bias=bias, dropout_p=0.5)
    assert not together(bias=bias, mask_mod=lambda b, h, q, k: (q + k) % 3 > 0)
    assert not together(bias=bias, score_mod=lambda s, b, h, q, k: np.tanh(s))
    assert not together(bias=bias, score_mod=lambda s, b, h, q, k: s + TABLE[h, k])
    assert not together(score_mod=alibi)


def test_gradient_code_stays_if_only_sequences_change_between_tiles() -> None:
    def stays(**call: Any) -> bool:
        shape, like = (3, 300, 4, 64), {"op": "backward", "dtype": "bfloat16", "device": "sm_90"}
        arrays = [call["bias"]] if "bias" in call else [BY_SEQUENCE]
        plan = cuflash.plan(shape, shape, shape, captured_grads=arrays, **like, **call)
        text = next(each.variant.mod_code.text for each in plan.launches if each.variant.op == "backward_mods")
        return "kStays = true" in text

    shared, apart = np.zeros((1, 4, 300, 300), np.float32), np.zeros((3, 4, 300, 300), np.float32)
    assert stays(bias=shared)
    assert stays(bias=shared, causal=True, score_mod=lambda s, b, h, q, k: s - SLOPES[h] * (q - k))
    # A gradient for each sequence, or one of all heads; a score_mod that depends on the sequence; varlen.
    assert not stays(bias=apart)
    assert not stays(bias=shared[:, :1])
    assert not stays(score_mod=lambda s, b, h, q, k: s * BY_SEQUENCE[b, h])
    assert not stays(bias=shared, score_mod=lambda s, b, h, q, k: s * BY_SEQUENCE[b, h])
    assert not stays(bias=shared, seqused_k=(3,))


def strided(shape: tuple[int, ...], strides: tuple[int, ...]) -> Any:
    """Returns a NumPy array with these strides in elements, which is never read."""
    steps = tuple(4 * stride for stride in strides)
    return np.lib.stride_tricks.as_strided(np.zeros(1, np.float32), shape, steps)


def test_the_words_of_parameters_are_those_of_all_arrays() -> None:
    assert [words_of(rank) for rank in (0, 1, 2, 3, 4)] == [3, 3, 4, 6, 7]
    mod_code = code(score_mod=lambda s, b, h, q, k: alibi(s, b, h, q, k) + TABLE[h, 0])
    assert mod_code.words == words_of(1) + words_of(2) + MORE_WORDS
