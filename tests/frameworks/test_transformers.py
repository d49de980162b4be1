"""`attn_implementation="cuflash"` equals transformers' eager and sdpa attention, or refuses."""

from __future__ import annotations

import importlib
import itertools
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers", minversion="4.53")

from models import (
    IDS,
    MODELS,
    ONES,
    SIZES,
    as_exact_as,
    close,
    counted_calls,
    exact_model,
    heads,
    layer,
    model_of,
)
from tensors import assert_results
from workers import run_python

import cuflash.frameworks.transformers as bridge
from cuflash.errors import ProblemError, UnsupportedError

__all__ = ["counted_calls"]  # the fixture


def generate(model: Any, ids: Any, length: int = 24, **arguments: Any) -> Any:
    """Returns greedy tokens, and their scores."""
    arguments = {"attention_mask": torch.ones_like(ids)} | arguments
    done = model.generate(
        ids, max_new_tokens=length, do_sample=False, return_dict_in_generate=True, output_scores=True, **arguments
    )
    return done.sequences, torch.stack(done.scores)


@pytest.mark.parametrize("name", MODELS)
def test_generation_equals_eager_and_sdpa_token_by_token(name: str, device: str, calls: dict[str, int]) -> None:
    length = 24 if device == "cpu" else 64
    models = (model.to(device) for model in (model_of(name, "cuflash"), exact_model(name), model_of(name, "eager")))
    (tokens, scores), *peers = (generate(model, IDS.to(device), length=length) for model in models)
    assert calls == {"cuflash": 2 * length, "sdpa": 0}
    assert len(set(tokens[:, 11:].flatten().tolist())) > 4
    assert all(torch.equal(tokens, expected) for expected, _ in peers)
    close(scores, *(expected for _, expected in peers))


@pytest.mark.parametrize("name", MODELS)
def test_a_batch_padded_on_the_left_equals_eager_and_its_rows_alone(name: str, calls: dict[str, int]) -> None:
    model, mask = model_of(name, "cuflash"), ONES.clone()
    mask[0, :4] = 0
    ids = IDS * mask
    tokens, scores = generate(model, ids, attention_mask=mask)
    assert calls == {"cuflash": 2 * 24, "sdpa": 0}
    if name != "gemma2":  # its eager attention gives NaN in float64 for a query without keys
        peers = [generate(peer, ids, attention_mask=mask) for peer in (exact_model(name), model_of(name, "eager"))]
        assert all(torch.equal(tokens, expected) for expected, _ in peers)
        close(scores, *(expected for _, expected in peers))
    for row, begin in ((0, 4), (1, 0)):
        alone, _ = generate(model, ids[row : row + 1, begin:])
        assert torch.equal(alone[0], tokens[row, begin:])


@pytest.mark.parametrize("compiled", [False, True])
# Without deepseek: transformers 4.57 itself has no such cache for it.
@pytest.mark.parametrize("name", [name for name in MODELS if name not in ("gemma2", "deepseek")])
def test_a_static_cache_equals_eager(name: str, compiled: bool, calls: dict[str, int]) -> None:
    settings: dict[str, Any] = {"disable_compile": True}
    if compiled:
        settings = {"compile_config": transformers.CompileConfig(backend="eager", mode=None)}
        settings["compile_config"]._compile_all_devices = True
    tokens, scores = generate(model_of(name, "cuflash"), IDS, cache_implementation="static", **settings)
    assert calls["sdpa"] == 0
    peers = [generate(model, IDS) for model in (exact_model(name), model_of(name, "eager"))]
    assert all(torch.equal(tokens, expected) for expected, _ in peers)
    close(scores, *(expected for _, expected in peers))


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("cuts", [(0, 5, 11), (0, 7, 8, 9, 11), (0, 1, 11)], ids=str)
def test_a_prompt_in_parts_on_a_growing_cache_equals_eager_at_once(
    name: str, cuts: tuple[int, ...], calls: dict[str, int]
) -> None:
    model = model_of(name, "cuflash")
    cache = transformers.DynamicCache(config=model.config) if "config" in parameters_of_cache() else None
    parts = []
    with torch.no_grad():
        for begin, end in itertools.pairwise(cuts):
            done = model(IDS[:, begin:end], past_key_values=cache, use_cache=True)
            cache = done.past_key_values
            parts.append(done.logits)
        exact, naive = (peer(IDS).logits for peer in (exact_model(name), model_of(name, "eager")))
    assert calls == {"cuflash": 2 * (len(cuts) - 1), "sdpa": 0}
    close(torch.cat(parts, 1), exact, naive)


