"""transformers' models on packed rows and padded batches: each sequence has the result of a separate call."""

from __future__ import annotations

import logging
from typing import Any

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers", minversion="5.0")

from models import IDS, ONES, as_exact_as, close, counted_calls, exact_model, heads, layer, model_of

import cuflash.frameworks.transformers as bridge
from cuflash.errors import ProblemError
from cuflash.frameworks.transformers import models as tables
from cuflash.frameworks.transformers.masks import Pattern, SequenceMask

__all__ = ["counted_calls"]  # the fixture
LENGTHS = (7, 1, 9, 12)  # most windows of the models are shorter
NAMES = ("llama", "mistral", "qwen2", "gemma2", "deepseek")
BOUNDS = torch.tensor([0, 7, 8, 17, 29], dtype=torch.int32)
ROW = torch.randint(1, 64, (1, sum(LENGTHS)), generator=torch.Generator().manual_seed(3))
POSITIONS = torch.cat([torch.arange(n) for n in LENGTHS])[None]


def collated(**arguments: Any) -> dict[str, Any]:
    """Returns the padding-free collator's batch of the sequences, and its labels."""
    collator = transformers.DataCollatorWithFlattening(return_tensors="pt", **arguments)
    return dict(collator([{"input_ids": part.tolist()} for part in ROW[0].split(LENGTHS)]))


WAYS: dict[str, dict[str, Any]] = {
    "a mask of packed rows": {"position_ids": POSITIONS, "use_cache": False},
    "positions beside a new cache": {"position_ids": POSITIONS, "use_cache": True},
    "bounds": {"cu_seq_lens_q": BOUNDS, "cu_seq_lens_k": BOUNDS, "max_length_q": 12, "max_length_k": 12,
               "position_ids": POSITIONS, "use_cache": True},
    "bounds of 64 bits": {"cu_seq_lens_q": BOUNDS.long(), "cu_seq_lens_k": BOUNDS.long(), "position_ids": POSITIONS,
                          "max_length_q": torch.tensor(12), "max_length_k": torch.tensor(12)},
}  # fmt: skip


def one_by_one(model: Any, dtype: Any = torch.float32) -> Any:
    """Returns the logits of separate calls, concatenated."""
    model = model.to(dtype)
    return torch.cat([model(part, use_cache=False).logits for part in ROW.split(LENGTHS, 1)], 1)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", NAMES)
@torch.no_grad()
def test_packed_rows_equal_separate_sequences(name: str, way: str, calls: dict[str, int]) -> None:
    got = model_of(name, "cuflash")(ROW, **WAYS[way]).logits
    assert calls == {"cuflash": 2, "sdpa": 0}
    close(got, one_by_one(exact_model(name), torch.float64), one_by_one(model_of(name, "eager")))
    with torch.inference_mode():
        again = model_of(name, "cuflash")(ROW.clone(), **WAYS[way]).logits
    assert torch.equal(again, got)


@torch.no_grad()
def test_several_packed_rows(calls: dict[str, int]) -> None:
    ids, positions = torch.cat([ROW, ROW.flip(1)]), torch.cat([POSITIONS, torch.arange(29)[None]])
    models = model_of("mistral", "cuflash"), exact_model("mistral"), model_of("mistral", "sdpa")
    results = [model(ids, position_ids=positions, use_cache=False).logits for model in models]
    assert calls == {"cuflash": 2, "sdpa": 0}
    close(*results)


@pytest.mark.parametrize("bounds", [False, True])
@pytest.mark.parametrize("checkpoints", [False, True])
def test_padding_free_training_steps_equal_separate_sequences(
    bounds: bool, checkpoints: bool, calls: dict[str, int]
) -> None:
    batch, results = collated(return_flash_attn_kwargs=bounds), []
    for implementation, dtype in (("cuflash", torch.float32), ("eager", torch.float64), ("eager", torch.float32)):
        model = model_of("mistral", implementation).to(dtype).train()
        if implementation == "cuflash":
            if checkpoints:
                model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
            loss = model(**batch).loss
        else:
            losses = [model(part, labels=part, use_cache=False).loss * (part.shape[1] - 1)
                      for part in ROW.split(LENGTHS, 1) if part.shape[1] > 1]  # fmt: skip
            loss = sum(losses) / (sum(LENGTHS) - len(LENGTHS))
        loss.backward()
        results.append({key: x.grad for key, x in model.named_parameters()} | {"loss": loss})
    assert calls["sdpa"] == 0
    for key in results[0]:
        close(*(each[key] for each in results))


