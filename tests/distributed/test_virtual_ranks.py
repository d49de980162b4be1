"""Attention over virtual ranks, threads of one process, beside one call: drawn cases, and equal bits."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")

from rank_cases import Case
from virtual_ranks import drawn, failures, run_ranks

from cuflash import forward, mods
from cuflash.distributed import Layout, attention, ring, unshard
from cuflash.distributed.exchange import Link, Parcel, arrivals
from cuflash.errors import ProblemError, UnsupportedError
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


def test_rows_that_are_not_the_ranks_are_refused_before_anything_is_sent() -> None:
    def refused(rank: int) -> str:
        with pytest.raises(ProblemError) as caught:
            unshard(torch.zeros(1, 5, 2), Layout(12, 2))
        return str(caught.value)

    assert run_ranks(2, refused)[1].startswith("x has 5 rows along axis 1, but rank 1 of the layout holds 6")


@pytest.mark.parametrize("ranks", [1, 2, 3, 5])
def test_parcels_arrive_in_turn(ranks: int) -> None:
    def steps_of(rank: int) -> None:
        for ahead in (1, 2):
            first = Parcel.pack([torch.full((3,), float(rank))])
            link = Link(torch.distributed.group.WORLD, rank, ranks, "a test")
            for step, parcel in enumerate(arrivals(first, link, ahead)):
                assert parcel.tensors[0].tolist() == [(rank - step) % ranks] * 3

    run_ranks(ranks, steps_of)


@pytest.mark.parametrize("ranks", [1, 2, 3, 5])
def test_a_ring_on_nccl_begins_a_transfer_ahead(ranks: int, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Link, "is_nccl", lambda link, x: True)
    for mask in MASKS:
        for seqlen in (200, [0, 70, 200]):
            assert not failures(case_of("ring", device, Layout(seqlen, ranks), 64, **mask), 0, device)


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
    for seqlen, names in ((50, frozenset({"sinks"})), ([0, 20, 50], frozenset[str]())):
        for mask in MASKS:
            case = Case(Layout(seqlen, 3), "ring", 1, (4, 2), (16, limit + wider), {**mask}, names, dtype)
            assert not failures(case, 0, "cpu")
    assert (True in accumulates) == (not wider)


def attended(layout: Layout, arrays: Any, **options: Any) -> torch.Tensor:
    """Returns out of all ranks. A bias is that of the whole sequence."""
    bias = options.pop("bias")
    has_rows = bias.dim() > 1 and bias.shape[-2] > 1
    parts = [layout.shard(bias, bias.dim() - 2, rank) if has_rows else bias for rank in range(layout.ranks)]
    outs = run_ranks(layout.ranks, lambda rank: attention(
        *(layout.shard(x, 1, rank) for x in arrays), layout=layout, bias=parts[rank], **options
    ))  # fmt: skip
    return layout.join(outs)


@pytest.mark.parametrize("scheme", ["ring", "gather", "ulysses"])
def test_a_bias_of_any_shape_and_dtype(scheme: str) -> None:
    layout, arrays = Layout(20, 2), torch.randn(3, 2, 20, 4, 8)
    biases = [torch.randn(shape) for shape in ((), (20,), (1, 20), (4, 1, 20), (2, 4, 1, 1))]
    biases += [] if scheme == "ulysses" else [torch.randn(20, 1), torch.randn(2, 1, 20, 20)]
    for bias in (*biases, *(x > -1 for x in biases), biases[1].bfloat16()):
        out = attended(layout, arrays, bias=bias, scheme=scheme, causal=True)
        assert torch.allclose(out, whole_attention(*arrays, causal=True, bias=bias), atol=1e-5), bias


@pytest.mark.parametrize("layout", [Layout(4, 4, "contiguous"), Layout(3, 2), Layout(12, 8), Layout(2, 4)], ids=str)
def test_a_bias_with_rows_where_ranks_hold_one_row_or_none(layout: Layout) -> None:
    arrays, bias = torch.randn(3, 1, layout.seqlen, 8, 8), torch.randn(8, layout.seqlen, layout.seqlen)
    expected = whole_attention(*arrays, bias=bias)
    for scheme in ("auto", "ring", "gather"):
        assert torch.allclose(attended(layout, arrays, bias=bias, scheme=scheme), expected, atol=1e-5), scheme
    with pytest.raises(UnsupportedError, match="a bias with rows of its own is sharded by rows, not by heads"):
        attended(layout, arrays, bias=bias, scheme="ulysses")


@pytest.mark.parametrize("shape", [(20,), (4, 1, 20), (4, 20, 20), (20, 1)])
def test_a_bias_of_packed_documents_is_that_of_the_sequence(shape: tuple[int, ...]) -> None:
    layout, arrays, bias = Layout([0, 5, 20], 2), torch.randn(3, 1, 20, 4, 8), torch.randn(shape)
    document = torch.tensor([0] * 5 + [1] * 15)
    expected = whole_attention(*arrays, bias=bias, causal=True, mask_mod=lambda b, h, i, j: document[i] == document[j])
    for scheme in ("auto", "ring", "gather"):
        out = attended(layout, arrays, bias=bias, scheme=scheme, causal=True)
        assert torch.allclose(out, expected, atol=1e-5), scheme
    with pytest.raises(UnsupportedError, match="give scheme='gather', 'ring' or 'auto'"):
        attended(layout, arrays, bias=bias, scheme="ulysses", causal=True)


@pytest.mark.parametrize("scheme", ["ring", "gather", "ulysses"])
@pytest.mark.parametrize("shape", [(4, 1, 1), (1, 1, 1), (4, 1, 20)])
def test_a_bias_that_score_mod_also_reads_has_one_gradient(scheme: str, shape: tuple[int, ...]) -> None:
    layout, (q, k, v, dout) = Layout(20, 2), torch.randn(4, 1, 20, 4, 8)
    table = torch.randn(shape)

    def gradient(rank: int | None) -> torch.Tensor:
        x = table.clone().requires_grad_()

        def score_mod(score: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
            return score + x[h if shape[0] > 1 else 0, 0, 0] * (i - j) * 0.1

        if rank is None:
            out, target = whole_attention(q, k, v, bias=x, score_mod=score_mod), dout
        else:
            out = attention(*(layout.shard(y, 1, rank) for y in (q, k, v)), layout=layout, scheme=scheme, bias=x,
                            score_mod=score_mod)  # fmt: skip
            target = layout.shard(dout, 1, rank)
        return torch.autograd.grad((out * target).sum(), x)[0]

    assert torch.allclose(sum(run_ranks(2, gradient)), gradient(None), atol=1e-4)


@pytest.mark.parametrize("scheme", ["ring", "gather", "ulysses"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_gradients_share_no_memory(scheme: str, dtype: torch.dtype) -> None:
    def gradients(rank: int) -> None:
        leaves = [torch.randn(1, 10, 4, 8, dtype=dtype, requires_grad=True) for _ in range(3)]
        loss = attention(*leaves, layout=Layout(20, 2), scheme=scheme).float().sum()
        grads = torch.autograd.grad(loss, leaves, create_graph=True)
        for grad in grads:
            grad.mul_(2)
        storages = [x.untyped_storage() for x in grads]
        assert len({x.data_ptr() for x in storages}) == 3
        assert all(x.nbytes() == leaves[0].nbytes for x in storages)

    run_ranks(2, gradients)


@pytest.mark.parametrize(("scheme", "most"), [("ring", 5e-4), ("ulysses", 5e-4), ("gather", 3.1e-3)])
def test_gradients_of_16_bits_are_sums_in_float32(scheme: str, most: float) -> None:
    """Kernels of "gather" round each rank's part, which is 2.8e-3; sums in 16 bits would make it 3.6e-3."""
    generator, layout = torch.Generator().manual_seed(0), Layout(64, 4)
    q, k, v, dout = torch.randn(4, 1, 64, 8, 16, generator=generator).bfloat16()

    def dv(rank: int | None) -> torch.Tensor:
        leaves = [x.clone().requires_grad_() for x in (q, k, v)]
        if rank is None:
            out, target = whole_attention(*(x.double() for x in leaves)), dout.double()
        else:
            out = attention(*(layout.shard(x, 1, rank) for x in leaves), layout=layout, scheme=scheme)
            target = layout.shard(dout, 1, rank)
        return torch.autograd.grad((out * target).sum(), leaves[2])[0].double()

    exact = dv(None)
    assert (sum(run_ranks(4, dv)) - exact).norm() < most * exact.norm()


