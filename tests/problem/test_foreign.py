"""Names of other libraries: errors name the parameters and functions that replace them."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import re
from typing import Any

import numpy as np
import pytest
from refusals import refused

import cuflash
from cuflash.problem import foreign
from cuflash.problem.foreign import ARGUMENTS, FUNCTIONS, NEEDLESS, refuse_foreign, renamed
from cuflash.units import kind_of, with_article

X = np.zeros((1, 4, 2, 8), "f4")
CALLS: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "forward": (cuflash.forward, (X, X, X)),
    "lse": (cuflash.lse, (X, X)),
    "backward": (cuflash.backward, (X, X, X, X, X, X)),
    "append_kv": (cuflash.append_kv, (X, X, X, X, X)),
    "plan": (cuflash.plan, (X, X, X)),
    "triangle_attention": (cuflash.triangle_attention, (X, X, X, X)),
    "create_block_mask": (cuflash.create_block_mask, ()),
    "merge_states": (cuflash.merge_states, ()),
}
NAMES = {*NEEDLESS, *[x for argument in ARGUMENTS for x in " ".join((*argument.names, argument.foreign)).split()]}


@pytest.mark.usefixtures("nothing_runs")
@pytest.mark.parametrize("name", CALLS)
def test_every_call_answers_keywords_of_others(name: str) -> None:
    function, arrays = CALLS[name]
    for keyword in NAMES - inspect.signature(function).parameters.keys():
        with refused(TypeError, f"{name}() got an unexpected keyword argument '{keyword}'; "):
            function(*arrays, **{keyword: None})


def public_functions() -> dict[str, Any]:
    """Returns the decorated functions of all packages that can be imported here, by public name."""
    for module in ("torch", "jax"):
        if importlib.util.find_spec(module):
            importlib.import_module(f"cuflash.frameworks.{module}")
    homes = {x: "cuflash" if x.__module__.startswith("cuflash.ops.") else x.__module__ for x in foreign._functions}
    return {f"{home}.{function.__name__}": function for function, home in homes.items()}


def test_every_hint_names_parameters_of_the_function_that_it_names() -> None:
    functions = public_functions()
    assert set(functions) >= {f"cuflash.{name}" for name in CALLS}
    for function in functions.values():
        parameters = inspect.signature(function).parameters
        ours = {name for each in functions.values() for name in inspect.signature(each).parameters}
        for keyword in (NAMES | ours) - parameters.keys():
            _, _, hint = str(refuse_foreign(function, [keyword])).partition("; ")
            if keyword in NEEDLESS and hint.startswith("leave it out: "):
                continue
            other = re.match(r"(cuflash[a-z_.]*) has ", hint)
            has = inspect.signature(functions[other[1]]).parameters if other else parameters
            assert (other and functions[other[1]] is not function) or hint.startswith("give "), (function, hint)
            hinted = re.findall(r"(\w+)=", hint)
            assert hinted, (function, keyword, hint)
            assert set(hinted) <= set(has), (function, keyword, hint)


def test_public_functions_of_cuflash_and_the_frameworks_answer() -> None:
    functions = public_functions()
    for home in sorted({name.rpartition(".")[0] for name in functions}):
        module = importlib.import_module(home)
        public = {name for name in module.__all__ if inspect.isfunction(getattr(module, name))}
        answers = {name.rpartition(".")[2] for name in functions if name.rpartition(".")[0] == home}
        assert public - answers <= {"export_checks"}, home
        for name in answers:
            kinds = {x.kind for x in inspect.signature(getattr(module, name)).parameters.values()}
            assert inspect.Parameter.VAR_KEYWORD not in kinds, name


HINTS = [
    ("lse", "dropout", "; cuflash.forward has dropout_p="), ("forward", "softmax_lse", "; give lse="),
    ("forward", "do", "; cuflash.backward has dout="), ("forward", "is_causal", "; give causal= (True or False)"),
    ("append_kv", "is_causal", "; cuflash.forward has causal="), ("append_kv", "block_table", "; give page_table="),
    ("triangle_attention", "attn_mask", "; give mask= (bools"), ("forward", "sm_scale", "; give softmax_scale="),
    ("lse", "return_lse", "; cuflash.forward has return_lse="), ("create_block_mask", "B", "; give batch="),
    ("create_block_mask", "H", "; give heads="), ("create_block_mask", "Q_LEN", "; give seqlen_q="),
    ("create_block_mask", "KV_LEN", "; give seqlen_k="), ("create_block_mask", "device", "; give like="),
    ("merge_states", "v_a", "; give outs="), ("merge_states", "prefix_lse", "; give lses="),
    ("plan", "check", "; cuflash.forward has check="), ("forward", "enable_gqa", "; leave it out: heads_q may be"),
    ("forward", "actual_seq_lengths_kv", "; give seqused_k= (batch,)"), ("forward", "key_cache", "; give k= (the"),
    ("forward", "actual_seq_lens_q", "; give seqused_q="), ("lse", "actual_seq_kvlen", "; give cu_seqlens_k="),
    ("forward", "cu_seqlens_k_new", "; cuflash.append_kv has cu_seqlens_k= (batch + 1,) in int32, of the new keys"),
    ("append_kv", "cu_seqlens_k_new", "; give cu_seqlens_k="), ("append_kv", "value_cache", "; give v_cache="),
    ("forward", "o", "; give out= (an array to write to)"), ("backward", "o", "; give out= (the result of cuflash.for"),
    ("merge_states", "output_lse", "; leave it out: lse is returned"), ("forward", "device", "; leave it out: results"),
    ("forward", "num_heads", "; leave it out: the shapes of the arrays have it"), ("forward", "kv", "; give some of"),
    ("forward", "block_size", "; give some of"), ("forward", "softmax_lse_return", "; give some of"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "keyword", "text"), HINTS)
def test_a_hint_is_for_the_function_that_was_called(name: str, keyword: str, text: str) -> None:
    function, arrays = CALLS[name]
    with refused(TypeError, f"{name}() got an unexpected keyword argument '{keyword}'{text}"):
        function(*arrays, **{keyword: None})


# Calls that name an array as another library does, so that an argument is missing, too.
RENAMED = [
    ("forward", (), {"query": X}, "'query'; give q= (an array)"), ("forward", (X, X), {"value": X}, "'value'; give v="),
    ("lse", (X,), {"key": X}, "'key'; give k="), ("lse", (), {"query": X, "key": X}, "'key'; give k="),
    ("backward", (), {"do": X}, "'do'; give dout="), ("append_kv", (), {"key_cache": X}, "'key_cache'; give k_cache="),
    ("plan", (), {"query": X}, "'query'; give q="), ("merge_states", (), {"v_a": X}, "'v_a'; give outs="),
    ("triangle_attention", (X, X, X), {"attn_bias": X}, "'attn_bias'; give bias="),
    ("torch.attention", (), {"query": X}, "'query'; give q="), ("torch.flex_attention", (), {"q": X}, "give query="),
    ("jax.attention", (X, X), {"value": X}, "'value'; give v="),
]  # fmt: skip


@pytest.mark.usefixtures("nothing_runs")
@pytest.mark.parametrize(("name", "arrays", "keywords", "text"), RENAMED)
def test_a_hint_comes_before_missing_arguments(
    name: str, arrays: tuple[Any, ...], keywords: dict[str, Any], text: str
) -> None:
    home, _, function = name.rpartition(".")
    if home:
        pytest.importorskip(home)
    module = importlib.import_module(f"cuflash.frameworks.{home}") if home else cuflash
    with refused(TypeError, f"{function}() got an unexpected keyword argument", text):
        getattr(module, function)(*arrays, **keywords)


PATHS: list[dict[str, Any]] = [
    {}, {"cu_seqlens_q": X, "cu_seqlens_k": X}, {"mask_mod": lambda b, h, i, j: i >= j}, {"bias": X}, {"check": True},
    {"sinks": X[0, 0, :, 0]}, {"dropout_p": 0.5, "dropout_seed": 1}, {"dropout_seed": 1}, {"page_table": X},
]  # fmt: skip


@pytest.mark.usefixtures("nothing_runs")
@pytest.mark.parametrize("path", PATHS, ids=lambda path: "-".join(path) or "plain")
def test_each_missing_argument_is_named_on_every_path(path: dict[str, Any]) -> None:
    for name, function in public_functions().items():
        parameters = inspect.signature(function).parameters
        array = importlib.import_module("torch").from_numpy(X) if ".torch." in name else X
        required = [x.name for x in parameters.values() if x.default is x.empty]
        options = {option: value for option, value in path.items() if option in parameters.keys() - set(required)}
        for missing in required if name != "cuflash.backward" or "page_table" not in path else ():
            text = rf"\(\) missing .*required .*argument.*'{missing}'|^{missing} is a NoneType; give "
            with pytest.raises((TypeError, cuflash.ProblemError), match=text):
                function(**{x: array for x in required if x != missing}, **options)


@pytest.mark.parametrize(("keyword", "texts"), [
    ("casual", ("'casual'; give causal=",)), ("windowsize", ("give window_size=",)),
    ("zzz", ("give some of q, k, v, softmax_scale, causal,",)), ("key_padding_mask", ("seqused_k=", "bias=")),
    ("actual_seq_lengths", ("give seqused_k= (batch,)", "or seqused_q= (batch,)")),
    *((keyword, ("give causal=",)) for keyword in ("isCausal", "is_casual", "is_causal_mask")),
    *((keyword, ("give dropout_seed=",)) for keyword in ("rng_seed", "generator")),
    ("softmax_temp", ("give softmax_scale=",)), ("algo", ("give algorithm=",)), ("offset", ("give diagonal_offset=",)),
    ("seqlens", ("seqused_k= (batch,)", "cu_seqlens_q= and cu_seqlens_k=")), ("splits", ("give num_splits=",)),
    *((keyword, ("cu_seqlens_q= and cu_seqlens_k=",)) for keyword in ("cu_seq", "cu_seqlens")),
    ("masks", ("mask_mod=", "bias=")),
    ("attention_bias", ("give bias=",)), ("dropout", ("dropout_p=",)), ("s_aux", ("sinks=",)),
])  # fmt: skip
def test_a_keyword_is_answered_by_what_it_means_or_looks_like(keyword: str, texts: tuple[str, ...]) -> None:
    with refused(TypeError, *texts):
        cuflash.forward(X, X, X, **{keyword: 1})


def test_each_of_several_keywords_is_answered() -> None:
    with refused(TypeError, "'scale'; give softmax_scale=", "'is_causal'; give causal="):
        cuflash.forward(X, X, X, scale=1.0, is_causal=True)  # type: ignore[call-overload]


def test_other_type_errors_of_a_function_pass() -> None:
    with refused(TypeError, "create_block_mask() missing 1 required keyword-only argument: 'like'"):
        cuflash.create_block_mask(lambda b, h, q_idx, k_idx: q_idx >= k_idx, 1, 1, 8, 8)  # type: ignore[call-arg]


FRAMEWORKS = [
    ("torch", "attention", "qkv", "is_causal", "give causal="), ("torch", "flex_attention", "qkv", "causal",
     "cuflash.frameworks.torch.attention has causal="), ("torch", "flex_attention", "qkv", "softmax_scale",
     "give scale="), ("torch", "triangle_attention", "qkvb", "attn_mask", "give mask="),
    ("jax", "attention", "qkv", "is_causal", "give causal="), ("jax", "attention", "qkv", "check",
     "cuflash.forward has check="), ("jax", "dot_product_attention", "qkv", "causal", "give is_causal="),
    ("jax", "dot_product_attention", "qkv", "seqused_k", "give key_value_seq_lengths="),
    ("jax", "dot_product_attention", "", "q", "give query="), ("jax", "triangle_attention", "qkvb", "scale",
     "give softmax_scale="), ("jax", "ragged_paged_attention", "qkvptn", "softcap", "give soft_cap="),
    ("jax", "ragged_paged_attention", "qkvptn", "block_table", "give page_indices="),
]  # fmt: skip


@pytest.mark.parametrize(("module", "name", "arrays", "keyword", "text"), FRAMEWORKS)
def test_functions_of_frameworks_answer_too(module: str, name: str, arrays: str, keyword: str, text: str) -> None:
    pytest.importorskip(module)
    function = getattr(importlib.import_module(f"cuflash.frameworks.{module}"), name)
    with refused(TypeError, f"{name}() got an unexpected keyword argument '{keyword}'; {text}"):
        function(*[X for _ in arrays], **{keyword: True})


@pytest.mark.parametrize(("name", "text"), [
    ("attention", "cuflash.forward"), ("flash_attn_func", "cuflash.frameworks.flash_attn"),
    ("scaled_dot_product_attention", "cuflash.frameworks.sdpa"), ("flex_attention", "cuflash.frameworks.torch"),
    ("block_mask", "use cuflash.create_block_mask"), ("create_mask", "use cuflash.create_block_mask"),
    ("fwd", "use cuflash.forward"), ("bwd", "use cuflash.backward"),
    ("foward", "use forward"), ("zzz", "no attribute 'zzz'"),
])  # fmt: skip
def test_attributes_of_others_are_answered(name: str, text: str) -> None:
    with refused(AttributeError, f"module 'cuflash' has no attribute '{name}'", text):
        getattr(cuflash, name)
    assert not hasattr(cuflash, name)


@pytest.mark.parametrize("name", ["__wrapped__", "__file_", "_forward", "zzz"])
def test_attributes_that_are_no_misspellings_get_no_hint(name: str) -> None:
    with pytest.raises(AttributeError, match=rf"^module 'cuflash' has no attribute '{name}'$"):
        getattr(cuflash, name)


def test_packages_that_are_not_imported_are_answered_by_the_import() -> None:
    assert str(foreign.no_attribute("testing", ())).endswith("; import cuflash.testing first")


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


def test_errors_are_renamed_word_by_word_and_paths_are_not() -> None:
    names = {"k": "k_new", "k_cache": "k", "seqused_k": "cache_seqlens"}
    text = "/home/k/q.py:3, C:\\k\\k.py: k and k_cache, of cu_seqlens_k, seqused_k[0]=3 and cuflash.k; give k."
    expected = text.replace("k and k_cache", "k_new and k").replace("seqused_k[", "cache_seqlens[").replace(
        "give k.", "give k_new.")  # fmt: skip
    error = renamed(cuflash.UnsupportedError(text), names)
    assert type(error) is cuflash.UnsupportedError
    assert str(error) == expected


@pytest.mark.parametrize("value", ["k", "it's k", 'k "k" k', "q k", "k's", "\\", "k\\'k"])
def test_quoted_values_are_not_renamed(value: str) -> None:
    error = renamed(
        cuflash.ProblemError(f"window_size={value!r} is not a pair, but k is the keys' k"), {"k": "k of kv"}
    )
    assert str(error) == f"window_size={value!r} is not a pair, but k of kv is the keys' k of kv"


class _CallerError(cuflash.ProblemError):
    def __init__(self, name: str, count: int) -> None:
        super().__init__(f"{name} {count}")


@pytest.mark.parametrize(
    "error", [_CallerError("q", 2), NotImplementedError("q"), cuflash.ProblemError("score_mod takes (q, k)")]
)
def test_renamed_error_of_a_function_of_the_caller_is_unchanged(error: Exception) -> None:
    assert renamed(error, {"q": "query", "k": "key"}) is error
