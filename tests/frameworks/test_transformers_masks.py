"""Masks of transformers as functions, and sinks, dropout and position biases, on cuflash."""

from __future__ import annotations

import logging
from typing import Any

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers", minversion="5.0")

from models import IDS, MODELS, ONES, as_exact_as, close, counted_calls, exact_model, heads, layer, model_of

import cuflash.frameworks.transformers as bridge
from cuflash.frameworks.torch import attention
from cuflash.frameworks.transformers.masks import SequenceMask

__all__ = ["counted_calls"]  # the fixture
BETWEEN = ONES.clone()
BETWEEN[1, 4:7] = BETWEEN[0, 0] = BETWEEN[0, 9] = 0
LEFT, SIDES = torch.tensor([[0] * 3 + [1] * 8, [1] * 11]), torch.tensor([[1] * 6 + [0] * 5, [0] * 2 + [1] * 9])
LONG = torch.randint(1, 64, (2, 90), generator=torch.Generator().manual_seed(4))
# All experts are active: choosing among them would amplify a difference in the last bit.
GPT_OSS = {"num_local_experts": 2, "num_experts_per_tok": 2, "sliding_window": 6}


@pytest.mark.parametrize("name", ["llama", "mistral", "gemma2", "gemma3"])
@torch.no_grad()
def test_padding_between_tokens(name: str, calls: dict[str, int]) -> None:
    mask = BETWEEN.clone()
    if name == "gemma2":  # its eager attention gives NaN in float64 for a query without keys
        mask[0, 0] = 1
    models = model_of(name, "cuflash"), exact_model(name), model_of(name, "eager")
    results = [model(IDS, attention_mask=mask, use_cache=False).logits[mask.bool()] for model in models]
    assert calls == {"cuflash": 2, "sdpa": 0}
    close(*results)


@torch.no_grad()
def test_padding_between_tokens_of_a_growing_cache(calls: dict[str, int]) -> None:
    model, cache, parts = model_of("mistral", "cuflash"), None, []
    for begin, end in ((0, 8), (8, 10), (10, 11)):
        done = model(IDS[:, begin:end], attention_mask=BETWEEN[:, :end], past_key_values=cache, use_cache=True)
        cache = done.past_key_values
        parts.append(done.logits)
    assert calls == {"cuflash": 6, "sdpa": 0}
    models = exact_model("mistral"), model_of("mistral", "eager")
    peers = [peer(IDS, attention_mask=BETWEEN).logits for peer in models]
    close(*(x[BETWEEN.bool()] for x in (torch.cat(parts, 1), *peers)))


@pytest.mark.parametrize("is_padded", [False, True])
@pytest.mark.parametrize("name", ["llama", "mistral", "gemma2"])
@torch.no_grad()
def test_a_long_prompt_in_a_static_cache(name: str, is_padded: bool, calls: dict[str, int]) -> None:
    mask = torch.ones_like(LONG)
    if is_padded:
        mask[0, int(name == "gemma2") : 5] = mask[1, 30:33] = 0
    positions = torch.arange(90)[None]
    results = []
    for model in (model_of(name, "cuflash"), exact_model(name), model_of(name, "eager")):
        cache = transformers.StaticCache(config=model.config, max_cache_len=100)
        first = model(LONG[:, :80], attention_mask=mask[:, :80], past_key_values=cache, position_ids=positions[:, :80])
        second = model(LONG[:, 80:], attention_mask=mask, past_key_values=cache, position_ids=positions[:, 80:])
        results.append(torch.cat([first.logits, second.logits], 1)[mask.bool()])
    assert calls == {"cuflash": 4, "sdpa": 0}
    close(*results)


@torch.no_grad()
def test_a_mask_function_of_a_model(calls: dict[str, int]) -> None:
    """Gemma 3 has parts of a row, such as images, whose tokens see each other."""
    config = model_of("gemma3", "cuflash").config
    blocks = torch.tensor([[-1, 0, 0, 0, -1, -1, 1, 1, 1, 1, -1], [0, 0, 0, 0, 0, 0, 0, -1, -1, -1, -1]])
    embedded = torch.zeros(2, 11, 32)
    inputs = heads(11, 11)
    for create in (
        transformers.masking_utils.create_causal_mask,
        transformers.masking_utils.create_sliding_window_causal_mask,
    ):
        mask = create(config, embedded, BETWEEN, None, block_sequence_ids=blocks)
        assert isinstance(mask, SequenceMask)
        out, _ = bridge.cuflash_attention_forward(layer(), *inputs, mask, softcap=3.0)
        tensor, _ = bridge.cuflash_attention_forward(layer(), *inputs, mask.whole(), softcap=3.0)
        torch.testing.assert_close(out, tensor)
        if create is transformers.masking_utils.create_causal_mask:
            visible = torch.ones(11, 11, dtype=torch.bool).tril() | (
                (blocks[:, :, None] == blocks[:, None]) & (blocks[:, :, None] >= 0)
            )
            assert torch.equal(mask.whole()[:, 0], visible & BETWEEN[:, None].bool())
    assert calls == {"cuflash": 4, "sdpa": 0}