def parameters_of_cache() -> tuple[str, ...]:
    """Returns the arguments of a dynamic cache, which takes a configuration from transformers 4.56 on."""
    return transformers.DynamicCache.__init__.__code__.co_varnames


GPU_DTYPES = [pytest.param("cuda", dtype, marks=pytest.mark.gpu) for dtype in (torch.float16, torch.bfloat16)]


@pytest.mark.parametrize(("device", "dtype"), [("cpu", torch.float32), *GPU_DTYPES])
@pytest.mark.parametrize("name", MODELS)
def test_a_training_step_is_as_exact_as_eager(name: str, device: str, dtype: Any, calls: dict[str, int]) -> None:
    ids, results = IDS, []
    if device == "cuda":
        ids = torch.randint(1, 64, (2, 200), generator=torch.Generator().manual_seed(2)).to(device)
    for model in (model_of(name, "cuflash").to(dtype), exact_model(name), model_of(name, "eager").to(dtype)):
        done = model.to(device).train()(ids, attention_mask=torch.ones_like(ids), labels=ids, use_cache=False)
        done.loss.backward()
        gradients = {key: x.grad for key, x in model.named_parameters() if x.grad is not None}
        results.append(gradients | {"logits": done.logits})
    assert calls == {"cuflash": 2, "sdpa": 0}
    assert results[0].keys() == results[1].keys() == results[2].keys()
    for key in results[0]:
        close(*(each[key] for each in results))


@pytest.mark.parametrize("name", ["llama", "mistral"])
def test_mask_tensors_and_padding_between_tokens_equal_sdpa(name: str, calls: dict[str, int]) -> None:
    rows, keys = torch.arange(11)[:, None], torch.arange(11)
    visible = (keys <= rows) & (keys % 3 != 1) | (keys == rows)
    between = torch.ones_like(IDS)
    between[1, 4:7] = 0
    for kwargs in ({"attention_mask": visible.expand(2, 1, 11, 11)}, {"attention_mask": between}):
        calls.update(cuflash=0, sdpa=0)
        with torch.no_grad():
            got, expected = (model_of(name, which)(IDS, **kwargs).logits for which in ("cuflash", "sdpa"))
            exact = exact_model(name)(IDS, **kwargs).logits
        assert calls == {"cuflash": 2, "sdpa": 0}
        valid = torch.ones_like(between) if kwargs["attention_mask"].dim() == 4 else between
        close(*(x[valid.bool()] for x in (got, exact, expected)))


@pytest.mark.parametrize("chunk", [4, 40])
def test_attention_in_chunks_equals_eager(chunk: int, calls: dict[str, int]) -> None:
    MODELS["llama4"] = ("Llama4", {"attention_chunk_size": chunk, "num_local_experts": 2, "intermediate_size_mlp": 32})
    with torch.no_grad():
        models = model_of("llama4", "cuflash"), exact_model("llama4"), model_of("llama4", "eager")
        results = [model(IDS, attention_mask=ONES).logits for model in models]
    del MODELS["llama4"]
    config = layer(sliding_window=chunk, attention_chunk_size=chunk).config
    assert bridge._is_window(config, 11, chunk) == (chunk == 40), "a length of both is not known to be the window's"
    assert calls == {"cuflash": 2, "sdpa": 0}
    close(*results)


