"""Runs vLLM's engine on the CPU over small random models: run as a process by test_vllm.py.

vllm_engine.py BACKEND FOLDER [MODEL …]    writes FOLDER/BACKEND.json, a list of (tokens, log-probabilities) a model

BACKEND: "CPU_ATTN" for vLLM's own, "CUFLASH", or "SHIFTED" for cuflash with windows that are too wide by one key. The
CPU platform takes no other backend than CPU_ATTN, so this name is given the class of CUFLASH.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

os.environ |= {
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "2",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "WARNING",
}

import torch
import transformers
from vllm import LLM, SamplingParams

SIZES = {
    "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4, "head_dim": 32,
    "num_key_value_heads": 2, "vocab_size": 1000, "max_position_embeddings": 1024, "initializer_range": 0.12,
    "tie_word_embeddings": False,
}  # fmt: skip
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
BERT = {key: SIZES[key] for key in list(SIZES)[:4]} | {"vocab_size": 1000, "initializer_range": 0.3}
# Class of transformers, and its configuration. Windows are shorter than most prompts. gemma2 is the last: after drafts
# have imported numba, no further engine starts in a process.
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3": ("Qwen3ForCausalLM", SIZES),
    "mistral": ("MistralForCausalLM", SIZES | {"sliding_window": 33}),
    "gpt_oss": ("GptOssForCausalLM", SIZES | EXPERTS | {"sliding_window": 40}),
    "bert": ("BertModel", BERT),
    "gemma2": (
        "Gemma2ForCausalLM",
        SIZES
        | {
            "sliding_window": 48,
            "attn_logit_softcapping": 5.0,
            "query_pre_attn_scalar": 32,
            "tie_word_embeddings": True,
        },
    ),
}
LENGTHS = (5, 17, 64, 200, 130)
NEW_TOKENS = 16


def make(name: str, folder: Path) -> Path:
    """Saves a random model; returns its folder."""
    path = folder / name
    if not path.exists():
        torch.manual_seed(0)
        class_name, settings = MODELS[name]
        model_class = getattr(transformers, class_name)
        model = model_class(model_class.config_class(**settings))
        for parameter, weight in model.named_parameters():
            if parameter.endswith("sinks"):
                torch.nn.init.normal_(weight.data, 2.0)
            elif name == "gemma2" and "embed_tokens" in parameter:
                weight.data *= 0.1  # tied to the output: larger ones would repeat the last token
        model.save_pretrained(path)
        if name == "bert":  # vLLM asks for the tokenizer of an encoder
            words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *map(str, range(995))]
            (path / "vocab.txt").write_text("\n".join(words), "utf-8")
            (path / "tokenizer_config.json").write_text('{"tokenizer_class": "BertTokenizer"}', "utf-8")
    return path


def prompts() -> list[dict[str, list[int]]]:
    """Returns prompts of different lengths, and at last one with a prefix of another."""
    generator = torch.Generator().manual_seed(0)
    ids = [torch.randint(3, 1000, (length,), generator=generator).tolist() for length in LENGTHS]
    return [{"prompt_token_ids": each} for each in [*ids, [*ids[3][:150], 7, 8, 9]]]


def results(name: str, folder: Path) -> list[Any]:
    """Returns tokens and log-probabilities of each prompt; for an encoder no tokens, and its embedding."""
    if name == "bert":
        settings: dict[str, Any] = {"runner": "pooling"}
    else:  # prompts of 200 tokens are computed in chunks
        settings = {"enable_prefix_caching": True, "max_num_batched_tokens": 128, "skip_tokenizer_init": True}
    if name == "gemma2":  # its output repeats itself, so tokens are drafted
        settings["speculative_config"] = {
            "method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1, "prompt_lookup_max": 2,
        }  # fmt: skip
    engine = LLM(
        str(make(name, folder)), dtype="float32", max_model_len=512, max_num_seqs=8,
        enforce_eager=True, seed=0, **settings,
    )  # fmt: skip
    if name == "bert":
        return [([], each.outputs.embedding) for each in engine.embed(prompts(), use_tqdm=False)]
    sampling = SamplingParams(temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True, detokenize=False, logprobs=1)
    rows = []
    for batch in (prompts()[:-1], prompts()[-1:]):  # the last prompt finds its prefix in the cache
        for each in engine.generate(batch, sampling, use_tqdm=False):
            tokens = list(each.outputs[0].token_ids)
            steps = zip(tokens, each.outputs[0].logprobs, strict=True)
            rows.append((tokens, [step[token].logprob for token, step in steps]))
            if batch == prompts()[-1:]:
                assert each.num_cached_tokens > 0
    return rows


def main(backend: str, path: str, *names: str) -> None:
    """Runs the models, and writes results and numbers of calls to a file: all of cuflash, and those of drafts."""
    from vllm.plugins import load_general_plugins
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    calls = drafts = 0
    load_general_plugins()  # registers the name CUFLASH
    if backend != "CPU_ATTN":
        from cuflash.frameworks.vllm.implementation import Implementation

        register_backend(AttentionBackendEnum.CPU_ATTN, AttentionBackendEnum["CUFLASH"].get_path())
        forward, window = Implementation.forward, Implementation._window

        def counted(self: Any, *args: Any, **kwargs: Any) -> Any:
            nonlocal calls, drafts
            calls += 1
            drafts += args[5] is not None and 2 <= args[5].max_query_len <= 4
            return forward(self, *args, **kwargs)

        def shifted(self: Any, causal: bool) -> tuple[int, int]:
            left, right = window(self, causal)
            return left + (left >= 0), right

        Implementation.forward = counted
        if backend == "SHIFTED":
            Implementation._window = shifted
    rows = {name: results(name, Path(path)) for name in names or MODELS}
    Path(path, f"{backend}.json").write_text(json.dumps({"results": rows, "calls": calls, "drafts": drafts}), "utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
