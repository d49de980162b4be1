"""Names of other libraries: an error names what stands for them here."""

from __future__ import annotations

import importlib
import inspect
from typing import Any

import numpy as np
import pytest
from refusals import refused

import cuflash
from cuflash.problem.foreign import FUNCTIONS, KEYWORDS
from cuflash.units import kind_of, with_article

X = np.zeros((1, 4, 2, 8), "f4")
CALLS: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "forward": (cuflash.forward, (X, X, X)),
    "lse": (cuflash.lse, (X, X)),
    "backward": (cuflash.backward, (X, X, X, X, X, X)),
    "append_kv": (cuflash.append_kv, (X, X, X, X, X)),
    "plan": (cuflash.plan, (X, X, X)),
    "triangle_attention": (cuflash.triangle_attention, (X, X, X, X)),
}


@pytest.mark.usefixtures("nothing_runs")
@pytest.mark.parametrize("name", CALLS)
def test_every_call_answers_keywords_of_others(name: str) -> None:
    function, arrays = CALLS[name]
    for keyword, ours in (("is_causal", "causal="), ("sm_scale", "softmax_scale="), ("attn_mask", "mask_mod="),
                          ("enable_gqa", "heads_q may be"), ("block_table", "page_table=")):  # fmt: skip
        with refused(TypeError, f"{name}() got an unexpected keyword argument '{keyword}'; give", ours):
            function(*arrays, **{keyword: None})


@pytest.mark.parametrize(("keyword", "texts"), [
    ("casual", ("'casual'; give causal=",)), ("windowsize", ("give window_size=",)),
    ("zzz", ("give some of q, k, v, softmax_scale, causal,",)), ("key_padding_mask", ("seqused_k=", "bias=")),
    ("dropout", ("dropout_p=",)), ("cu_seqlens", ("cu_seqlens_q= and cu_seqlens_k=",)), ("s_aux", ("sinks=",)),
])  # fmt: skip
def test_a_keyword_is_answered_by_what_it_means_or_looks_like(keyword: str, texts: tuple[str, ...]) -> None:
    with refused(TypeError, *texts):
        cuflash.forward(X, X, X, **{keyword: 1})


def test_each_of_several_keywords_is_answered() -> None:
    with refused(TypeError, "'scale'; give softmax_scale=", "'is_causal'; give causal="):
        cuflash.forward(X, X, X, scale=1.0, is_causal=True)  # type: ignore[call-overload]


def test_no_answer_is_for_a_keyword_of_ours_and_each_names_one() -> None:
    ours = {name for function, _ in CALLS.values() for name in inspect.signature(function).parameters}
    assert not ours & KEYWORDS.keys() - {"check", "mask"}
    for keyword, answer in KEYWORDS.items():
        assert answer.startswith("nothing: ") or any(f"{name}=" in answer for name in ours), keyword


@pytest.mark.parametrize(("module", "name"), [("torch", "attention"), ("jax", "attention")])
def test_attention_of_frameworks_answers_too(module: str, name: str) -> None:
    pytest.importorskip(module)
    function = getattr(importlib.import_module(f"cuflash.frameworks.{module}"), name)
    with refused(TypeError, "attention() got an unexpected keyword argument 'is_causal'; give causal="):
        function(X, X, X, is_causal=True)


@pytest.mark.parametrize(("name", "text"), [
    ("attention", "cuflash.forward"), ("flash_attn_func", "cuflash.frameworks.flash_attn"),
    ("scaled_dot_product_attention", "cuflash.frameworks.sdpa"), ("flex_attention", "cuflash.frameworks.torch"),
    ("foward", "use forward"), ("zzz", "no attribute 'zzz'"),
])  # fmt: skip
def test_attributes_of_others_are_answered(name: str, text: str) -> None:
    with refused(AttributeError, f"module 'cuflash' has no attribute '{name}'", text):
        getattr(cuflash, name)
    assert not hasattr(cuflash, name)


def test_functions_that_answers_name_are_there() -> None:
    for name, answer in FUNCTIONS.items():
        assert not hasattr(cuflash, name) or name in ("frameworks", "testing", "tools"), name
        for word in answer.replace(",", " ").replace(";", " ").split():
            if word.startswith("cuflash.") and not word.startswith(("cuflash.frameworks", "cuflash.t")):
                value: Any = cuflash
                for part in word.split(".")[1:]:
                    value = getattr(value, part)


def test_articles_are_those_of_the_sound() -> None:
    kinds = [kind_of(x) for x in (1, X, [], "", None, object(), np.uint8(1), {})]
    assert kinds == ["an int", "an ndarray", "a list", "a str", "a NoneType", "an object", "a uint8", "a dict"]
    assert [with_article(x) for x in ("jax array", "array", "MLX array", "union")] == [
        "a jax array", "an array", "a MLX array", "a union"]  # fmt: skip


PACKED, BOUNDS = np.zeros((64, 2, 32), "f4"), np.array([0, 30, 64], "i4")
MISSING: list[tuple[dict[str, Any], str]] = [
    ({"cu_seqlens_q": BOUNDS}, "with cu_seqlens_k, as cu_seqlens_q was given"),
    ({"cu_seqlens_k": BOUNDS}, "with cu_seqlens_q, as cu_seqlens_k was given"),
    ({"seqused_k": BOUNDS[1:]}, "with cu_seqlens_"),
    ({"seqused_q": BOUNDS[1:]}, "with cu_seqlens_"),
]


@pytest.mark.usefixtures("nothing_runs")
@pytest.mark.parametrize(("arguments", "text"), MISSING)
def test_a_missing_partner_is_named(arguments: dict[str, Any], text: str) -> None:
    with refused(cuflash.ProblemError, text):
        cuflash.forward(PACKED, PACKED, PACKED, **arguments)
    with refused(cuflash.ProblemError, text):
        cuflash.lse(PACKED, PACKED, **arguments)


def test_append_kv_names_missing_cu_seqlens() -> None:
    cache, used = np.zeros((2, 64, 2, 32), "f4"), np.zeros(2, "i4")
    with refused(cuflash.ProblemError, "k has shape", "with cu_seqlens_k"):
        cuflash.append_kv(cache, cache.copy(), PACKED, PACKED, used)
