"""SGLang's conformance kit of dense attention, and further cases, with the backend on the CPU.

`python sglang_cases.py kit` prints a JSON object: the name of each case, and its error or null.
"""

from __future__ import annotations

import argparse
import json
import sys
import traceback
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from sglang_kit import CPU, Case, ForwardMode, Skips, case_of, dense, kit

from cuflash.errors import ProblemError, UnsupportedError
from cuflash.frameworks.sglang import backend as backend_module
from cuflash.frameworks.sglang import checks


class Setup:
    """A backend of one layer, and a batch whose keys and values lie in its cache. changes: of the runner and its model.

    The first tokens of each sequence are in the cache; q, k and v are of the new tokens.
    """

    def __init__(self, case: Any, **changes: Any) -> None:
        torch.manual_seed(0)
        original = dense.ATTENTION_BACKENDS["cuflash"]
        dense.ATTENTION_BACKENDS["cuflash"] = lambda runner: self._create(runner, changes)
        try:
            self.fixture = dense.build_dense_attention_fixture(Skips(), case, **CPU)
        finally:
            dense.ATTENTION_BACKENDS["cuflash"] = original
        self.case, self.backend, self.batch = case, self.fixture.backend, self.fixture.forward_batch
        self.layer, self.runner = self.fixture.actual_module.attn, self.fixture.runner
        self.pool, self.table = self.runner.token_to_kv_pool, self.runner.req_to_token_pool.req_to_token
        self.q = torch.randn(case.num_input_tokens, case.num_heads * 16)
        self.k, self.v = torch.randn(2, case.num_input_tokens, case.num_kv_heads, 16)

    def _create(self, runner: Any, changes: dict[str, Any]) -> Any:
        for path, value in changes.items():
            owner, _, name = path.rpartition("__")
            setattr(getattr(runner, owner) if owner else runner, name, value)
        return backend_module.Backend(runner)

    def replay(self) -> None:
        """From now on, batches run as in a graph of up to four sequences."""
        self.backend.init_cuda_graph_state(4, 4)
        self.backend.init_forward_metadata = self.backend.init_forward_metadata_out_graph

    def run(self, **keywords: Any) -> Any:
        self.backend.init_forward_metadata(self.batch)
        return self.backend.forward(self.q, self.k, self.v, self.layer, self.batch, **keywords)

    def expected(self, keys_of: Any = None, softcap: float = 0.0, sinks: Any = None, window: Any = None) -> Any:
        """Returns out and lse, in float64. keys_of: slots of the keys of each sequence; all are visible with it."""
        pool = self.pool
        k_cache, v_cache = (x.double() for x in pool.get_kv_buffer(self.layer.layer_id))
        parts, first = [], 0
        for row, (new, total) in enumerate(zip(self.case.input_lens, self.case.seq_lens, strict=True)):
            slots = self.table[row, :total].long() if keys_of is None else keys_of[row]
            q = self.q[first : first + new].double().view(new, self.case.num_heads, 16).transpose(0, 1)
            group = self.case.num_heads // self.case.num_kv_heads
            k, v = (x[slots].transpose(0, 1).repeat_interleave(group, 0) for x in (k_cache, v_cache))
            scores = q @ k.transpose(1, 2) * self.layer.scaling
            scores = softcap * torch.tanh(scores / softcap) if softcap else scores
            distance = torch.arange(total - new, total)[:, None] - torch.arange(len(slots))
            if keys_of is None:
                scores = scores.masked_fill(
                    (distance < 0) | (distance > (total if window is None else window)), -torch.inf
                )
            logits = (
                scores if sinks is None else torch.cat([scores, sinks.double()[:, None, None].expand(-1, new, 1)], 2)
            )
            lse = logits.logsumexp(2)
            parts.append((((scores - lse[..., None]).exp() @ v).transpose(0, 1).flatten(1), lse.T))
            first += new
        return tuple(torch.cat(x).float() for x in zip(*parts, strict=True))


EXTEND = case_of("extend", "EXTEND", ((8, 16), (8, 5)), (4, 2))
DECODE = case_of("decode", "DECODE", ((14, 15, 16),), (4, 2))