def test_encoder_decoder_models_equal_sdpa(calls: dict[str, int]) -> None:
    config = transformers.BartConfig(
        d_model=32, encoder_layers=1, decoder_layers=1, encoder_attention_heads=4, decoder_attention_heads=4,
        encoder_ffn_dim=16, decoder_ffn_dim=16, vocab_size=64,
    )  # fmt: skip
    as_exact_as("sdpa", transformers.BartForConditionalGeneration, config, decoder_input_ids=IDS[:, :7])
    assert calls["cuflash"] >= 2


def test_tensors_are_passed_without_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    views: list[Any] = []
    attention = bridge.attention
    monkeypatch.setattr(bridge, "attention", lambda *x, **kwargs: (views.extend(x), attention(*x, **kwargs))[1])
    inputs = heads()
    out, weights = bridge.cuflash_attention_forward(layer(), *inputs, None, scaling=0.5, sliding_window=3)
    assert weights is None
    assert out.shape == (2, 6, 4, 8)
    assert out.is_contiguous()
    for view, tensor in zip(views, inputs, strict=True):
        assert view.data_ptr() == tensor.data_ptr()
        assert view.shape == (tensor.shape[0], tensor.shape[2], tensor.shape[1], 8)


def test_a_single_query_sees_its_window_of_the_cache() -> None:
    query, key, value = heads(1, 9)
    for window, begin in ((None, 0), (9, 0), (4, 5), (1, 8)):
        out, _ = bridge.cuflash_attention_forward(layer(), query, key, value, None, sliding_window=window)
        views = [x.transpose(1, 2) for x in (query, key[:, :, begin:], value[:, :, begin:])]
        assert_results(views, out)


PACKED = dict.fromkeys(("cu_seq_lens_q", "cu_seq_lens_k"), torch.tensor([0, 6, 12], dtype=torch.int32))


@pytest.mark.parametrize(
    ("kwargs", "words"),
    [
        ({"output_attentions": True}, "output_attentions=True.*eager"),
        ({"position_bias": torch.ones(1, 4, 6, 6), **PACKED}, "position_bias, or"),
        ({"is_causal": False, "sliding_window": 3}, "without causality"),
        *(({name: torch.ones(4)}, f"^{name}: ") for name in bridge._REFUSED),
    ],
    ids=lambda x: "_".join(x) if isinstance(x, dict) else "",
)
def test_unsupported_calls_are_refused(kwargs: dict[str, Any], words: str) -> None:
    with pytest.raises(UnsupportedError, match=words):
        bridge.cuflash_attention_forward(layer(), *heads(), **({"attention_mask": None} | kwargs))


def test_ambiguous_calls_are_refused() -> None:
    with pytest.raises(UnsupportedError, match="sliding window of 4, which 6 keys exceed"):
        bridge.cuflash_attention_forward(layer(sliding_window=4), *heads(), None)
    bridge.cuflash_attention_forward(layer(sliding_window=6), *heads(), None)
    bridge.cuflash_attention_forward(layer(sliding_window=4), *heads(), None, sliding_window=None)
    with pytest.raises(UnsupportedError, match="6 causal queries of 4 keys"):
        bridge.cuflash_attention_forward(layer(), *heads(6, 4), None)
    bridge.cuflash_attention_forward(layer(causal=False), *heads(6, 4), None)
    with pytest.raises(ProblemError, match="sliding_window=-1"):
        bridge.cuflash_attention_forward(layer(), *heads(), None, sliding_window=-1)


def test_models_refuse_as_the_layers_do() -> None:
    with pytest.raises(UnsupportedError, match="output_attentions"):
        model_of("llama", "cuflash")(IDS, output_attentions=True)


