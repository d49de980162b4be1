"""Ready-made masks. A query's position is `q_idx + seqlen_k - seqlen_q`: the last query stands beside the last key.

In the pictures a row is a query, a column a key, and x a visible key. Numbers are constants of the kernel, so that
each new one compiles anew; arrays are read by every call, so that they may change, in CUDA graphs too. In the examples
`np` is NumPy, `mods` is `cuflash.mods`, and q, k and v hold 6 tokens of 2 heads, (6, 2, 4).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from ..errors import ProblemError
from .language import equivalent, position_of, seqlen_k, seqlen_q
from .tracing.operand import is_integer, shape_of

Mod = Callable[..., Any]


def check_number(name: str, value: Any, least: int, otherwise: str = "") -> int:
    """Returns `value` if it is an integer of at least `least`. otherwise: in the error, what else is accepted."""
    if not is_integer(value) or value < least:
        raise ProblemError(f"{name}={value!r}; give an integer of at least {least}{otherwise}")
    return int(value)


def and_masks(*mask_mods: Mod) -> Mod:
    """The keys that all of the masks show.

    >>> mask_mod = mods.and_masks(mods.causal, mods.chunked(3))
    >>> out = cuflash.forward(q, k, v, mask_mod=mask_mod)
    >>> np.allclose(out[3:], cuflash.forward(q[3:], k[3:], v[3:], causal=True))
    True
    """

    def mask_mod(b: Any, h: Any, q_idx: Any, k_idx: Any) -> Any:
        result = True
        for each in mask_mods:
            result = each(b, h, q_idx, k_idx) & result
        return result

    return mask_mod


def or_masks(*mask_mods: Mod) -> Mod:
    """The keys that at least one of the masks shows.

    >>> mask_mod = mods.or_masks(mods.causal, lambda b, h, q_idx, k_idx: k_idx < 3)
    >>> out = cuflash.forward(q, k, v, mask_mod=mask_mod)
    >>> np.allclose(out[:3], cuflash.forward(q[:3], k[:3], v[:3]))
    True
    """

    def mask_mod(b: Any, h: Any, q_idx: Any, k_idx: Any) -> Any:
        result = False
        for each in mask_mods:
            result = each(b, h, q_idx, k_idx) | result
        return result

    return mask_mod


def causal(b: Any, h: Any, q_idx: Any, k_idx: Any) -> Any:
    """A mask_mod itself: keys up to the query's position, as `causal=True` shows them.

    causal, 4 queries, 6 keys:
        x x x . . .
        x x x x . .
        x x x x x .
        x x x x x x

    >>> out = cuflash.forward(q, k, v, mask_mod=mods.causal)
    >>> np.allclose(out, cuflash.forward(q, k, v, causal=True))
    True
    """
    return k_idx <= position_of(q_idx)


def sliding_window(left: int, right: int = 0) -> Mod:
    """Keys up to `left` before and `right` after the query's position, as `window_size=(left, right)` shows them.

    sliding_window(2, 1), 6 queries, 6 keys:
        x x . . . .
        x x x . . .
        x x x x . .
        . x x x x .
        . . x x x x
        . . . x x x

    >>> out = cuflash.forward(q, k, v, mask_mod=mods.sliding_window(2, 1))
    >>> np.allclose(out, cuflash.forward(q, k, v, window_size=(2, 1)))
    True
    """
    left, right = check_number("left", left, 0), check_number("right", right, 0)

    def mask_mod(b: Any, h: Any, q_idx: Any, k_idx: Any) -> Any:
        position = position_of(q_idx)
        return (position - left <= k_idx) & (k_idx <= position + right)

    return mask_mod


def dilated_window(left: int, dilation: int, right: int = 0) -> Mod:
    """The keys of a sliding window at distances that are multiples of `dilation` (Longformer, arXiv 2004.05150).

    dilated_window(4, 2), 7 queries, 7 keys:
        x . . . . . .
        . x . . . . .
        x . x . . . .
        . x . x . . .
        x . x . x . .
        . x . x . x .
        . . x . x . x

    >>> out = cuflash.forward(q, k, v, mask_mod=mods.dilated_window(4, 2))
    >>> np.allclose(out[5:], cuflash.forward(q[5:], k[[1, 3, 5]], v[[1, 3, 5]]))
    True
    """
    window, dilation = sliding_window(left, right), check_number("dilation", dilation, 1)

    def mask_mod(b: Any, h: Any, q_idx: Any, k_idx: Any) -> Any:
        return window(b, h, q_idx, k_idx) & ((position_of(q_idx) - k_idx) % dilation == 0)

    return mask_mod


def global_window(num_global: Any, left: int, right: int = 0) -> Mod:
    """A sliding window, and tokens that see all and are visible to all (Longformer, arXiv 2004.05150).

    num_global: that many tokens at the front, or an array of bool (seqlen_k,) that is True for them.

    global_window(1, 1), 6 queries, 6 keys:
        x x x x x x
        x x . . . .
        x x x . . .
        x . x x . .
        x . . x x .
        x . . . x x

    >>> out = cuflash.forward(q, k, v, mask_mod=mods.global_window(1, 1))
    >>> np.allclose(out[5:], cuflash.forward(q[5:], k[[0, 4, 5]], v[[0, 4, 5]]))
    True
    """
    window = sliding_window(left, right)
    is_array = bool(shape_of(num_global))
    count = 0 if is_array else check_number("num_global", num_global, 0, ", or an array of bool (seqlen_k,)")

    def is_global(position: Any) -> Any:
        return num_global[position] if is_array else position < count

    def mask_mod(b: Any, h: Any, q_idx: Any, k_idx: Any) -> Any:
        return window(b, h, q_idx, k_idx) | is_global(k_idx) | is_global(position_of(q_idx))

    return mask_mod


def chunked(size: int) -> Mod:
    """Keys of the same chunk; with `causal=True` the chunked attention of Llama 4.

    chunked(3), 7 queries, 7 keys:
        x x x . . . .
        x x x . . . .
        x x x . . . .
        . . . x x x .
        . . . x x x .
        . . . x x x .
        . . . . . . x

    >>> out = cuflash.forward(q, k, v, mask_mod=mods.chunked(3))
    >>> np.allclose(out[3:], cuflash.forward(q[3:], k[3:], v[3:]))
    True
    """
    size = check_number("size", size, 1)

    def mask_mod(b: Any, h: Any, q_idx: Any, k_idx: Any) -> Any:
        return position_of(q_idx) // size == k_idx // size

    return mask_mod


def prefix_lm(prefix_length: Any) -> Mod:
    """A prefix that all queries see, and after it a causal mask (T5, arXiv 1910.10683, section 3.2.1).

    prefix_length: a number, or an array of integers (batch,).

    prefix_lm(3), 6 queries, 6 keys:
        x x x . . .
        x x x . . .
        x x x . . .
        x x x x . .
        x x x x x .
        x x x x x x

    >>> out = cuflash.forward(q, k, v, mask_mod=mods.prefix_lm(3))
    >>> np.allclose(out[:3], cuflash.forward(q[:3], k[:3], v[:3]))
    True
    """
    is_array = bool(shape_of(prefix_length))
    if not is_array:
        prefix_length = check_number("prefix_length", prefix_length, 0, ", or an array of integers (batch,)")

    def mask_mod(b: Any, h: Any, q_idx: Any, k_idx: Any) -> Any:
        length = prefix_length[b] if is_array else prefix_length
        return (k_idx < length) | (k_idx <= position_of(q_idx))

    return mask_mod


def document(offsets: Any) -> Mod:
    """Keys of the same document, of documents that lie one after the other in each sequence.

    offsets: an array of integers (num_documents + 1,) that does not fall: document i has the tokens offsets[i] …
    offsets[i + 1] - 1. Tokens in no document see nothing. Each row finds its document by itself, so nothing is computed
    beforehand when offsets change. Only numbers of offsets between
    other powers of two compile anew. For a batch without padding, `cu_seqlens_q` and `cu_seqlens_k` are faster.

    document(numpy.array([0, 2, 5, 6])), 7 queries, 7 keys:
        x x . . . . .
        x x . . . . .
        . . x x x . .
        . . x x x . .
        . . x x x . .
        . . . . . x .
        . . . . . . .

    >>> offsets = np.array([0, 2, 6], "int32")
    >>> out = cuflash.forward(q, k, v, mask_mod=mods.document(offsets))
    >>> np.allclose(out, cuflash.forward(q, k, v, cu_seqlens_q=offsets, cu_seqlens_k=offsets))
    True
    """
    if len(shape := shape_of(offsets)) != 1 or shape[0] < 2:
        raise ProblemError(f"offsets has shape {tuple(shape)}; give an array (num_documents + 1,)")
    steps = [2**n for n in reversed(range((shape[0] - 1).bit_length()))]  # powers of two below the number of offsets

    def has_both(position: Any, other: Any) -> Any:
        index: Any = 0
        # A binary search of the last document that begins at the position or before it. why without the number of
        # documents: one code then serves all numbers up to a power of two. An index behind the end reads the last
        # offset, so documents behind the last one begin and end there, and have no tokens.
        for step in steps:
            index = index + (offsets[index + step] <= position) * step
        begin, end = offsets[index], offsets[index + 1]
        return (begin <= position) & (position < end) & (begin <= other) & (other < end)

    def mask_mod(b: Any, h: Any, q_idx: Any, k_idx: Any) -> Any:
        position = position_of(q_idx)
        return equivalent(has_both(position, k_idx), has_both(k_idx, position))

    return mask_mod


def segments(ids: Any) -> Mod:
    """Keys with the number of the query: documents, images or turns that need not lie one after the other.

    ids: an array of integers (seqlen_k,) or (batch, seqlen_k). Where each number's tokens follow each other, `document`
    is faster.

    segments(numpy.array([0, 0, 1, 0, 1])), 5 queries, 5 keys:
        x x . x .
        x x . x .
        . . x . x
        x x . x .
        . . x . x

    >>> ids = np.array([0, 0, 1, 0, 1, 0])
    >>> out = cuflash.forward(q, k, v, mask_mod=mods.segments(ids))
    >>> np.allclose(out[ids == 1], cuflash.forward(q[ids == 1], k[ids == 1], v[ids == 1]))
    True
    """
    rank = len(shape_of(ids))
    if rank not in (1, 2):
        raise ProblemError(f"ids has {rank} axes; give an array (seqlen_k,) or (batch, seqlen_k)")

    def mask_mod(b: Any, h: Any, q_idx: Any, k_idx: Any) -> Any:
        row = ids[b] if rank == 2 else ids
        return row[position_of(q_idx)] == row[k_idx]

    return mask_mod


def neighborhood(size: int | Sequence[int], canvas: int | Sequence[int]) -> Mod:
    """The keys around the query on a canvas of one or more axes, in row-major order (NATTEN, arXiv 2204.07143).

    The window of `size` keeps its size at the edges: it is moved inside. size, canvas: an odd number and the length of
    each axis; the window is no longer than the canvas.

    neighborhood(3, 6), 6 queries, 6 keys:
        x x x . . .
        x x x . . .
        . x x x . .
        . . x x x .
        . . . x x x
        . . . x x x

    >>> out = cuflash.forward(q, k, v, mask_mod=mods.neighborhood((1, 3), (2, 3)))  # 2 rows of 3
    >>> np.allclose(out[3:], cuflash.forward(q[3:], k[3:], v[3:]))
    True
    """
    sizes, lengths = (tuple(each) if isinstance(each, Sequence) else (each,) for each in (size, canvas))
    if len(sizes) != len(lengths) or not sizes:
        raise ProblemError(f"size={size!r} and canvas={canvas!r}; give as many numbers for both")
    for each, length in zip(sizes, lengths, strict=True):
        if check_number("size", each, 1) % 2 == 0 or each > check_number("canvas", length, 1):
            raise ProblemError(f"size={size!r} of canvas={canvas!r}; give odd numbers no larger than the canvas")

    def mask_mod(b: Any, h: Any, q_idx: Any, k_idx: Any) -> Any:
        query, result = position_of(q_idx), True
        for each, length in reversed(list(zip(sizes, lengths, strict=True))):
            begin = min(max(query % length - each // 2, 0), length - each)
            key = k_idx % length
            result = (begin <= key) & (key < begin + each) & result
            query, k_idx = query // length, k_idx // length
        return result

    return mask_mod


def block_diffusion(seqlen: int, block: int) -> Mod:
    """Training of block diffusion (arXiv 2503.09573): `seqlen` noisy tokens, then the same tokens without noise.

    A noisy block sees itself and the clean blocks before it; a clean block sees itself and the clean blocks before it.

    block_diffusion(4, 2), 8 queries, 8 keys:
        x x . . . . . .
        x x . . . . . .
        . . x x x x . .
        . . x x x x . .
        . . . . x x . .
        . . . . x x . .
        . . . . x x x x
        . . . . x x x x

    >>> out = cuflash.forward(q, k, v, mask_mod=mods.block_diffusion(3, 1))
    >>> np.allclose(out[3:], cuflash.forward(q[3:], k[3:], v[3:], causal=True))
    True
    """
    seqlen, block = check_number("seqlen", seqlen, 1), check_number("block", block, 1)

    def mask_mod(b: Any, h: Any, q_idx: Any, k_idx: Any) -> Any:
        query = position_of(q_idx)
        is_clean_q, is_clean_k = query >= seqlen, k_idx >= seqlen
        block_q, block_k = query % seqlen // block, k_idx % seqlen // block
        itself = (is_clean_q == is_clean_k) & (block_q == block_k)
        return itself | (is_clean_k & (block_k < block_q))

    return mask_mod


def tree(ancestors: Any) -> Mod:
    """Speculative decoding: the queries are nodes of a tree of drafts, whose keys are the last ones in the cache.

    A node sees all keys before those of the tree and, of the tree, its ancestors and itself. ancestors: an array of
    bool (nodes, nodes) or (batch, nodes, nodes), or of integers (nodes,) or (batch, nodes), whose bit j is set if
    node j is visible; bits take less time, and integers of 64 bits hold 64 nodes.

    tree(numpy.array([1, 3, 5, 13])), 4 queries, 6 keys:
        x x x . . .
        x x x x . .
        x x x . x .
        x x x . x x

    >>> out = cuflash.forward(q[2:], k, v, mask_mod=mods.tree(np.array([1, 3, 5, 13])))
    >>> np.allclose(out[3:], cuflash.forward(q[5:], k[[0, 1, 2, 4, 5]], v[[0, 1, 2, 4, 5]]))
    True
    """
    rank, is_bits = len(shape_of(ancestors)), "bool" not in str(getattr(ancestors, "dtype", ""))
    if rank not in ((1, 2) if is_bits else (2, 3)):
        raise ProblemError(
            f"ancestors has {rank} axes; give an array of bool (nodes, nodes) or of integers (nodes,), each with a "
            "first axis for the batch or without one"
        )

    def mask_mod(b: Any, h: Any, q_idx: Any, k_idx: Any) -> Any:
        table = ancestors[b] if rank == (2 if is_bits else 3) else ancestors
        node = k_idx - (seqlen_k() - seqlen_q())
        is_ancestor = (table[q_idx] >> max(node, 0)) & 1 != 0 if is_bits else table[q_idx, max(node, 0)]
        return (node < 0) | is_ancestor

    return mask_mod