def compare(out: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(out, expected, atol=2e-5, rtol=2e-5)


def check_options(case: Any, graph: bool = False) -> None:
    """Softcap, sinks and lse at once."""
    setup = Setup(case)
    setup.layer.logit_cap, sinks = 2.0, torch.randn(4)
    if graph:
        setup.replay()
    out, lse = setup.run(sinks=sinks, return_lse=True)
    expected, expected_lse = setup.expected(softcap=2.0, sinks=sinks)
    compare(out, expected)
    compare(lse, expected_lse)


def check_without_host_lengths() -> None:
    """A batch whose lengths are on the device alone."""
    setup = Setup(DECODE)
    setup.batch.seq_lens_cpu = None
    compare(setup.run(), setup.expected()[0])


def check_both_sides(kind: str) -> None:
    """An encoder's layer: all keys of a sequence are visible."""
    setup = Setup(case_of("encoder", "EXTEND", ((0, 0), (7, 12))))
    setup.layer.attn_type = backend_module.AttentionType[kind]
    out = setup.run()
    slots = [setup.table[row, :total].long() for row, total in enumerate(setup.case.seq_lens)]
    compare(out, setup.expected(slots)[0])


def check_encoder(case: Any, graph: bool = False) -> None:
    """A decoder with cross attention: slots of a request are of its encoder, then of its text."""
    setup = Setup(case, model_config__is_encoder_decoder=True)
    encoder_lens, text = (5, 0, 9)[: case.batch_size], setup.table[:, :40].clone()
    encoder_slots = []
    for row, count in enumerate(encoder_lens):
        slots = torch.arange(count) * 3 + 1
        encoder_slots.append(slots)
        setup.table[row, :count] = slots.to(torch.int32)
        setup.table[row, count : count + 40] = text[row]
    setup.batch.encoder_lens = torch.tensor(encoder_lens)
    if graph:
        setup.replay()
    out = setup.run()
    setup.table[:, :40] = text
    compare(out, setup.expected()[0])
    for row, count in enumerate(encoder_lens):
        setup.table[row, :count] = encoder_slots[row].to(torch.int32)
    setup.layer.is_cross_attention = True
    setup.backend.init_forward_metadata(setup.batch)
    out = setup.backend.forward(setup.q, None, None, setup.layer, setup.batch)
    compare(out, setup.expected(encoder_slots)[0])


def check_window_pool(case: Any, graph: bool = False) -> None:
    """A windowed layer, whose keys lie in a pool with slots of its own."""
    setup = Setup(case)
    full = setup.runner.token_to_kv_pool
    pool = backend_module.SWAKVPool(
        full.size, full.size, 16, torch.float32, 2, 16, [0], [1], "cpu", enable_alt_stream=False
    )
    # Pages are permuted: the pool of windows has other slots than the pool of all keys.
    pages = torch.cat([torch.zeros(1, dtype=torch.int64), torch.randperm((full.size + 16) // 16 - 1) + 1])
    pool.register_mapping((pages[:, None] * 16 + torch.arange(16)).flatten())
    keys = [x[setup.table[: case.batch_size].long()] for x in full.get_kv_buffer(0)]
    setup.runner.token_to_kv_pool, setup.layer.sliding_window_size = pool, 6
    setup.backend = backend_module.Backend(setup.runner)
    slots = pool.full_to_swa_index_mapping[setup.table[: case.batch_size].long()]
    for cache, x in zip(pool.get_kv_buffer(0), keys, strict=True):
        cache[slots] = x
    if graph:
        setup.replay()
        # A longer batch before, whose slots must not stay behind the new ones.
        setup.batch.out_cache_loc, locations = torch.full((4,), 33), setup.batch.out_cache_loc
        setup.backend.init_forward_metadata(setup.batch)
        setup.batch.out_cache_loc = locations
    out = setup.run()
    if graph:
        assert setup.backend.graph_buffers._buffers["window_slots"][3:].tolist() == [0]
    setup.pool, setup.table = pool, slots
    compare(out, setup.expected(window=6)[0])


def check_repeatable() -> None:
    """Repeatable inference passes split_size."""
    setup, calls = Setup(EXTEND), []
    setup.backend.split_size = backend_module.SPLIT_SIZE
    original = backend_module.forward
    backend_module.forward = lambda *args, **kwargs: (calls.append(kwargs["split_size"]), original(*args, **kwargs))[1]
    try:
        compare(setup.run(), setup.expected()[0])
    finally:
        backend_module.forward = original
    assert calls == [128]


def check_long_replay() -> None:
    """Arrays of a graph that was captured with short sequences keep their addresses for long ones."""
    setup = Setup(DECODE)
    setup.backend.init_cuda_graph_state(4, 4)
    lengths, setup.batch.seq_lens = setup.batch.seq_lens, torch.ones(3, dtype=torch.int32)
    setup.backend.init_forward_metadata_out_graph(setup.batch, in_capture=True)
    captured = setup.backend.forward_metadata
    setup.batch.seq_lens = lengths
    setup.backend.init_forward_metadata_out_graph(setup.batch)
    replayed = setup.backend.forward_metadata
    assert captured.max_seqlen_q == replayed.max_seqlen_q == 1
    assert captured.keys.max_seqlen == replayed.keys.max_seqlen >= 64
    for one, other in (
        (captured.cu_seqlens_q, replayed.cu_seqlens_q),
        *zip(captured.keys[::2], replayed.keys[::2], strict=True),
    ):
        assert one.data_ptr() == other.data_ptr()
        assert one.stride() == other.stride()
    setup.backend.forward_metadata = captured  # as the graph reads it
    out = setup.backend.forward(setup.q, setup.k, setup.v, setup.layer, setup.batch)
    compare(out, setup.expected()[0])


def check_bounds() -> None:
    """One more token leaves the bound on keys as it is, so that the next decode step is planned already."""
    setup, bounds = Setup(DECODE), set()
    for more in (0, 1):
        setup.batch.seq_lens_cpu = torch.tensor([15, 16, 17]) + more
        bounds.add(setup.backend.pages.metadata(setup.batch, in_graph=False).keys.max_seqlen)
    assert len(bounds) == 1
    assert bounds.pop() >= 18


def check_idle() -> None:
    """A rank without sequences returns as many rows as it gets."""
    setup = Setup(EXTEND)
    setup.batch.forward_mode = ForwardMode.IDLE
    assert setup.run().shape == (13, 64)
    compare((again := Setup(EXTEND)).run(), again.expected()[0])


def check_refused(words: str, **changes: Any) -> None:
    """A runner that the backend does not serve. The error has these words."""
    with pytest.raises(UnsupportedError, match=words):
        Setup(EXTEND, **changes)


def check_refused_call(words: str, change: Callable[[Setup], dict[str, Any]], case: Any = EXTEND) -> None:
    """A layer or batch that the backend does not serve. The error has these words."""
    setup = Setup(case)
    setup.run()
    setup.backend._checked_layers.clear()
    keywords = change(setup) or {}
    with pytest.raises((ProblemError, UnsupportedError), match=words):
        setup.run(**keywords)


def check_command_line() -> None:
    """SGLang's command line takes the name."""
    from sglang.srt.server_args import ServerArgs

    parser = argparse.ArgumentParser()
    ServerArgs.add_cli_args(parser)
    arguments = parser.parse_args(["--model-path", "none", "--attention-backend", "cuflash"])
    assert arguments.attention_backend == "cuflash"


def check_refused_option(words: str, name: str, **values: Any) -> None:
    """An option that the backend does not serve. name: SGLang's function that returns it."""
    with mock.patch.object(checks, name, return_value=SimpleNamespace(**values)):
        check_refused(words)


def of_batch(**values: Any) -> Callable[[Setup], None]:
    """Returns a change of the batch."""
    return lambda setup: [setattr(setup.batch, name, value) for name, value in values.items()] and None


def of_layer(**values: Any) -> Callable[[Setup], None]:
    """Returns a change of the layer."""
    return lambda setup: [setattr(setup.layer, name, value) for name, value in values.items()] and None


def further() -> Iterator[tuple[str, Case]]:
    """Yields cases that the kit does not have."""
    for case in (EXTEND, DECODE):
        yield f"options_{case.name}", lambda case=case: check_options(case)
        yield f"encoder_{case.name}", lambda case=case: check_encoder(case)
        yield f"window_pool_{case.name}", lambda case=case: check_window_pool(case)
    yield "options_graph", lambda: check_options(DECODE, graph=True)
    yield "window_pool_graph", lambda: check_window_pool(DECODE, graph=True)
    yield "encoder_graph", lambda: check_encoder(DECODE, graph=True)
    yield "without_host_lengths", check_without_host_lengths
    for kind in ("ENCODER_ONLY", "DECODER_BIDIRECTIONAL"):
        yield f"both_sides_{kind}", lambda kind=kind: check_both_sides(kind)
    yield "repeatable", check_repeatable
    yield "long_replay", check_long_replay
    yield "bounds", check_bounds
    yield "idle", check_idle
    refused: dict[str, dict[str, Any]] = {
        "MLA": {"model_config__attention_arch": checks.AttentionArch.MLA},
        "head dim 512": {"model_config__head_dim": 512},
        "--kv-cache-dtype auto": {"kv_cache_dtype": torch.float8_e4m3fn},
        "chunks of 8192": {"attention_chunk_size": 8192},
    }
    for words, changes in refused.items():
        yield f"refused_{words}", lambda words=words, changes=changes: check_refused(words, **changes)
    ranks = {"attn_dcp_size": 1, "attn_cp_size": 1}
    options: tuple[tuple[str, str, dict[str, Any]], ...] = (
        ("--dcp-size is 2", "get_parallel", ranks | {"attn_dcp_size": 2}),
        ("--attn-cp-size is 2", "get_parallel", ranks | {"attn_cp_size": 2}),
        ("speculative_eagle_topk=4", "get_spec", {"speculative_eagle_topk": 4}),
    )
    for words, name, values in options:
        yield (
            f"refused_{words}",
            lambda words=words, name=name, values=values: check_refused_option(words, name, **values),
        )
    yield "command_line", check_command_line
    tree = SimpleNamespace(topk=2, draft_token_num=3)
    calls = (
        ("--speculative-eagle-topk 1", of_batch(forward_mode=ForwardMode.TARGET_VERIFY, spec_info=tree), EXTEND),
        ("--speculative-draft-attention-backend", of_batch(spec_info=tree), DECODE),
        ("DLLM_EXTEND", of_batch(forward_mode=ForwardMode.DLLM_EXTEND), EXTEND),
        ("score_mod", lambda setup: {"score_mod": len}, EXTEND),
        ("encoder_lens", of_layer(is_cross_attention=True), EXTEND),
        ("xai_temperature_len", of_layer(xai_temperature_len=8), EXTEND),
        ("'tanh'", of_layer(logit_cap=3.0, logit_capping_method="tan"), EXTEND),
        ("head dims 16 and 512", of_layer(v_head_dim=512), EXTEND),
    )
    for words, change, case in calls:
        yield f"refused_{words}", lambda words=words, change=change, case=case: check_refused_call(words, change, case)


def error_of(name: str, run: Case) -> str | None:
    """Returns the error of a case, or None. A case that does not call cuflash has passed for no reason."""
    calls = []
    original = backend_module.forward
    backend_module.forward = lambda *args, **kwargs: (calls.append(1), original(*args, **kwargs))[1]
    try:
        with torch.no_grad():  # the cache of the CPU would record gradients
            run()
        assert calls or name.startswith(("refused", "command", "bounds")), "cuflash.forward was not called"
    except Exception:
        return "".join(traceback.format_exc().splitlines(keepends=True)[-6:])
    finally:
        backend_module.forward = original
    return None


if __name__ == "__main__":
    cases = dict({"kit": kit, "further": further}[sys.argv[1]]())
    print(json.dumps({name: error_of(name, run) for name, run in cases.items()}))