def test_a_window_of_no_keys_is_none() -> None:
    sizes = {name: SIZES[name] for name in ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads")}
    more = {"moe_intermediate_size": 8, "shared_expert_intermediate_size": 8, "intermediate_size": 8}
    config = transformers.Qwen2MoeConfig(**sizes, **more, num_key_value_heads=2, num_experts=2, num_experts_per_tok=1)
    assert config.sliding_window == 0
    torch.manual_seed(0)
    model = transformers.Qwen2MoeForCausalLM._from_config(config, attn_implementation="sdpa").eval()
    with torch.no_grad():
        expected = model(IDS).logits
        model.set_attn_implementation("cuflash")
        torch.testing.assert_close(model(IDS).logits, expected, rtol=1e-5, atol=1e-5)


def test_models_that_take_the_name_for_flash_attn_are_refused(tmp_path: Path, monkeypatch: Any) -> None:
    """SigLIP does so in transformers 4.57, and then drops the padding mask."""
    (tmp_path / "modeling_own.py").write_text(
        "from transformers import LlamaForCausalLM\n\n\nclass Custom(LlamaForCausalLM):\n    def of_flash(self):\n"
        '        return "flash" in self.config._attn_implementation\n'
    )
    monkeypatch.syspath_prepend(tmp_path)
    model_class = importlib.import_module("modeling_own").Custom
    config = transformers.LlamaConfig(**SIZES)
    assert not model_class._from_config(config, attn_implementation="sdpa").of_flash()
    with pytest.raises(UnsupportedError, match=r'Custom takes every name with "flash" in it.*sdpa'):
        model_class._from_config(config, attn_implementation="cuflash")


def test_models_that_pass_the_name_by_keyword_still_load() -> None:
    settings = SIZES | {"intermediate_size": 32, "pad_token_id": 0, "eos_token_id": 1}
    config = transformers.ModernBertConfig(**settings)
    transformers.ModernBertModel._from_config(config, attn_implementation="eager")


@pytest.mark.parametrize("window", [None, 5])
def test_models_that_add_to_masks_get_tensors(window: int | None) -> None:
    config = transformers.DogeConfig(**SIZES, sliding_window=window, initializer_range=0.3)
    as_exact_as("eager", transformers.DogeForCausalLM, config, attention_mask=ONES)


def test_registering_again_and_switching_change_nothing() -> None:
    bridge.register()
    model = model_of("llama", "cuflash")
    with torch.no_grad():
        expected = model(IDS).logits
        if hasattr(model, "set_attn_implementation"):
            model.set_attn_implementation("eager")
            assert torch.equal(model(IDS).logits, model_of("llama", "eager")(IDS).logits)
            model.set_attn_implementation("cuflash")
            assert torch.equal(model(IDS).logits, expected)
    requested = getattr(transformers.utils.generic, "is_flash_attention_requested", None)
    if requested is not None:
        assert not requested(model.config)
        assert not requested(requested_attention_implementation="cuflash")
        assert requested(requested_attention_implementation="flash_attention_2")
        assert transformers.modeling_utils.is_flash_attention_requested is requested


def test_models_compile_whole() -> None:
    model = model_of("mistral", "cuflash")
    with torch.no_grad():
        peers = [peer(IDS, use_cache=False).logits for peer in (exact_model("mistral"), model_of("mistral", "eager"))]
        got = torch.compile(model, backend="eager", fullgraph=True)(IDS, use_cache=False).logits
    close(got, *peers)


@pytest.mark.parametrize("missing", ["transformers", "transformers.masking_utils"])
def test_import_with_old_or_missing_transformers_raises_with_advice(missing: str) -> None:
    code = f"import sys; sys.modules['{missing}'] = None\ntry: import cuflash.frameworks.transformers\n"
    output = run_python("-c", f"{code}except ImportError as error: print(error)")
    assert output.startswith("cuflash.frameworks.transformers needs transformers 4.53")
