"""Generates tokens by a transformers model with cuflash, and checks that PyTorch's attention gives the same tokens.

The model is a small Llama with random weights; for one from the hub, use
`from_pretrained(name, attn_implementation="cuflash")`. It runs on the GPU if there is one, else on the CPU. It exits
with 1 if a token differs.
"""

from __future__ import annotations

import sys
import time
from typing import Any

from packages import explain_missing

import cuflash

with explain_missing():
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from cuflash.frameworks.transformers import register

BATCH, PROMPT, NEW, HEADS, HEAD_DIM = 2, 100, 32, 4, 64


def main() -> int:
    """Generates with both implementations, compares, and reports."""
    register()
    device = find_device()
    prompt = torch.randint(1, 1000, (BATCH, PROMPT), generator=torch.Generator().manual_seed(0)).to(device)
    tokens = {name: generate(name, device, prompt) for name in ("cuflash", "sdpa")}
    differing = int((tokens["cuflash"] != tokens["sdpa"]).sum())
    print(f"{BATCH} prompts of {PROMPT} tokens, {NEW} tokens each after them, {differing} of which differ")
    print(f"The result is {'wrong' if differing else 'right'}.")
    return int(differing > 0)


def find_device() -> str:
    """Returns the device on which cuflash runs: "cuda" or "cpu"."""
    shape = (BATCH, PROMPT, HEADS, HEAD_DIM)
    try:
        if torch.cuda.is_available() and cuflash.plan(shape, shape, shape, dtype="float32").device != "cpu":
            print("Generating on the GPU with PyTorch tensors.")
            return "cuda"
    except cuflash.UnsupportedError as error:
        print(error)
    print("Generating on the CPU with PyTorch tensors, as there is no GPU to run on or no CuPy to reach it.")
    return "cpu"


def generate(implementation: str, device: str, prompt: Any) -> Any:
    """Returns greedily chosen tokens (batch, new tokens) of the model with one implementation of attention."""
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=HEADS * HEAD_DIM,
        intermediate_size=512,
        num_hidden_layers=2,
        num_attention_heads=HEADS,
        num_key_value_heads=2,
        vocab_size=1000,
        initializer_range=0.1,  # so that the tokens vary
        pad_token_id=0,
        eos_token_id=None,
    )
    model = LlamaForCausalLM._from_config(config, attn_implementation=implementation).to(device).eval()
    seconds = []
    for _ in range(2):
        started = time.perf_counter()
        tokens = model.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=NEW, do_sample=False)
        tokens = tokens[:, PROMPT:].cpu()
        seconds.append(time.perf_counter() - started)
    rate = BATCH * NEW / seconds[1]
    print(f"{implementation:8} {rate:6.0f} tokens/s (the first time {seconds[0]:.2f} s): {tokens[0, :8].tolist()} …")
    return tokens


if __name__ == "__main__":
    sys.exit(main())
