"""Small models of transformers in tests, and counts of the implementations that compute their layers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import transformers
from tensors import in_numpy

import cuflash.frameworks.transformers as bridge
from cuflash.testing import oracle

SIZES = {
    "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "head_dim": 8,
    "num_key_value_heads": 2, "vocab_size": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": None,
    "tie_word_embeddings": False,
}  # fmt: skip
EXPERTS = {"num_experts_per_tok": 1, "moe_intermediate_size": 8}
LATENT = {
    "num_key_value_heads": 4, "q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 8,
    "v_head_dim": 6, "head_dim": 4, "first_k_dense_replace": 2, "n_routed_experts": 4, "n_group": 1, "topk_group": 1,
}  # fmt: skip
# Configurations; each prompt of these tests is longer than every window.
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "mistral": ("Mistral", {"sliding_window": 6}),
    "qwen2": ("Qwen2", {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1}),
    "qwen3": ("Qwen3", {}),
    "phi3": ("Phi3", {"sliding_window": 4}),
    "gemma2": ("Gemma2", {"sliding_window": 6, "attn_logit_softcapping": 1.0, "query_pre_attn_scalar": 20}),
    "gemma3": ("Gemma3", {"sliding_window": 6, "query_pre_attn_scalar": 20}),
    "deepseek": ("DeepseekV3", LATENT | EXPERTS),
}
IDS = torch.randint(1, 64, (2, 11), generator=torch.Generator().manual_seed(1))
ONES = torch.ones_like(IDS)  # without it and without a cache, transformers 4 builds mask tensors


@pytest.fixture(autouse=True, name="calls")
def counted_calls(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, int]]:
    """Registers cuflash, and counts the layers' calls by implementation."""
    bridge.register()
    counts = {"cuflash": 0, "sdpa": 0}

    def counted(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            counts[name] += not torch.compiler.is_compiling()
            return function(*args, **kwargs)

        return call

    monkeypatch.setattr(bridge, "attention", counted("cuflash", bridge.attention))
    monkeypatch.setattr(bridge, "sdpa_attention_forward", counted("sdpa", bridge.sdpa_attention_forward))
    yield counts
    torch.compiler.reset()


def model_of(name: str, implementation: str, **settings: Any) -> Any:
    """Returns a small model with equal weights for every implementation, large enough that tokens differ."""
    family, overrides = MODELS[name]
    config_of = getattr(transformers, f"{family}TextConfig", None) or getattr(transformers, f"{family}Config")
    config = config_of(**(SIZES | overrides | settings))
    model = getattr(transformers, f"{family}ForCausalLM")._from_config(config, attn_implementation=implementation)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() > 1:
                weight.copy_(0.3 * torch.randn(weight.shape, generator=generator))
    return model.eval()


def exact_model(name: str) -> Any:
    """Returns the model in float64, with an attention of transformers that computes in float64."""
    return model_of(name, "eager" if name == "gemma2" else "sdpa").double()  # sdpa has no softcap


def close(got: Any, exact: Any, naive: Any, ulps: float = 4) -> None:
    """Checks the tolerance rule. exact: by transformers' attention in float64; naive: in the precision of `got`."""
    oracle.assert_close("result", *map(in_numpy, (got, exact, naive)), ulps=ulps)


def as_exact_as(peer: str, model_class: Any, config: Any, **inputs: Any) -> None:
    """Checks a random model's logits with cuflash against a peer's in float64 under the tolerance rule."""
    logits = []
    for implementation, dtype in (("cuflash", torch.float32), (peer, torch.float64), (peer, torch.float32)):
        torch.manual_seed(0)
        model = model_class._from_config(config, attn_implementation=implementation).eval().to(dtype)
        with torch.no_grad():
            logits.append(model(IDS, **inputs).logits)
    close(*logits)


def layer(causal: bool = True, **config: Any) -> Any:
    """Returns a layer with the attributes that attention functions read."""
    module = torch.nn.Module()
    module.is_causal, module.config, module.num_key_value_groups = causal, type("Config", (), config)(), 2
    return module


def heads(seqlen_q: int = 6, seqlen_k: int = 6) -> list[Any]:
    """Returns query, key and value in the layout of transformers."""
    return [torch.randn(2, h, s, 8) for h, s in ((4, seqlen_q), (2, seqlen_k), (2, seqlen_k))]