@torch.no_grad()
def test_untraceable_functions_become_tensors(calls: dict[str, int], caplog: pytest.LogCaptureFixture) -> None:
    config, inputs = model_of("llama", "cuflash").config, heads(11, 11)

    def odd(b: Any, h: Any, q: Any, k: Any) -> Any:
        return torch.stack([q, k]).sum(0) % 2 == 0 if isinstance(q, torch.Tensor) else open("/dev/null")

    embedded = torch.zeros(2, 11, 32)
    mask = transformers.masking_utils.create_causal_mask(config, embedded, ONES, None, or_mask_function=odd)
    if not isinstance(mask, SequenceMask):
        pytest.skip("this transformers makes such masks in another way")
    visible = torch.rand(2, 1, 11, 11, generator=torch.Generator().manual_seed(1)) > 0.5
    mask._make = lambda: visible
    with caplog.at_level(logging.DEBUG, "cuflash"):
        out, _ = bridge.cuflash_attention_forward(layer(), *inputs, mask)
    assert "cannot be traced" in caplog.text
    expected, _ = bridge.cuflash_attention_forward(layer(), *inputs, visible)
    assert torch.equal(out, expected)


@pytest.mark.parametrize("mask", [ONES, BETWEEN, LEFT], ids=["no", "between", "left"])
def test_sinks(mask: Any, calls: dict[str, int]) -> None:
    MODELS["gpt_oss"] = ("GptOss", GPT_OSS)
    try:
        results = []
        for implementation, dtype in (("cuflash", torch.float32), ("eager", torch.float64), ("eager", torch.float32)):
            torch.manual_seed(0)
            model = model_of("gpt_oss", implementation)
            model.config._experts_implementation = "eager"  # others do not accept float64
            with torch.no_grad():
                for place, each in enumerate(model.model.layers):
                    each.self_attn.sinks.copy_(torch.linspace(-1, 1, 4) + place)
            model = model.to(dtype)
            logits = model(IDS, attention_mask=mask, use_cache=False).logits[mask.bool()]
            logits.double().square().sum().backward()
            sinks = [each.self_attn.sinks.grad for each in model.model.layers]
            results.append([logits.detach(), *sinks, model.model.embed_tokens.weight.grad])
        assert calls == {"cuflash": 2, "sdpa": 0}
        for each in zip(*results, strict=True):
            close(*each, ulps=16)
    finally:
        del MODELS["gpt_oss"]


def test_sinks_of_single_queries() -> None:
    inputs = heads()
    sinks = torch.randn(2, 4, 6, 1, generator=torch.Generator().manual_seed(2))
    out, _ = bridge.cuflash_attention_forward(layer(), *inputs, None, sinks=sinks)
    q, k, v = inputs
    k, v = (x.repeat_interleave(2, 1) for x in (k, v))
    scores = (q @ k.transpose(2, 3) / 8**0.5).masked_fill(~torch.ones(6, 6, dtype=torch.bool).tril(), -torch.inf)
    weights = torch.cat([scores, sinks], -1).softmax(-1)[..., :-1]
    torch.testing.assert_close(out, (weights @ v).transpose(1, 2))


