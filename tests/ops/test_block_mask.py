"""Block masks: made once for many calls, and refused by calls that they do not fit."""

from __future__ import annotations

import base64
import pickle
import re
from typing import Any

import numpy as np
import pytest
from libraries import jax_of, torch_of

import cuflash
from cuflash import mods
from cuflash.mods.tracing.trace import trace
from cuflash.reference.block_mask import mask_tiles_of

BATCH, HEADS, ROWS, KEYS = 2, 2, 130, 200
OFFSETS = np.array([0, 50, 128, 200], np.int32)
MASKS = {
    "document": mods.document(OFFSETS),
    "of heads": lambda b, h, q, k: (q // 64 + h) % 2 == k // 64 % 2,
    "of batch": lambda b, h, q, k: k < 70 * (b + 1),
    "of lengths": lambda b, h, q, k: k < mods.seqlen_k() - 70,
}


def inputs(dtype: str = "float32") -> list[Any]:
    random = np.random.default_rng(1)
    return [random.standard_normal((BATCH, n, HEADS, 8)).astype(dtype) for n in (ROWS, KEYS, KEYS)]


def block_mask_of(name: str, **more: Any) -> cuflash.BlockMask:
    batch, heads = BATCH if name == "of batch" else 1, HEADS if name == "of heads" else 1
    sizes = {"batch": batch, "heads": heads, "seqlen_q": ROWS, "seqlen_k": KEYS, "like": np.zeros(())} | more
    return cuflash.create_block_mask(MASKS[name], **sizes)


@pytest.mark.parametrize("name", MASKS)
def test_a_call_with_a_block_mask_equals_the_call_with_its_mask_mod(name: str) -> None:
    q, k, v = inputs()
    block_mask = block_mask_of(name)
    sizes = block_mask.sizes
    assert block_mask.cells.dtype == np.int8
    assert (block_mask.cells == mask_tiles_of(trace(MASKS[name], "mask_mod"), *sizes)).all()
    expected = cuflash.forward(q, k, v, mask_mod=MASKS[name], return_lse=True)
    for more in ({}, {"mask_mod": MASKS[name]}):
        results = cuflash.forward(q, k, v, block_mask=block_mask, return_lse=True, **more)
        assert all((x == y).all() for x, y in zip(results, expected, strict=True))
    assert (cuflash.lse(q, k, block_mask=block_mask) == expected[1]).all()
    gradients = (cuflash.backward(q, q, k, v, *expected, **each) for each in ({"block_mask": block_mask},
                                                                             {"mask_mod": MASKS[name]}))  # fmt: skip
    assert all((x == y).all() for x, y in zip(*gradients, strict=True))


@pytest.mark.parametrize("library", ["torch", "jax"])
def test_mask_tiles_are_of_the_library_of_like(library: str) -> None:
    convert = torch_of if library == "torch" else jax_of
    offsets, like = convert(OFFSETS, "cpu"), convert(np.zeros((3, 4), np.float32), "cpu")
    if library == "torch":
        like.requires_grad_()
    block_mask = cuflash.create_block_mask(mods.document(offsets), 1, 1, ROWS, KEYS, like=like)
    assert type(block_mask.cells) is type(offsets)
    assert (np.asarray(block_mask.cells) == block_mask_of("document").cells).all()
    assert repr(block_mask) == repr(block_mask_of("document"))
    q, k, v = (convert(x, "cpu") for x in inputs())
    got = cuflash.forward(q, k, v, block_mask=block_mask)
    np.testing.assert_allclose(
        np.asarray(got), cuflash.forward(*inputs(), block_mask=block_mask_of("document")), rtol=1e-5
    )


def test_repr_of_a_block_mask_shows_its_sizes_and_tiles() -> None:
    text = repr(cuflash.create_block_mask(lambda b, h, q, k: k < 64, 1, 1, 64, 256, like=np.zeros(1)))
    assert text == "BlockMask(batch=1, heads=1, seqlen_q=64, seqlen_k=256, cells: 75% empty, 0% partial, 25% full)"


def test_used_and_packed_lengths() -> None:
    used_q, used_k = np.array([130, 40], np.int32), np.array([100, 200], np.int32)
    varlen_kwargs = {"seqused_q": used_q, "seqused_k": used_k}
    q, k, v = inputs()
    for name in ("of lengths", "of batch", "document"):
        block_mask = block_mask_of(name, batch=BATCH, **varlen_kwargs)
        graph = trace(MASKS[name], "mask_mod")
        assert (block_mask.cells == mask_tiles_of(graph, BATCH, 1, ROWS, KEYS, [(130, 100), (40, 200)])).all()
        expected = cuflash.forward(q, k, v, mask_mod=MASKS[name], **varlen_kwargs)
        assert (cuflash.forward(q, k, v, block_mask=block_mask, **varlen_kwargs) == expected).all()
    bounds = {"cu_seqlens_q": np.array([0, 130, 170], np.int32), "cu_seqlens_k": np.array([0, 100, 300], np.int32)}
    packed = block_mask_of("of lengths", batch=BATCH, **bounds)
    assert (packed.cells == block_mask_of("of lengths", batch=BATCH, **varlen_kwargs).cells).all()
    rows = [np.concatenate([x[0, :n], x[1, :m]]) for x, n, m in ((q, 130, 40), (k, 100, 200), (v, 100, 200))]
    most = {"max_seqlen_q": ROWS, "max_seqlen_k": KEYS}
    out = cuflash.forward(*rows, block_mask=packed, **bounds, **most)
    assert (out == cuflash.forward(*rows, mask_mod=MASKS["of lengths"], **bounds, **most)).all()
    # Mask tiles of whole sequences hold for shorter ones, unless the mask uses lengths.
    whole = block_mask_of("of batch")
    assert (cuflash.forward(q, k, v, block_mask=whole, **varlen_kwargs)
            == cuflash.forward(q, k, v, mask_mod=MASKS["of batch"], **varlen_kwargs)).all()  # fmt: skip


CAUSE = {
    "lengths": ({"seqlen_k": KEYS + 1}, {}, "document", "made for batch 1, heads 1, seqlen_q 130, seqlen_k 201, but"),
    "batch": ({"batch": 3}, {}, "document", "made for batch 3"),
    "heads": ({"heads": 4}, {}, "of heads", "made for batch 1, heads 4"),
    "batch is broadcast": ({"batch": 1}, {}, "of batch", "batch=1, but its mask_mod depends on b, and the call has 2"),
    "heads are broadcast": ({"heads": 1}, {}, "of heads", "heads=1, but its mask_mod depends on h"),
    "other mask_mod": ({}, {"mask_mod": MASKS["of heads"]}, "document", "made of another mask_mod"),
    "other arrays": ({}, {"mask_mod": mods.document(OFFSETS.copy())}, "document", "refers to other arrays"),
    "with lengths": (
        {},
        {"seqused_k": np.array([9, 9], np.int32)},
        "of lengths",
        "without arrays of lengths of k",
    ),
    "with lengths of one sequence": (
        {"batch": 1, "seqused_k": np.array([10], np.int32)},
        {"seqused_k": np.array([10, 200], np.int32)},
        "document",
        "holds the lengths of one sequence, but the call has 2 sequences",
    ),
    "without lengths": (
        {"batch": 2, "seqused_q": np.array([9, 9], np.int32)},
        {},
        "document",
        "made with arrays of lengths of q",
    ),
}


@pytest.mark.parametrize("cause", CAUSE)
def test_a_block_mask_that_does_not_fit_is_refused(cause: str) -> None:
    sizes, more, name, message = CAUSE[cause]
    block_mask = block_mask_of(name, **sizes)
    with pytest.raises(cuflash.ProblemError, match=re.escape(message)):
        cuflash.forward(*inputs(), block_mask=block_mask, **more)


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "no integer": ({"batch": 1.5}, "batch=1.5 is a float; give an integer"),
    "negative": ({"seqlen_q": -1}, "seqlen_q=-1; give an integer from 0"),
    "no heads": ({"heads": 0}, "heads=0; give an integer from 1"),
    "bounds of another batch": ({"cu_seqlens_q": np.zeros(4, np.int32)}, "cu_seqlens_q has shape (4,); this problem"),
    "used lengths of another dtype": ({"seqused_k": np.zeros(1, np.int64)}, "seqused_k has dtype int64"),
    "like is no array": ({"like": [1]}, "like is a list; give a CuPy, PyTorch, JAX or NumPy array"),
}