@pytest.mark.parametrize("bounds", [False, True])
def test_models_compile_whole_over_packed_rows(bounds: bool) -> None:
    batch = collated(return_flash_attn_kwargs=bounds)
    batch.pop("labels")
    compiled = torch.compile(model_of("mistral", "cuflash"), backend="eager", fullgraph=True)
    with torch.no_grad():
        peers = one_by_one(exact_model("mistral"), torch.float64), one_by_one(model_of("mistral", "eager"))
        close(compiled(**batch, use_cache=False).logits, *peers)


@pytest.mark.parametrize("side", ["left", "right", "both", "all"])
@pytest.mark.parametrize("name", NAMES)
@torch.no_grad()
def test_padding_on_the_sides_hides_itself(name: str, side: str, calls: dict[str, int]) -> None:
    mask = ONES.clone()
    if side in ("left", "both"):
        mask[0, :4] = 0
    if side in ("right", "both"):
        mask[1, 7:] = mask[0, 10:] = 0
    if side == "all":
        mask[0] = 0
        mask[1, :2] = 0
    got = model_of(name, "cuflash")(IDS * mask, attention_mask=mask).logits
    assert calls == {"cuflash": 2, "sdpa": 0}
    peers = exact_model(name), model_of(name, "eager")
    for row, valid in enumerate(mask.bool()):
        token_positions = valid.nonzero().flatten()[None]
        if token_positions.numel():
            alone = (peer(IDS[row, token_positions], position_ids=token_positions).logits for peer in peers)
            close(got[row : row + 1, valid], *alone)


@torch.no_grad()
def test_a_prompt_with_padding_in_parts_on_a_growing_cache(calls: dict[str, int]) -> None:
    mask = ONES.clone()
    mask[0, :6] = 0
    model, cache, parts = model_of("mistral", "cuflash"), None, []
    positions = (mask.cumsum(1) - 1).clamp(0)
    for begin, end in ((0, 4), (4, 9), (9, 10), (10, 11)):
        done = model(IDS[:, begin:end], attention_mask=mask[:, :end], past_key_values=cache, use_cache=True,
                     position_ids=positions[:, begin:end])  # fmt: skip
        cache = done.past_key_values
        parts.append(done.logits)
    assert calls == {"cuflash": 8, "sdpa": 0}
    peers = [peer(IDS, attention_mask=mask, position_ids=positions).logits
             for peer in (exact_model("mistral"), model_of("mistral", "eager"))]  # fmt: skip
    close(torch.cat(parts, 1)[mask.bool()], *(x[mask.bool()] for x in peers))


def test_padding_of_an_encoder_is_hidden_from_its_decoder(calls: dict[str, int]) -> None:
    config = transformers.BartConfig(
        d_model=32, encoder_layers=1, decoder_layers=1, encoder_attention_heads=4, decoder_attention_heads=4,
        encoder_ffn_dim=16, decoder_ffn_dim=16, vocab_size=64,
    )  # fmt: skip
    mask = ONES.clone()
    mask[1, 7:] = mask[0, :2] = 0
    kwargs = {"attention_mask": mask, "decoder_input_ids": IDS[:, :7]}
    as_exact_as("sdpa", transformers.BartForConditionalGeneration, config, **kwargs)
    assert calls == {"cuflash": 3, "sdpa": 0}


def test_masks_become_tensors_only_when_read(monkeypatch: pytest.MonkeyPatch) -> None:
    masks: list[Any] = []
    make = bridge.cuflash_mask
    monkeypatch.setattr(bridge, "cuflash_mask", lambda **kwargs: masks.append(make(**kwargs)) or masks[-1])
    bridge.register()
    mask = ONES.clone()
    mask[1, 7:] = 0
    with torch.no_grad():
        model_of("llama", "cuflash")(IDS, attention_mask=mask)
    monkeypatch.undo()
    bridge.register()
    (packed_mask,) = masks
    assert isinstance(packed_mask, SequenceMask)
    assert (packed_mask.shape, packed_mask.dtype, packed_mask.dim(), packed_mask.size(3)) == (
        (2, 1, 11, 11),
        torch.bool,
        4,
        11,
    )
    assert packed_mask[:, :, :, :11] is packed_mask
    assert packed_mask[:, :, -11:, :40] is packed_mask
    assert "_whole" not in vars(packed_mask)
    visible = mask.bool()[:, None, None] & torch.ones(11, 11, dtype=torch.bool).tril()
    for got, expected in (
        (packed_mask[:, :, :4], visible[:, :, :4]),
        (packed_mask[0], visible[0]),
        (packed_mask.to("cpu"), visible),
        (torch.cat([packed_mask, packed_mask], -1), torch.cat([visible, visible], -1)),
        (~packed_mask, ~visible),
        (packed_mask & packed_mask.new_ones(()), visible),
    ):
        assert type(got) is torch.Tensor
        assert torch.equal(got, expected)