@pytest.mark.parametrize("mask", [ONES, BETWEEN, SIDES], ids=["no", "between", "sides"])
def test_biases_of_positions(mask: Any, calls: dict[str, int]) -> None:
    config = transformers.T5Config(
        d_model=32, d_kv=8, d_ff=16, num_layers=2, num_decoder_layers=2, num_heads=4, vocab_size=64,
        relative_attention_num_buckets=8, relative_attention_max_distance=16, dropout_rate=0.0,
        pad_token_id=0, decoder_start_token_id=0,
    )  # fmt: skip
    kwargs = {"attention_mask": mask, "decoder_input_ids": IDS[:, :7]}
    as_exact_as("eager", transformers.T5ForConditionalGeneration, config, **kwargs)
    assert calls == {"cuflash": 6, "sdpa": 0}
    gradients = []
    for implementation, dtype in (("cuflash", torch.float32), ("eager", torch.float64), ("eager", torch.float32)):
        torch.manual_seed(0)
        model = transformers.T5ForConditionalGeneration._from_config(config, attn_implementation=implementation)
        model = model.to(dtype).eval()
        model(IDS, labels=IDS[:, :7].contiguous(), attention_mask=mask).loss.backward()
        stacks = model.encoder, model.decoder
        gradients.append([x.block[0].layer[0].SelfAttention.relative_attention_bias.weight.grad for x in stacks])
    for each in zip(*gradients, strict=True):
        close(*each, ulps=8)


def test_masks_of_floats_and_bools_beside_a_bias() -> None:
    inputs, generator = heads(), torch.Generator().manual_seed(5)
    bias = torch.randn(1, 4, 6, 6, generator=generator)
    visible = torch.rand(2, 1, 6, 8, generator=generator) > 0.4
    visible[..., 0] = True
    added = torch.zeros(visible.shape).masked_fill(~visible, torch.finfo(torch.float32).min)
    expected = attention(*(x.transpose(1, 2) for x in inputs), bias=bias + added[..., :6])
    for mask in (visible, added):
        out, _ = bridge.cuflash_attention_forward(layer(), *inputs, mask, position_bias=bias)
        torch.testing.assert_close(out, expected)


def test_dropout(calls: dict[str, int]) -> None:
    model = model_of("llama", "cuflash", attention_dropout=0.3)
    with torch.no_grad():
        whole = model(IDS, attention_mask=ONES).logits
        torch.testing.assert_close(model_of("llama", "sdpa")(IDS).logits, whole, rtol=1e-4, atol=1e-4)
        model.train()
        torch.manual_seed(3)
        one, other = (model(IDS, attention_mask=ONES).logits for _ in range(2))
        torch.manual_seed(3)
        assert torch.equal(model(IDS, attention_mask=ONES).logits, one)
    assert not torch.allclose(one, other)
    assert not torch.allclose(one, whole)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    gradients = []
    for checkpoints in (True, False):
        if not checkpoints:
            model.gradient_checkpointing_disable()
        model.zero_grad()
        torch.manual_seed(3)
        model(IDS, attention_mask=BETWEEN, use_cache=False).logits.square().mean().backward()
        gradients.append(model.model.embed_tokens.weight.grad.clone())
    torch.testing.assert_close(*gradients)
    assert calls["sdpa"] == 0


@pytest.mark.parametrize("mask", [BETWEEN, LEFT], ids=["between", "left"])
@torch.no_grad()
def test_separately_compiled_layers(mask: Any) -> None:
    model = model_of("llama", "cuflash")
    expected = model(IDS, attention_mask=mask, use_cache=False).logits
    for each in model.model.layers:
        each.compile(backend="eager")
    got = model(IDS, attention_mask=mask, use_cache=False).logits
    torch.testing.assert_close(got, expected)


@torch.no_grad()
def test_softcap_with_a_mask_in_a_compiled_model() -> None:
    model = model_of("gemma2", "cuflash")
    expected = model(IDS, attention_mask=BETWEEN, use_cache=False).logits
    got = torch.compile(model, backend="eager")(IDS, attention_mask=BETWEEN, use_cache=False).logits
    torch.testing.assert_close(got, expected)


@torch.no_grad()
def test_a_function_is_traced_once_for_all_prompts(calls: dict[str, int]) -> None:
    masks: list[Any] = []
    make = bridge.cuflash_mask
    bridge.cuflash_mask = lambda **kwargs: masks.append(make(**kwargs)) or masks[-1]
    try:
        bridge.register()
        model = model_of("llama", "cuflash")
        for length in (9, 11):
            model(IDS[:, :length], attention_mask=BETWEEN[:, :length], use_cache=False)
    finally:
        bridge.cuflash_mask = make
        bridge.register()
    graphs = [mask.as_function(4)["block_mask"].graph for mask in masks]
    assert graphs[0].digest == graphs[1].digest
    assert [mask.as_function(4) for mask in masks] == [mask.as_function(4) for mask in masks], "layers share one"