@pytest.mark.parametrize("name", BAD)
def test_lengths_that_make_no_block_mask(name: str) -> None:
    with pytest.raises(cuflash.ProblemError, match=re.escape(BAD[name][1])):
        block_mask_of("document", **BAD[name][0])


def test_other_values_than_block_masks_are_refused() -> None:
    with pytest.raises(cuflash.ProblemError, match="block_mask is an ndarray; give what create_block_mask returned"):
        cuflash.forward(*inputs(), block_mask=block_mask_of("document").cells)


def test_a_block_mask_of_a_window_is_a_plain_call() -> None:
    q, k, v = inputs()
    block_mask = cuflash.create_block_mask(mods.causal, 1, 1, ROWS, KEYS, like=q)
    assert cuflash.plan(q, k, v, block_mask=block_mask) == cuflash.plan(q, k, v, causal=True)
    assert cuflash.create_block_mask(mods.causal, 1, 1, 0, 65, like=q).cells.shape == (1, 1, 0, 2)


WINDOWS = {"a window": lambda b, h, q, k: k <= q, "everything": lambda b, h, q, k: (k >= 0) | (q > k)}


@pytest.mark.parametrize("name", WINDOWS)
def test_a_block_mask_of_a_window_fits_its_lengths_alone(name: str) -> None:
    q, k, v = inputs()
    varlen_kwargs = {"seqused_k": np.array([100, 200], np.int32)}
    for more in ({}, varlen_kwargs, {"score_mod": mods.alibi(HEADS)}):
        fitting = cuflash.create_block_mask(WINDOWS[name], 1, 1, ROWS, KEYS, like=q)
        results, expected = (cuflash.forward(q, k, v, return_lse=True, **mask, **more)
                         for mask in ({"block_mask": fitting}, {"mask_mod": WINDOWS[name]}))  # fmt: skip
        assert all((x == y).all() for x, y in zip(results, expected, strict=True))
        for sizes in ((1, 1, ROWS, KEYS + 1), (3, 1, ROWS, KEYS), (1, HEADS + 1, ROWS, KEYS), (1, 1, 2 * ROWS, KEYS)):
            other = cuflash.create_block_mask(WINDOWS[name], *sizes, like=q)
            with pytest.raises(cuflash.ProblemError, match=f"block_mask was made for batch {sizes[0]}, heads"):
                cuflash.forward(q, k, v, block_mask=other, **more)
            with pytest.raises(cuflash.ProblemError, match=f"block_mask was made for batch {sizes[0]}, heads"):
                cuflash.backward(q, q, k, v, *expected, block_mask=other, **more)