def test_cut_masks_become_tensors(calls: dict[str, int]) -> None:
    mask = ONES.clone()
    mask[1, 7:] = 0
    model = model_of("llama", "cuflash")
    sequence_mask = transformers.masking_utils.create_causal_mask(model.config, torch.zeros(2, 11, 32), mask, None)
    assert isinstance(sequence_mask, SequenceMask)
    out, _ = bridge.cuflash_attention_forward(layer(), *heads(6, 6), sequence_mask[:, :, 5:, 5:])
    assert calls == {"cuflash": 1, "sdpa": 0}
    assert out.shape == (2, 6, 4, 8)


def test_patterns_are_read_from_known_functions_alone() -> None:
    utils = transformers.masking_utils
    causal, window = utils.causal_mask_function, utils.sliding_window_causal_mask_function(4)
    ids = torch.zeros(1, 5)
    packed = utils.and_masks(utils.packed_sequence_mask_function(ids), window)
    if hasattr(utils, "packed_sequence_compatibility_function"):  # transformers 5.23
        packed = utils.packed_sequence_compatibility_function(window, ids, ids)
    assert Pattern.from_function(causal) == (True, None, None)
    assert Pattern.from_function(window) == (True, 4, None)
    assert Pattern.from_function(packed)[:2] == (True, 4)
    assert Pattern.from_function(packed).packed is ids
    assert Pattern.from_function(utils.bidirectional_mask_function) == (False, None, None)
    chunks = utils.chunked_causal_mask_function(4, torch.zeros(1))
    for other in (chunks, utils.or_masks(causal, window), utils.and_masks(causal, lambda b, h, q, k: q >= k),
                  utils.and_masks(window, window), utils.sliding_window_overlay(3),
                  utils.sliding_window_bidirectional_mask_function(3)):  # fmt: skip
        assert Pattern.from_function(other) is None


def test_bounds_beside_a_mask_tensor_apply(calls: dict[str, int]) -> None:
    bounds = torch.tensor([0, 4, 6, 12])
    causal = torch.ones(6, 6, dtype=torch.bool).tril().expand(2, 1, 6, 6)
    inputs, both = heads(), {"cu_seq_lens_q": bounds, "cu_seq_lens_k": bounds}
    expected, _ = bridge.cuflash_attention_forward(layer(), *inputs, None, max_length_q=6, max_length_k=6, **both)
    for mask in (causal, torch.zeros(causal.shape).masked_fill(~causal, torch.finfo(torch.float32).min)):
        out, _ = bridge.cuflash_attention_forward(layer(), *inputs, mask, **both)
        torch.testing.assert_close(out, expected)
    assert calls == {"cuflash": 3, "sdpa": 0}
    with pytest.raises(ProblemError, match="cu_seq_lens_q was given without cu_seq_lens_k"):
        bridge.cuflash_attention_forward(layer(), *inputs, None, cu_seq_lens_q=bounds)


def test_changed_positions_are_read_again() -> None:
    query, key, value = (x[:1] for x in heads())
    positions = torch.arange(6)[None]
    whole = bridge.cuflash_attention_forward(layer(), query, key, value, None, position_ids=positions)[0]
    positions[0, 3:] -= 3
    parts = bridge.cuflash_attention_forward(layer(), query, key, value, None, position_ids=positions)[0]
    torch.testing.assert_close(parts[:, :3], whole[:, :3])
    alone = bridge.cuflash_attention_forward(layer(), *(x[:, :, 3:] for x in (query, key, value)), None)[0]
    torch.testing.assert_close(parts[:, 3:], alone)


def test_layers_on_sdpa_are_logged_once_for_a_model(caplog: pytest.LogCaptureFixture) -> None:
    tables._log_sdpa.cache_clear()
    between = ONES.clone()
    between[1, 4:7] = 0
    with torch.no_grad(), caplog.at_level(logging.DEBUG, "cuflash"):
        for _ in range(2):
            torch.compile(model_of("llama", "cuflash"), backend="eager")(IDS, attention_mask=between, use_cache=False)
            torch.compiler.reset()
    messages = [record.getMessage() for record in caplog.records if "sdpa" in record.getMessage()]
    assert messages == [
        "LlamaAttention of llama is compiled with a mask tensor: transformers' sdpa computes it, and not cuflash"
    ]