@pytest.mark.parametrize("scheme", ["ring", "gather", "ulysses"])
def test_ranks_exchange_the_same_dtypes(scheme: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Under "gather" some ranks add gradients of keys up and others move them."""
    dtypes: dict[int, list[torch.dtype]] = {}
    send = torch.distributed.all_to_all_single

    def spied(received: Any, sent: Any, *counts: Any, **keywords: Any) -> Any:
        assert received.dtype == sent.dtype
        dtypes.setdefault(torch.distributed.get_rank(), []).append(sent.dtype)
        return send(received, sent, *counts, **keywords)

    monkeypatch.setattr(torch.distributed, "all_to_all_single", spied)
    for layout in (Layout(30, 3), Layout(30, 3, "contiguous"), Layout([0, 4, 11, 30], 3, "balanced", chunk=4)):
        dtypes.clear()

        def differentiate(rank: int, layout: Layout = layout) -> None:
            leaves = [torch.randn(1, layout.rows[rank], 3, 8).bfloat16().requires_grad_() for _ in range(3)]
            attention(*leaves, layout=layout, scheme=scheme, window_size=(3, 0)).sum().backward()

        run_ranks(3, differentiate)
        assert dtypes[0] == dtypes[1] == dtypes[2]


@pytest.mark.parametrize("scheme", ["ring", "gather", "ulysses"])
def test_a_second_derivative_is_refused(scheme: str) -> None:
    def penalized(rank: int) -> None:
        x = torch.randn(1, 10, 4, 8, requires_grad=True)
        loss = attention(x, x, x, layout=Layout(20, 2), scheme=scheme).sum()
        (grad,) = torch.autograd.grad(loss, x, create_graph=True)
        with pytest.raises(UnsupportedError, match="no second derivative"):
            (loss + grad.square().sum()).backward()

    run_ranks(2, penalized)


@pytest.mark.parametrize("scheme", ["ring", "gather", "ulysses"])
def test_training_after_inference_with_an_equal_layout(scheme: str) -> None:
    def steps(rank: int) -> None:
        layout = Layout([0, 3, 22], 2)
        q, k, v = torch.randn(3, 1, layout.rows[rank], 4, 8)
        with torch.inference_mode():
            attention(q, k, v, layout=layout, scheme=scheme, score_mod=lambda s, b, h, i, j: s * mods.seqlen_k())
        leaves = [x.requires_grad_() for x in (q, k, v)]
        out = attention(*leaves, layout=layout, scheme=scheme, score_mod=lambda s, b, h, i, j: s * mods.seqlen_k())
        out.sum().backward()

    run_ranks(2, steps)


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