# pickle.dumps(cuflash.create_block_mask(mods.causal, 1, 1, 128, 128, like=np.zeros(0)), 4) at commit 2c43c98
OLD_PICKLE = """
gASV+AMAAAAAAACMFmN1Zmxhc2gub3BzLmJsb2NrX21hc2uUjAlCbG9ja01hc2uUk5QpgZRdlCiMEmN1Zmxhc2gubW9kcy5tYXNrc5SMBmNhdXNh
bJSTlIwWbnVtcHkuX2NvcmUubXVsdGlhcnJheZSMDF9yZWNvbnN0cnVjdJSTlIwFbnVtcHmUjAduZGFycmF5lJOUSwCFlEMBYpSHlFKUKEsBKEsB
SwFLAksCdJRoC4wFZHR5cGWUk5SMAmkxlImIh5RSlChLA4wBfJROTk5K/////0r/////SwB0lGKJQwQBAAIBlHSUYowYY3VmbGFzaC5wcm9ibGVt
Lm9wZXJhbmRzlIwFU2l6ZXOUk5QoSwFLAUuAS4B0lIGUiYmGlIwSY3VmbGFzaC5tb2RzLmdyYXBolIwFR3JhcGiUk5QpgZROfZQojARyb290lGgi
jAROb2RllJOUKYGUTn2UKIwJYXJndW1lbnRzlGgpKYGUTn2UKGgsKYwGZGlnZXN0lEMQiFenBgaLmIdyWfOW8tWDPJSMBmlucHV0c5QojAVrX2lk
eJSRlIwCb3CUjAVpbnB1dJSMBXJhbmdllEsASv///z+GlIwEdHlwZZSMF2N1Zmxhc2gubW9kcy5vcGVyYXRpb25zlIwEVHlwZZSTlEsBhZRSlIwF
dmFsdWWUaDJ1hpRiaCkpgZROfZQoaCxoKSmBlE59lChoLGgpKYGUTn2UKGgsKWgvQxAQwsAbhPh5qGErqVlZiuTllGgxKIwIc2VxbGVuX2uUkZRo
NGg1aDZLAEr///8/hpRoOGg9aD5oR3WGlGJoKSmBlE59lChoLCloL0MQYadzGACy56RFpD/vRKxUzJRoMSiMBXFfaWR4lJGUaDRoNWg2SwBK////
P4aUaDhoPWg+aE51hpRihpRoL0MQkZIcVA3qjmId2CYBxLiTFpRoMShoTmhHkZRoNIwDYWRklGg2SwBK/v//f4aUaDhoPWg+TnWGlGJoKSmBlE59
lChoLCloL0MQKXsQyeUUKmnJ2Ce9WaaXpJRoMSiMCHNlcWxlbl9xlJGUaDRoNWg2SwBK////P4aUaDhoPWg+aFt1hpRihpRoL0MQjPeiIOhc5Q7i
yOblZ/zZR5RoMShoTmhbaEeRlGg0jAhzdWJ0cmFjdJRoNkoBAADASv7//3+GlGg4aD1oPk51hpRihpRoL0MQZOENydjL/8WFbFCAzxVP/JRoMSho
R2hOaDJoW5GUaDSMCmxlc3NfZXF1YWyUaDZLAEsBhpRoOGg7SwCFlFKUaD5OdYaUYowGYXJyYXlzlCloL4wgYjNkOWZhYTQzN2YyNDA5NWQ0MjA3
MTNlNjU5YzgwNDWUdYaUYmViLg==
"""


def test_a_block_mask_that_an_older_version_pickled_is_read() -> None:
    block_mask = pickle.loads(base64.b64decode(OLD_PICKLE))
    expected = cuflash.create_block_mask(mods.causal, 1, 1, 128, 128, like=np.zeros(0))
    assert repr(block_mask) == repr(expected)
    q = np.random.default_rng(0).standard_normal((1, 128, 1, 8)).astype(np.float32)
    for each in (block_mask, pickle.loads(pickle.dumps(expected))):
        np.testing.assert_array_equal(cuflash.forward(q, q, q, block_mask=each), cuflash.forward(q, q, q, causal=True))
