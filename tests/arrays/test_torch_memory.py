"""Memory of PyTorch's CPU tensors: calls read and write it, and storages stay resizable."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import cuflash
from cuflash import ProblemError, mods
from cuflash.arrays.torch import TorchLibrary
from cuflash.frameworks import flash_attn_interface as flash_attn
from cuflash.frameworks.torch import attention, flex_attention, sdpa_masks, triangle_attention

HEADS, ROWS = 4, 9
DTYPES = ("float16", "bfloat16", "float32", "float64", "bool", "int8", "uint8", "int16", "int32", "int64", "uint64")


def randoms(*shapes: tuple[int, ...], grad: bool = False) -> list[Any]:
    return [torch.randn(shape).requires_grad_(grad) for shape in shapes]


def integers(*values: Any) -> Any:
    return torch.tensor(values, dtype=torch.int32)


def qkv(grad: bool = False) -> list[Any]:
    return randoms(*[(2, ROWS, HEADS, 16)] * 3, grad=grad)


def packed(grad: bool = False) -> list[Any]:
    return randoms(*[(ROWS, HEADS, 16)] * 3, grad=grad)


Called = tuple[Iterable[Any], Iterable[Any]]  # the tensors of the caller, and the results


def forward() -> Called:
    q, k, v = qkv()
    out = torch.empty_like(q)
    results = cuflash.forward(q, k, v, return_lse=True, out=out)
    return (q, k, v, out), results


def lse() -> Called:
    q, k, _ = qkv()
    return (q, k), (cuflash.lse(q, k),)


def backward() -> Called:
    q, k, v = qkv()
    out, of_rows = cuflash.forward(q, k, v, return_lse=True)
    dq, seed = torch.empty_like(q), torch.tensor(3)
    operands = out, q, k, v, out, of_rows
    options: Any = {"grads_out": (dq, None, None), "dropout_p": 0.1, "dropout_seed": seed}
    return (*operands, dq, seed), cuflash.backward(*operands, **options)


def merge_states() -> Called:
    q, k, v = qkv()
    states = [cuflash.forward(q, k, v, return_lse=True) for _ in range(2)]
    outs, lses = zip(*states, strict=True)
    return (*outs, *lses), cuflash.merge_states(outs, lses)


def append_kv() -> Called:
    k_cache, v_cache = randoms(*[(4, 8, HEADS, 16)] * 2)
    q, k, v, cos, sin = randoms(*[(2, 1, HEADS, 16)] * 3, *[(64, 8)] * 2)
    table, used = integers([0, 1], [2, 3]), integers(3, 8)
    options = {"page_table": table, "q": q, "rotary_cos": cos, "rotary_sin": sin}
    q = cuflash.append_kv(k_cache, v_cache, k, v, used, **options)
    return (k_cache, v_cache, k, v, used, *options.values()), (q,)


def block_mask() -> Called:
    offsets, q = torch.tensor([0, 4, ROWS]), qkv()[0]
    cells = cuflash.create_block_mask(mods.document(offsets), 1, 1, ROWS, ROWS, like=q).cells
    return (offsets, q), (cells,)


def sequences() -> Called:
    q, k, v = packed(grad=True)
    bounds, used = integers(0, 4, ROWS), integers(4, 3)
    lengths = {"cu_seqlens_q": bounds, "cu_seqlens_k": bounds.clone(), "seqused_k": used}
    out = attention(q, k, v, **lengths)
    return (q, k, v, *lengths.values()), (out, *torch.autograd.grad(out.sum(), (q, k, v)))


def pages() -> Called:
    q, k, v = randoms((2, 1, HEADS, 16), *[(4, 8, HEADS, 16)] * 2)
    table, used = integers([0, 1], [2, 3]), integers(3, 8)
    return (q, k, v, table, used), (attention(q, k, v, page_table=table, seqused_k=used),)


def mods_with_gradients() -> Called:
    q, k, v = qkv(grad=True)
    table, sinks, bias = randoms((HEADS, ROWS), (HEADS,), (HEADS, 1, ROWS), grad=True)
    limits = torch.arange(ROWS)
    out = attention(
        *(q, k, v),
        score_mod=lambda s, b, h, i, j: s + table[h, j],
        mask_mod=lambda b, h, i, j: limits[i] >= j,
        sinks=sinks,
        bias=bias,
    )
    inputs = q, k, v, table, sinks, bias
    return (*inputs, limits), (out, *torch.autograd.grad(out.square().sum(), inputs))


def flex() -> Called:
    q, k, v = randoms(*[(2, HEADS, ROWS, 16)] * 3, grad=True)
    (slopes,) = randoms((HEADS,))
    out = flex_attention(q, k, v, lambda s, b, h, i, j: s - slopes[h] * (i - j).abs())
    return (q, k, v, slopes), (out, *torch.autograd.grad(out.sum(), (q, k, v)))


def masked_sdpa() -> Called:
    q, k, v, bias = randoms(*[(2, HEADS, ROWS, 16)] * 3, (2, HEADS, ROWS, ROWS))
    results = sdpa_masks.masked(q, k, v, bias, True)
    needs = [True, True, True, True]
    gradients = sdpa_masks.masked_backward(results[0], q, k, v, bias, *results, 0.0, needs)
    return (q, k, v, bias), (*results[:2], *gradients)


def triangle() -> Called:
    q, k, v = randoms(*[(1, 5, HEADS, 5, 16)] * 3, grad=True)
    bias, mask = torch.zeros(1, HEADS, 5, 5, requires_grad=True), torch.ones(1, 5, 5, dtype=torch.bool)
    out = triangle_attention(q, k, v, bias, mask)
    return (q, k, v, bias, mask), (out, *torch.autograd.grad(out.sum(), (q, k, v, bias)))


def flash_attn_alibi() -> Called:
    q, k, v = packed(grad=True)
    bounds, (slopes,) = integers(0, 4, ROWS), randoms((HEADS,))
    out = flash_attn.flash_attn_varlen_func(q, k, v, bounds, bounds, 5, 5, alibi_slopes=slopes)
    return (q, k, v, bounds, slopes), (out, *torch.autograd.grad(out.sum(), (q, k, v)))


def plan() -> Called:
    q, k, v = qkv()
    bias, sinks = randoms((HEADS, ROWS, ROWS), (HEADS,))
    cuflash.plan(q, k, v, bias=bias, sinks=sinks)
    return (q, k, v, bias, sinks), ()


CALLS = (
    forward, lse, backward, merge_states, append_kv, block_mask, sequences, pages, mods_with_gradients, flex,
    masked_sdpa, triangle, flash_attn_alibi, plan,
)  # fmt: skip


@pytest.mark.parametrize("call", CALLS, ids=lambda call: call.__name__)
def test_storages_can_be_resized_after_a_call(call: Callable[[], Called]) -> None:
    inputs, results = call()
    storages = [x.untyped_storage() for x in (*inputs, *results)]
    assert storages
    for storage in storages:
        storage.resize_(0)
        assert storage.nbytes() == 0


@pytest.mark.parametrize("dtype", DTYPES)
def test_numpy_reads_and_writes_the_memory_of_a_tensor(dtype: str) -> None:
    library, values = TorchLibrary(), torch.arange(24).reshape(4, 6) % 2
    tensor = values.to(getattr(torch, dtype))
    for view in (tensor, tensor[::2, 1::3].t(), tensor[:1].expand(4, 6), tensor[:0], tensor[1, 1]):
        array = library.to_numpy(view)
        assert (array.dtype.name, array.shape) == (dtype, tuple(view.shape))
        assert array.astype(float).tolist() == view.double().tolist()
    library.to_numpy(tensor)[1:3, 2] = 1
    assert tensor[:, 2].double().tolist() == [0, 1, 1, 0]
    result = library.from_numpy(library.to_numpy(tensor), like=tensor)
    assert torch.equal(result.double(), tensor.double())
    assert result.dtype == tensor.dtype


@pytest.mark.parametrize("size", [0, 64])
def test_a_tensor_whose_storage_is_too_small_is_refused(size: int) -> None:
    x, cut = torch.ones(1, 4, 2, 8), torch.ones(1, 4, 2, 8)
    cut.untyped_storage().resize_(size)
    with pytest.raises(ProblemError, match=f"has {size} bytes, but its elements need 256"):
        cuflash.forward(x, cut, x)


@pytest.mark.parametrize("shapes", [((1, 0, 4, 16), (1, 8, 2, 16)), ((1, 3, 4, 16), (1, 0, 2, 16))])
def test_tensors_without_elements_give_rows_of_zeros(shapes: tuple[tuple[int, ...], ...]) -> None:
    q, k = (torch.ones(shape) for shape in shapes)
    out, lse = cuflash.forward(q, k, k, return_lse=True)
    assert out.shape == q.shape
    assert not out.any()
    assert torch.equal(lse, torch.full((1, 4, q.shape[1]), -torch.inf))


def test_a_view_of_numpy_keeps_its_tensor() -> None:
    tensor = torch.full((1000,), 3.0)
    array = TorchLibrary().to_numpy(tensor)
    del tensor
    gc.collect()
    torch.zeros(1000)
    assert np.unique(array).tolist() == [3.0]


def test_a_tensor_yet_to_be_negated_is_read_as_its_values() -> None:
    negated = torch.complex(torch.zeros(3), torch.ones(3)).conj().imag
    assert negated.is_neg()
    assert TorchLibrary().to_numpy(negated).tolist() == [-1.0] * 3


def test_results_stay_on_the_cpu_beside_another_default_device() -> None:
    q, k, v = qkv()
    with torch.device("meta"):
        out = attention(q, k, v)
    assert out.device.type == "cpu"


class Layer(torch.nn.Module):  # type: ignore[misc]
    """An attention layer whose parameters include sinks and a captured table."""

    def __init__(self) -> None:
        super().__init__()
        self.project = torch.nn.Linear(16, 3 * 16)
        self.sinks, self.table = (torch.nn.Parameter(x) for x in randoms((HEADS,), (HEADS, 7)))

    def forward(self, x: Any) -> Any:
        q, k, v = self.project(x).unflatten(-1, (3, HEADS, 4)).unbind(2)
        table = self.table
        out = attention(q, k, v, score_mod=lambda s, b, h, i, j: s + table[h, i - j + 3], sinks=self.sinks)
        return x + out.flatten(2)


@pytest.mark.filterwarnings("ignore::UserWarning")  # of FSDP2, on views and on a world of one process
def test_parameters_that_fsdp2_shards_on_the_cpu() -> None:
    """FSDP2 frees the storages of gathered parameters after the forward, and fills them again for the backward."""
    fsdp, distributed = pytest.importorskip("torch.distributed.fsdp"), torch.distributed
    if not (distributed.is_available() and distributed.is_gloo_available() and hasattr(fsdp, "fully_shard")):
        pytest.skip("needs FSDP2 and gloo")
    torch.manual_seed(0)
    plain, sharded = (torch.nn.Sequential(Layer(), Layer()) for _ in range(2))
    sharded.load_state_dict(plain.state_dict())
    x = torch.randn(2, ROWS, 16)
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    try:
        mesh = distributed.device_mesh.init_device_mesh("cpu", (1,))
        for module in (*sharded, sharded):
            fsdp.fully_shard(module, mesh=mesh)
        for _ in range(2):
            for model in (plain, sharded):
                model(x).square().sum().backward()
        for expected, parameter in zip(plain.parameters(), sharded.parameters(), strict=True):
            torch.testing.assert_close(parameter.grad.full_tensor(), expected.grad)
    finally:
        distributed.destroy_process_group()
