"""Attention over virtual ranks, threads of one process, beside one call: drawn cases, and equal bits."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")

from rank_cases import Case
from virtual_ranks import drawn, failures, run_ranks

from cuflash import forward
from cuflash.distributed import Layout, attention, ring
from cuflash.frameworks.torch import attention as whole_attention

COUNTS = {"cpu": 6, "cuda": 20}  # cases of each number of ranks, unless --drawn gives a number
MASKS: tuple[dict[str, Any], ...] = (
    {}, {"causal": True}, {"window_size": (150, 0)}, {"window_size": (40, 70), "softcap": 5.0}
)  # fmt: skip


def case_of(scheme: str, device: str, layout: Layout, dim: int, **options: Any) -> Case:
    """Returns a deterministic case with 8 query heads and 4 kv heads."""
    dtype = torch.float32 if device == "cpu" else {64: torch.float16, 128: torch.bfloat16}[dim]
    return Case(layout, scheme, 1, (8, 4), (dim, dim), options | {"deterministic": True}, frozenset(), dtype)


@pytest.mark.slow(60)
@pytest.mark.parametrize("ranks", [4, 8])
def test_drawn_cases_are_those_of_one_call(ranks: int, device: str, request: pytest.FixtureRequest) -> None:
    count = request.config.getoption("drawn") or COUNTS[device]
    assert not drawn(ranks, 0, count, device)


@pytest.mark.parametrize("cut", [{"split_size": 256}, {"num_splits": 1}], ids=str)
@pytest.mark.parametrize("dim", [64, 128])
def test_ulysses_has_the_bits_of_one_call(dim: int, cut: dict[str, int], device: str) -> None:
    rows = 100 if device == "cpu" else 1000
    for mask in MASKS:
        for seqlen in (rows, [0, rows // 3, rows // 3 + 1, rows]):
            assert not failures(case_of("ulysses", device, Layout(seqlen, 4), dim, **mask, **cut), 0, device)


@pytest.mark.gpu
@pytest.mark.parametrize("cut", [{"split_size": 256}, {"num_splits": 1}], ids=str)
@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("kind", ["zigzag", "contiguous", "balanced"])
def test_gpu_gather_has_the_bits_of_one_call(kind: Any, dim: int, cut: dict[str, int]) -> None:
    for mask in MASKS:
        for seqlen in (1000, [0, 333, 334, 1000]):
            layout = Layout(seqlen, 4, kind, chunk=90)
            assert not failures(case_of("gather", "cuda", layout, dim, **mask, **cut), 0, "cuda")


def test_a_ring_repeats_its_bits(device: str) -> None:
    for seqlen in (200, [0, 70, 200]):
        for mask in MASKS:
            assert not failures(case_of("ring", device, Layout(seqlen, 4), 64, **mask), 0, device)


@pytest.mark.parametrize(("dtype", "limit"), [(torch.float32, 128), (torch.bfloat16, 256)], ids=str)
@pytest.mark.parametrize("wider", [0, 8])
def test_a_ring_takes_any_head_dim_v(
    dtype: torch.dtype, limit: int, wider: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    accumulates = set()

    def spied(*arrays: Any, **keywords: Any) -> Any:
        accumulates.add(keywords.get("accumulate", False))
        return forward(*arrays, **keywords)

    monkeypatch.setattr(ring, "_forward", spied)
    for seqlen, mods in ((50, frozenset({"sinks"})), ([0, 20, 50], frozenset[str]())):
        for mask in MASKS:
            case = Case(Layout(seqlen, 3), "ring", 1, (4, 2), (16, limit + wider), {**mask}, mods, dtype)
            assert not failures(case, 0, "cpu")
    assert (True in accumulates) == (not wider)


@pytest.mark.parametrize("scheme", ["ring", "gather", "ulysses"])
def test_a_bias_of_any_shape_and_dtype(scheme: str) -> None:
    layout, (q, k, v) = Layout(20, 2), torch.randn(3, 2, 20, 4, 8)
    biases = [torch.randn(shape) for shape in ((), (20,), (1, 20), (4, 1, 20), (2, 4, 1, 1))]
    biases += [] if scheme == "ulysses" else [torch.randn(20, 1), torch.randn(2, 1, 20, 20)]
    for bias in (*biases, *(x > -1 for x in biases), biases[1].bfloat16()):
        has_rows = bias.dim() > 1 and bias.shape[-2] > 1
        parts = [layout.shard(bias, bias.dim() - 2, rank) if has_rows else bias for rank in range(2)]
        outs = run_ranks(2, lambda rank, parts=parts: attention(  # type: ignore[misc]
            *(layout.shard(x, 1, rank) for x in (q, k, v)), layout=layout, scheme=scheme, causal=True, bias=parts[rank]
        ))  # fmt: skip
        expected = whole_attention(q, k, v, causal=True, bias=bias)
        assert torch.allclose(layout.join(outs), expected, atol=1e-5), (bias.shape, bias.dtype)


@pytest.mark.parametrize("scheme", ["ring", "gather", "ulysses"])
def test_a_table_that_changes_before_backward_is_found(scheme: str) -> None:
    layout = Layout(20, 2)

    def changed(rank: int) -> str:
        x, table = torch.randn(1, 10, 4, 8, requires_grad=True), torch.ones(4)
        out = attention(x, x, x, layout=layout, scheme=scheme, score_mod=lambda s, b, h, i, j: s * table[h])
        table.mul_(2)
        try:
            out.sum().backward()
        except RuntimeError as error:
            return str(error)
        return "no error"

    assert all("modified by an inplace operation" in text for text in run_ranks(2, changed))


def test_an_error_of_a_rank_ends_the_others() -> None:
    def fails(rank: int) -> None:
        if rank == 1:
            raise ValueError("rank 1 fails")
        torch.distributed.barrier()

    with pytest.raises(ValueError, match="rank 1 fails"):
        run_ranks(3, fails)
    assert run_ranks(3, lambda rank: torch.distributed.get_rank() - rank) == [0, 0, 0]
    assert not torch.distributed.is_initialized()
