"""Block masks on a GPU: mask tiles equal NumPy's, and calls have equal bits with and without a block mask."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
from libraries import recorded, torch_of
from mod_table import SMALL as CASE
from mod_table import of_lengths
from plans import for_any_gpu

import cuflash
from cuflash.mods import masks
from cuflash.mods.tracing.trace import trace
from cuflash.reference.block_mask import EMPTY, FULL, PARTIAL, mask_tiles_of
from cuflash.testing.cases import Case
from cuflash.testing.functions import FUNCTIONS, Arguments, Maker, Put, everything, joined, sinks_of
from cuflash.testing.layouts import host, identical
from cuflash.testing.mod_oracle import OracleInputs, check, check_gradients
from cuflash.testing.mods import bounds_case, forward, make_oracle_mods
from cuflash.testing.sequences import Sequences, upstream, varlen_arrays

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("new_memory_holds_nan")]


def tree(put: Put, case: Case) -> Arguments:
    """Builds a tree of drafts, in which each sees itself and every second one before it."""
    nodes = min(case.seqlen_q, 60)
    bits = [sum(1 << j for j in range(i % 2, i + 1, 2)) for i in range(case.seqlen_q)]
    return {"mask_mod": masks.tree(put(np.array([x % 2**nodes for x in bits] or [0], np.int64)))}


def of_heads(put: Put, case: Case) -> Arguments:
    """Builds a mask in which each head sees every fourth run of 70 keys, shifted by head and sequence."""
    return {"mask_mod": lambda b, h, q_idx, k_idx: k_idx // 70 % 4 == (h + b) % 4}


SAMPLES: dict[str, Maker] = {
    **{name: FUNCTIONS[name] for name in ("document", "causal_document", "prefix", "segments", "chunked", "striped")},
    "global_window": FUNCTIONS["global_window"],
    "of_heads": of_heads,
    "dilated": lambda put, case: {"mask_mod": masks.dilated_window(130, 3)},
    "neighborhood": lambda put, case: {"mask_mod": masks.neighborhood((5, 7), (60, 60))},
    "block_diffusion": lambda put, case: {"mask_mod": masks.block_diffusion(150, 40)},
    "causal": lambda put, case: {"mask_mod": masks.causal},
    "nothing": lambda put, case: {"mask_mod": lambda b, h, q_idx, k_idx: k_idx < 0},
    "all": lambda put, case: {"mask_mod": lambda b, h, q_idx, k_idx: k_idx >= 0},
}
TILE_LENGTHS = ((1, 1), (63, 65), (64, 64), (65, 63), (128, 300), (300, 128), (1030, 1500), (0, 5), (5, 0))


@pytest.mark.parametrize("name", SAMPLES)
def test_mask_tiles_are_those_of_numpy(cupy: Any, name: str) -> None:
    """Tiles for one sequence and head serve all if the mask does not depend on these."""
    like = cupy.zeros(1, "float16")
    for lengths, (batch, heads) in [(x, (2, 4)) for x in TILE_LENGTHS] + [((200, 500), (1, 1)), ((70, 70), (5, 3))]:
        case = of_lengths(lengths, batch=batch, heads_q=heads)
        mask_mod = SAMPLES[name](cupy.asarray, case)["mask_mod"]
        tiles = cuflash.create_block_mask(mask_mod, batch, heads, *lengths, like=like).cells
        graph = trace(SAMPLES[name](lambda x: x, case)["mask_mod"], "mask_mod")
        assert host(tiles).dtype == np.int8
        np.testing.assert_array_equal(host(tiles), mask_tiles_of(graph, batch, heads, *lengths))


PACKED = Sequences("cells", (130, 0, 300, 1), (65, 200, 300, 64), bounded=True, used_q=True, used_k=True,
                   spare_q=(9, 3, 0, 2), spare_k=(1, 70, 4, 0))  # fmt: skip


@pytest.mark.parametrize("name", ["causal_document", "prefix", "striped"])
def test_mask_tiles_of_sequences_are_those_of_their_used_lengths(cupy: Any, name: str) -> None:
    inputs = varlen_arrays(PACKED)
    case = bounds_case(inputs)
    varlen_kwargs = {name: cupy.asarray(x) for name, x in inputs.varlen_kwargs.items()}
    lengths = case.batch, case.heads_q, case.seqlen_q, case.seqlen_k
    mask_mod = SAMPLES[name](cupy.asarray, case)["mask_mod"]
    graph = trace(SAMPLES[name](lambda x: x, case)["mask_mod"], "mask_mod")
    for some in (varlen_kwargs, {name: varlen_kwargs[name] for name in ("seqused_q", "seqused_k")}):
        tiles = cuflash.create_block_mask(mask_mod, *lengths, like=cupy.zeros(1, "float16"), **some).cells
        used = list(zip(PACKED.queries, PACKED.keys, strict=True))
        np.testing.assert_array_equal(host(tiles), mask_tiles_of(graph, *lengths, used))


def test_mask_tiles_of_tensors_are_tensors(cupy: Any) -> None:
    torch = pytest.importorskip("torch")
    mask_mod = FUNCTIONS["segments"](lambda x: torch_of(np.asarray(x), "cuda"), CASE)["mask_mod"]
    tiles = cuflash.create_block_mask(mask_mod, 2, 1, 300, 300, like=torch.zeros(1, device="cuda")).cells
    graph = trace(FUNCTIONS["segments"](lambda x: x, CASE)["mask_mod"], "mask_mod")
    np.testing.assert_array_equal(tiles.cpu().numpy(), mask_tiles_of(graph, 2, 1, 300, 300))


# Calls.


def results(case: Case, mod_kwargs: Arguments, arrays: list[Any], **more: Any) -> tuple[Any, ...]:
    """Returns out, lse and deterministic gradients, for comparisons bit by bit."""
    keywords = {**case.arguments(), **mod_kwargs, **more}
    out, lse = cuflash.forward(*arrays, return_lse=True, **keywords)
    return out, lse, *cuflash.backward(out, *arrays, out, lse, deterministic=True, **keywords)


@pytest.mark.parametrize(("name", "any_gpu"), [("causal_document", False), ("of_heads", False), ("of_heads", True)])
def test_calls_with_a_block_mask_give_the_same_bits(cupy: Any, name: str, any_gpu: bool) -> None:
    make = joined(SAMPLES[name], sinks_of())
    with for_any_gpu() if any_gpu else nullcontext():
        for lengths in ((63, 65), (300, 500), (500, 300), (640, 640)):
            case = of_lengths(lengths)
            arrays, mod_kwargs = [cupy.asarray(x) for x in case.arrays()], make(cupy.asarray, case)
            del mod_kwargs["captured_grads"]
            of_all = name == "of_heads"
            sizes = case.batch if of_all else 1, case.heads_q if of_all else 1, *lengths
            block_mask = cuflash.create_block_mask(mod_kwargs["mask_mod"], *sizes, like=arrays[0])
            expected = results(case, mod_kwargs, arrays)
            check(OracleInputs.dense(case, case.arrays()), make_oracle_mods(make, case), *expected[:2])
            assert identical(results(case, mod_kwargs, arrays, block_mask=block_mask), expected)
            del mod_kwargs["mask_mod"]
            assert identical(results(case, mod_kwargs, arrays, block_mask=block_mask), expected)


@pytest.mark.parametrize(("dims", "dtype"), [((64, 64), "float16"), ((128, 128), "bfloat16"), ((256, 256), "bfloat16")])
def test_a_block_mask_goes_with_scores_a_window_and_a_cap(cupy: Any, dims: tuple[int, int], dtype: str) -> None:
    case = replace(of_lengths((400, 450)), dtype=dtype, head_dim=dims[0], head_dim_v=dims[1], window_size=(200, 30),
                   softcap=4.0)  # fmt: skip
    arrays, mod_kwargs = [cupy.asarray(x) for x in case.arrays()], everything(cupy.asarray, case)
    captured = mod_kwargs.pop("captured_grads")
    mod_kwargs["block_mask"] = cuflash.create_block_mask(mod_kwargs.pop("mask_mod"), 2, 1, 400, 450, like=arrays[0])
    out, lse = cuflash.forward(*arrays, return_lse=True, **case.arguments(), **mod_kwargs)
    inputs, of_numpy = OracleInputs.dense(case, case.arrays()), make_oracle_mods(everything, case)
    check(inputs, of_numpy, out, lse)
    mod_kwargs["captured_grads"] = captured
    *gradients, grads = cuflash.backward(out, *arrays, out, lse, **case.arguments(), **mod_kwargs)
    check_gradients(inputs, of_numpy, host(out), None, gradients, grads)


def test_mask_tiles_without_visible_keys_are_not_read(cupy: Any, any_gpu: bool) -> None:
    """Keys in the middle are hidden from all: their content leaves no trace, and their gradients are 0."""
    hidden = slice(128, 384)

    def make(put: Put, case: Case) -> Arguments:
        return {"mask_mod": lambda b, h, q_idx, k_idx: (k_idx < 128) | (k_idx >= 384)}

    case = of_lengths((260, 500))
    outputs = []
    for fill in (0.0, np.nan):
        q, k, v = case.arrays()
        k[:, hidden] = v[:, hidden] = fill
        arrays = [cupy.asarray(x) for x in (q, k, v)]
        mod_kwargs = make(cupy.asarray, case)
        block_mask = cuflash.create_block_mask(mod_kwargs["mask_mod"], 1, 1, 260, 500, like=arrays[0])
        kinds = set(np.unique(host(block_mask.cells)).tolist())
        assert kinds == {EMPTY, FULL}
        outputs.append(results(case, {"block_mask": block_mask}, arrays))
        assert not any(host(x)[:, hidden].any() for x in outputs[-1][3:])
    assert identical(*outputs)
    check(OracleInputs.dense(case, (q, k, v)), make_oracle_mods(make, case), *outputs[0][:2])


def test_rows_and_columns_of_empty_cells(cupy: Any, any_gpu: bool) -> None:
    """Blocks of queries, and whole heads, see no key; the last mask tiles of an axis are short."""

    def make(put: Put, case: Case) -> Arguments:
        def mask_mod(b: Any, h: Any, q_idx: Any, k_idx: Any) -> Any:
            return ((q_idx < 100) | (q_idx >= 320)) & (k_idx >= 192) & (h != 1) & (b + h < 5)

        return {"mask_mod": mask_mod}

    case = of_lengths((390, 450), batch=3)
    arrays, mod_kwargs = [cupy.asarray(x) for x in case.arrays()], make(cupy.asarray, case)
    block_mask = cuflash.create_block_mask(mod_kwargs["mask_mod"], 3, 4, 390, 450, like=arrays[0])
    assert {EMPTY, PARTIAL, FULL} == set(np.unique(host(block_mask.cells)).tolist())
    inputs, of_numpy = OracleInputs.dense(case, case.arrays()), make_oracle_mods(make, case)
    for keywords in (mod_kwargs, {"block_mask": block_mask}):
        out, lse, *gradients = results(case, keywords, arrays)
        check(inputs, of_numpy, out, lse)
        check(inputs, of_numpy, None, cuflash.lse(*arrays[:2], **keywords))
        check_gradients(inputs, of_numpy, host(out), None, gradients)
    assert not host(out)[:, 100:320].any()
    assert not host(out)[:, :, 1].any()
    assert np.isneginf(host(lse)[:, :, 100:320]).all()


# Visibility of an axis' 150 mask tiles: 1 is full, 2 has every second pair. Between them are runs of more than 32 empty
# mask tiles.
ISLANDS = np.zeros(150, np.int32)
ISLANDS[[0, 31, 32, 129]], ISLANDS[[1, 66, 97, 149]] = 1, 2


@pytest.mark.parametrize("axis", ["queries", "keys"])
def test_long_runs_of_empty_cells_are_passed_over(cupy: Any, axis: str, any_gpu: bool) -> None:
    def make(put: Put, case: Case) -> Arguments:
        islands = put(ISLANDS)

        def mask_mod(b: Any, h: Any, q_idx: Any, k_idx: Any) -> Any:
            kind = islands[(q_idx if axis == "queries" else k_idx) // 64]
            return (kind == 1) | ((kind == 2) & ((q_idx + k_idx) % 2 == h % 2))

        return {"mask_mod": mask_mod}

    long = 64 * len(ISLANDS) - 3
    case = of_lengths((long, 200) if axis == "queries" else (200, long))
    arrays, mod_kwargs = [cupy.asarray(x) for x in case.arrays()], make(cupy.asarray, case)
    sizes = 1, case.heads_q, case.seqlen_q, case.seqlen_k
    block_mask = cuflash.create_block_mask(mod_kwargs["mask_mod"], *sizes, like=arrays[0])
    assert {EMPTY, PARTIAL, FULL} == set(np.unique(host(block_mask.cells)).tolist())
    outputs = results(case, {"block_mask": block_mask}, arrays)
    assert identical(results(case, mod_kwargs, arrays), outputs)
    inputs, of_numpy = OracleInputs.dense(case, case.arrays()), make_oracle_mods(make, case)
    check(inputs, of_numpy, *outputs[:2])
    check_gradients(inputs, of_numpy, host(outputs[0]), None, outputs[2:])


def test_packed_calls_with_a_block_mask(cupy: Any) -> None:
    inputs = varlen_arrays(PACKED)
    case, arguments = bounds_case(inputs), inputs.arguments(cupy)
    make = FUNCTIONS["causal_document"]
    mod_kwargs = make(cupy.asarray, case)
    varlen_kwargs = {name: x for name, x in arguments.items() if name in inputs.varlen_kwargs}
    lengths = case.batch, 1, case.seqlen_q, case.seqlen_k
    block_mask = cuflash.create_block_mask(mod_kwargs["mask_mod"], *lengths, like=arguments["q"], **varlen_kwargs)
    expected = cuflash.forward(**arguments, return_lse=True, **mod_kwargs)
    outputs = cuflash.forward(**arguments, return_lse=True, block_mask=block_mask)
    assert identical(outputs, expected)
    whole = OracleInputs.from_varlen(inputs)
    check(whole, make_oracle_mods(make, case), *outputs)
    dout, dlse = (cupy.asarray(x) for x in upstream(inputs))
    dout, dlse = dout.reshape(outputs[0].shape), dlse.reshape(outputs[1].shape)
    state = {"out": outputs[0], "lse": outputs[1], "dlse": dlse}
    gradients = cuflash.backward(dout, **state, **arguments, block_mask=block_mask)
    check_gradients(whole, make_oracle_mods(make, case), *upstream(inputs), gradients)


def test_a_block_mask_serves_later_calls_in_graphs(cupy: Any) -> None:
    case = of_lengths((300, 300))
    arrays, mod_kwargs = [cupy.asarray(x) for x in case.arrays()], FUNCTIONS["segments"](cupy.asarray, case)
    expected = forward(FUNCTIONS["segments"], case, cupy.asarray, arrays)[0]
    out, stream = cupy.zeros(case.out_shape(), "float16"), cupy.cuda.Stream(non_blocking=True)
    cupy.cuda.Device().synchronize()
    with stream:
        block_mask = cuflash.create_block_mask(mod_kwargs["mask_mod"], 2, 1, 300, 300, like=arrays[0])
        for keywords in (mod_kwargs, {"block_mask": block_mask}):
            graph, _ = recorded(stream, partial(cuflash.forward, *arrays, out=out, **keywords))
            out.fill(0)
            graph.launch()
            stream.synchronize()
            assert identical([out], [expected])
