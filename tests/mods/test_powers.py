"""Powers, logarithms and the signs of zeros are exact where they decide, in the definition and in CUDA."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import texts
from exact_mods import GRID, PLACES, ROWS
from texts import KERNELS, Case, case_of, check_equal, check_values, compiled, computed

from cuflash import mods
from cuflash.mods.analysis.bounds import assume_causal
from cuflash.mods.tracing.trace import trace
from cuflash.reference.evaluate import evaluate

needs_kernels = pytest.mark.skipif(not KERNELS.is_dir(), reason="needs a checkout")
BASES = np.array([3.0, 10.0, 0.5, 1.5, -2.0, 7.0, 1.0, 4.0], np.float32)
# Powers and logarithms that decide.
POWERS: dict[str, Any] = {
    "a bound": lambda score, b, h, i, j: 10.0 ** (i % 10) == 1000.0,
    "powers of ten": lambda score, b, h, i, j: (10.0 ** (i % 10) >= 10.0 ** (j % 10)) & (10.0 ** (j % 10) < 1e8),
    "a float32": lambda score, b, h, i, j: np.float32(7.0) ** (j % 8) == np.float32(823543.0),
    "a captured base": lambda score, b, h, i, j: BASES[i % 8] ** (j % 6) == BASES[i % 8] ** (j % 3) * BASES[i % 8] ** 3,
    "a floor": lambda score, b, h, i, j: np.floor(3.0 ** (j % 12)) % 2.0 == 1.0,
    "an index": lambda score, b, h, i, j: BASES[(5.0 ** (j % 9)).astype(np.int32) % 8] > 8.0,
    "a logarithm": lambda score, b, h, i, j: np.log10(np.maximum(1000 * (i % 2) + j, 1)) >= 3.0,
    "digits": lambda score, b, h, i, j: np.floor(np.log10(10.0 ** (j % 9))) == j % 9,
    "a bounded logarithm": lambda score, b, h, i, j: np.log10(np.maximum((98 + j) * 10.0 ** (i - 2), 1.0)) <= i,
    "an equal logarithm": lambda score, b, h, i, j: np.log10(10.0 ** (i + j % 4)) == i + j % 4,
    "a fraction": lambda score, b, h, i, j: np.log10(10.0 ** -(i + j)) == -(i + j),
    "an equal power": lambda score, b, h, i, j: 7.0 ** (i + j) == 40353607.0,
    "a rounded bound": lambda score, b, h, i, j: 11.0**j >= 19487171.0,
    "a later power": lambda score, b, h, i, j: 3.0 ** (i + j + 5) >= 1162261467.0,
    "a captured exponent": lambda score, b, h, i, j: BASES[i % 8] ** BASES[j % 8] == 823543.0,
    "powers of two": lambda score, b, h, i, j: 2.0 ** (8 * j - 64) * 2.0 ** (64 - 8 * j) == 1.0,
    "an exponential": lambda score, b, h, i, j: np.exp2(j - 10.0) * 1024.0 == (1 << (i + j) % 32) * 1.0,
    "a binary logarithm": lambda score, b, h, i, j: np.log2((1 << (j % 16)) * 1.0) == j,
    "one": lambda score, b, h, i, j: 1.0 ** (score * np.inf) == 1.0,
}


def power(name: str) -> tuple[Case, Any]:
    """Returns the case of a power, and its values for `GRID`."""
    with np.errstate(all="ignore"):
        expected = np.broadcast_to(POWERS[name](np.float32(0), 0, 0, PLACES[:, None], PLACES), (ROWS, ROWS))
    assert expected.any()

    def score_mod(score: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
        return np.where(POWERS[name](score, b, h, i, j), 1.0, 0.0)

    return case_of(score_mod, "score_mod"), expected


@pytest.mark.parametrize("name", POWERS)
def test_powers_that_decide_are_exact(name: str) -> None:
    case, expected = power(name)
    (values,) = evaluate(case.roots, GRID, case.arrays)
    check_equal(np.broadcast_to(values, ROWS * ROWS), expected)
    # Powers of CUDA in float32 may be off by several units.
    assert "powf(" not in case.text()


@needs_kernels
def test_texts_of_powers_that_decide_are_exact(tmp_path: Path) -> None:
    check_values({name: power(name) for name in POWERS}, GRID, tmp_path)


@needs_kernels
def test_logarithms_that_decide_do_not_depend_on_log10f(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # CUDA's log10f may be off by two units in the last place.
    off = "#define log10f(x) nextafterf(nextafterf((log10f)(x), 99.0f), 99.0f)\n"
    monkeypatch.setattr(texts, "SHIM", texts.SHIM + off)
    powers = np.float32(10.0) ** np.arange(11, dtype=np.float32)
    cases = [
        case_of(each, "score_mod")
        for each in (
            lambda score, b, h, i, j: np.where(np.log10(powers[j]) == j, 1.0, 0.0),
            lambda score, b, h, i, j: np.where(np.log10(powers[j]) <= i, 1.0, 0.0),
            lambda score, b, h, i, j: np.floor(-np.log10(powers[j + 3])),
        )
    ]
    results = [values.reshape(ROWS, ROWS) for (values,) in computed(cases, GRID, tmp_path)]
    np.testing.assert_array_equal(results[0], 1)
    np.testing.assert_array_equal(results[1], PLACES[:, None] >= PLACES)
    np.testing.assert_array_equal(results[2][0], -(PLACES + 3))
    compiled(cases, "sm_80")


def test_logarithms_that_decide_nothing_are_one_call() -> None:
    text = case_of(lambda score, b, h, i, j: np.log10(abs(score) + 1.0), "score_mod").text()
    assert "log10f(" in text
    assert "?" not in text


def test_powers_of_scores_are_fast_exponentials() -> None:
    text = case_of(lambda score, b, h, i, j: score * 10.0 ** -abs(i - j), "score_mod").text()
    assert "exp2f(" in text
    assert "pow" not in text


TABLE = np.linspace(-1.0, 1.0, ROWS, dtype=np.float32)
# Quotients by zeros, whose sign decides between the infinities.
ZEROS: dict[str, Any] = {
    "of a row": lambda score, b, h, i, j: TABLE[j] / -i,
    "of an element": lambda score, b, h, i, j: TABLE[i] / -j + score,
    "of a distance": lambda score, b, h, i, j: TABLE[j] / (-abs(i - j) * 0.5),
    "of a float": lambda score, b, h, i, j: TABLE[j] / -(i * np.float32(1.0)),
    "of a difference": lambda score, b, h, i, j: TABLE[j] / (i - j) + TABLE[i] / -(i - j),
    "of a power": lambda score, b, h, i, j: (-abs(i - j) + score) ** -1.0,
    "of a sign": lambda score, b, h, i, j: 1.0 / np.sign(-1.0 * (i - j)),
    "of an absolute value": lambda score, b, h, i, j: TABLE[j] / abs(i - j),
    "of a modulus": lambda score, b, h, i, j: np.floor_divide(TABLE[j], np.where(score < 1, -i, 1) * np.float32(1.0)),
}


def quotient(name: str) -> tuple[Case, Any]:
    """Returns the case of a quotient by zeros, and its values for `GRID`."""
    with np.errstate(all="ignore"):
        expected = ZEROS[name](np.float32(0), 0, 0, PLACES[:, None], PLACES).astype(np.float32)
    assert np.isinf(expected).any()
    return case_of(ZEROS[name], "score_mod"), expected


@pytest.mark.parametrize("name", ZEROS)
def test_zeros_of_integers_have_no_sign(name: str) -> None:
    case, expected = quotient(name)
    (values,) = evaluate(case.roots, GRID, case.arrays)
    check_equal(values, expected, rtol=1e-6)


@needs_kernels
def test_zeros_of_integers_have_no_sign_in_texts(tmp_path: Path) -> None:
    check_values({name: quotient(name) for name in ZEROS}, GRID, tmp_path, rtol=1e-6)


def test_quotients_that_decide_keep_the_sign_of_zero(tmp_path: Path) -> None:
    signed = np.array([0.0, -0.0, 1.0, -1.0, 1e-45, -1e-45, np.inf, -np.inf], np.float32)
    cases = {}
    for divisor in (3.0, -3.0):
        case = case_of(lambda b, h, i, j, divisor=divisor: 1.0 / (signed[j] / divisor) < i - 1, "mask_mod")
        with np.errstate(all="ignore"):
            expected = 1.0 / (signed / np.float32(divisor)) < PLACES[:, None] - 1
        (values,) = evaluate(case.roots, GRID, case.arrays)
        check_equal(values, expected, str(divisor))
        assert "divided(" in case.text()
        cases[str(divisor)] = case, expected
    if KERNELS.is_dir():
        check_values(cases, GRID, tmp_path)


SIGNED = np.array([0.0, -0.0, 1.0, -1.0, 6.5, -6.5, 7.0, -7.0, 1e30, -1e30, np.inf, -np.inf, np.nan])
# Functions of floats whose result may be a zero of either sign.
SIGNS: dict[str, Any] = {
    "floor_divide": np.floor_divide,
    "floor_divide by a constant": lambda x, y: x // -7.0,
    "floor_divide by a float32": lambda x, y: x // np.float32(7.0),
    "remainder": np.remainder,
    "fmod": np.fmod,
    "sign": lambda x, y: np.sign(x),
    "sign of a product": lambda x, y: np.sign(-x * y),
    "trunc": lambda x, y: np.trunc(x),
}


OF_SIGNED = dict.fromkeys(GRID, np.zeros(SIGNED.size**2, int)) | {
    "q_idx": np.repeat(np.arange(SIGNED.size), SIGNED.size),
    "k_idx": np.tile(np.arange(SIGNED.size), SIGNED.size),
}


def sign(name: str, kind: Any) -> tuple[Case, Any]:
    """Returns the case of a function's sign, and its values for `OF_SIGNED`."""
    table, count = SIGNED.astype(kind), SIGNED.size
    case = case_of(lambda b, h, i, j: 1.0 / SIGNS[name](table[i], table[j]) > 0.0, "mask_mod")
    with np.errstate(all="ignore"):
        expected = np.broadcast_to(1.0 / SIGNS[name](table[:, None], table) > 0.0, (count, count))
    return case, expected


@pytest.mark.parametrize("name", SIGNS)
@pytest.mark.parametrize("kind", [np.float32, np.float64])
def test_zeros_of_functions_have_the_sign_of_numpy(name: str, kind: Any) -> None:
    case, expected = sign(name, kind)
    (values,) = evaluate(case.roots, OF_SIGNED, case.arrays)
    check_equal(values, expected)


@needs_kernels
def test_zeros_of_functions_have_the_sign_of_numpy_in_texts(tmp_path: Path) -> None:
    kinds = np.float32, np.float64
    cases = {f"{name}, {kind.__name__}": sign(name, kind) for name in SIGNS for kind in kinds}
    check_values(cases, OF_SIGNED, tmp_path)


def test_quotients_of_negated_indices_have_the_sign_of_numpy(tmp_path: Path) -> None:
    cases = {}
    for divisor in (-7.0, 7.0):
        case = case_of(lambda b, h, i, j, divisor=divisor: 1.0 / ((-1.0 * i) // divisor) > 0, "mask_mod")
        with np.errstate(all="ignore"):
            expected = np.repeat(1.0 / ((-1.0 * PLACES) // divisor) > 0, ROWS)
        assert expected.any() is np.True_ if divisor < 0 else not expected.any()
        (values,) = evaluate(case.roots, GRID, case.arrays)
        check_equal(np.broadcast_to(values, ROWS * ROWS), expected, str(divisor))
        cases[str(divisor)] = case, expected
    if KERNELS.is_dir():
        check_values(cases, GRID, tmp_path)


def test_a_distance_to_earlier_keys_has_no_sign(tmp_path: Path) -> None:
    functions = (
        lambda s, b, h, i, j: 1.0 / abs(j - mods.position_of(i)),
        lambda s, b, h, i, j: 1.0 / abs((j - i) * 1.0),
    )
    roots = [assume_causal(trace(each, "score_mod").root) for each in functions]
    inputs = GRID | {"k_idx": np.minimum(GRID["k_idx"], GRID["q_idx"])}
    results = [evaluate(roots, inputs, ())] + (
        computed([Case(roots, ())], inputs, tmp_path) if KERNELS.is_dir() else []
    )
    for values in results:
        for each in values:
            assert np.min(each) > 0
            assert np.max(each) == np.inf


def test_a_negation_in_a_score_stays_free() -> None:
    case = case_of(lambda score, b, h, i, j: score + TABLE[h] * -abs(i - j), "score_mod")
    assert " 0x0p+0f - " not in case.text()
    assert case_of(ZEROS["of a distance"], "score_mod").text().count("0x0p+0f - ") == 1
