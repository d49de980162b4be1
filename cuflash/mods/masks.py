"""Ready-made masks: functions that return a mask_mod, and `causal`, which is one.

A query's position is `q_idx + seqlen_k - seqlen_q`: the last query stands beside the last key. In the pictures a row is
a query, a column a key, and x a visible key. Numbers are constants of the kernel, so a new number compiles a new
kernel, except in a mask that is a window around the diagonal. Arrays are read on each call, so their values may change,
also in CUDA graphs. In the examples `np` is NumPy, `mods` is `cuflash.mods`, and q, k and v hold 6 tokens of 2 heads,
(6, 2, 4).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from ..errors import ProblemError
from .language import equivalent, position_of, seqlen_k, seqlen_q
from .tracing.operand import is_integer, shape_of

Mod = Callable[..., Any]


def check_number(name: str, value: Any, least: int, otherwise: str = "") -> int:
    """Returns `value` if it is an integer of at least `least`. otherwise: other accepted values, for the error."""
    if not is_integer(value) or value < least:
        raise ProblemError(f"{name}={value!r}; give an integer of at least {least}{otherwise}")
    return int(value)


def and_masks(*mask_mods: Mod) -> Mod:
    """Returns the intersection of masks: keys that all of the masks show.

    Parameters
    ----------
    *mask_mods : callable
        Functions `mask_mod(b, h, q_idx, k_idx)`. Without any, all keys are visible.

    Returns
    -------
    callable
        A mask_mod, `mask_mod(b, h, q_idx, k_idx)`.

    Examples
    --------
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
    """Returns the union of masks: keys that at least one of the masks shows.

    Parameters
    ----------
    *mask_mods : callable
        Functions `mask_mod(b, h, q_idx, k_idx)`. Without any, no key is visible.

    Returns
    -------
    callable
        A mask_mod, `mask_mod(b, h, q_idx, k_idx)`.

    Examples
    --------
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
    """Returns True for keys up to the query's position, as `causal=True` shows them.

    This function is a mask_mod itself: pass it without calling it.

    causal, 4 queries, 6 keys:
        x x x . . .
        x x x x . .
        x x x x x .
        x x x x x x

    Parameters
    ----------
    b, h, q_idx, k_idx : traced int32 scalar
        Indices of the sequence, query head, query and key.

    Returns
    -------
    traced bool scalar
        True if the query sees the key.

    Examples
    --------
    >>> out = cuflash.forward(q, k, v, mask_mod=mods.causal)
    >>> np.allclose(out, cuflash.forward(q, k, v, causal=True))
    True
    """
    return k_idx <= position_of(q_idx)


def sliding_window(left: int, right: int = 0) -> Mod:
    """Returns a mask of the keys around the query's position, as `window_size=(left, right)` shows them.

    sliding_window(2, 1), 6 queries, 6 keys:
        x x . . . .
        x x x . . .
        x x x x . .
        . x x x x .
        . . x x x x
        . . . x x x

    Parameters
    ----------
    left : int
        Number of visible keys before the query's position, at least 0.
    right : int, default 0
        Number of visible keys after the query's position, at least 0.

    Returns
    -------
    callable
        A mask_mod, `mask_mod(b, h, q_idx, k_idx)`.

    Raises
    ------
    ProblemError
        If a number is no integer or is below 0.

    Examples
    --------
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
    """Returns a mask of the keys of a sliding window at distances that are multiples of `dilation`.

    dilated_window(4, 2), 7 queries, 7 keys:
        x . . . . . .
        . x . . . . .
        x . x . . . .
        . x . x . . .
        x . x . x . .
        . x . x . x .
        . . x . x . x

    Parameters
    ----------
    left : int
        Largest distance of a visible key before the query's position, at least 0.
    dilation : int
        Distance between neighbouring visible keys, at least 1.
    right : int, default 0
        Largest distance of a visible key after the query's position, at least 0.

    Returns
    -------
    callable
        A mask_mod, `mask_mod(b, h, q_idx, k_idx)`.

    Raises
    ------
    ProblemError
        If a number is no integer or is too small.

    References
    ----------
    Longformer, arXiv 2004.05150.

    Examples
    --------
    >>> out = cuflash.forward(q, k, v, mask_mod=mods.dilated_window(4, 2))
    >>> np.allclose(out[5:], cuflash.forward(q[5:], k[[1, 3, 5]], v[[1, 3, 5]]))
    True
    """
    window, dilation = sliding_window(left, right), check_number("dilation", dilation, 1)

    def mask_mod(b: Any, h: Any, q_idx: Any, k_idx: Any) -> Any:
        return window(b, h, q_idx, k_idx) & ((position_of(q_idx) - k_idx) % dilation == 0)

    return mask_mod


def global_window(num_global: Any, left: int, right: int = 0) -> Mod:
    """Returns a mask of a sliding window, and of global tokens, which see all keys and are visible to all queries.

    global_window(1, 1), 6 queries, 6 keys:
        x x x x x x
        x x . . . .
        x x x . . .
        x . x x . .
        x . . x x .
        x . . . x x

    Parameters
    ----------
    num_global : int or array (seqlen_k,) of bool
        Number of global tokens at the front, at least 0. An array is True for global tokens.
    left : int
        Number of visible keys before the query's position, at least 0.
    right : int, default 0
        Number of visible keys after the query's position, at least 0.

    Returns
    -------
    callable
        A mask_mod, `mask_mod(b, h, q_idx, k_idx)`.

    Raises
    ------
    ProblemError
        If a number is no integer or is below 0.

    References
    ----------
    Longformer, arXiv 2004.05150.

    Examples
    --------
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
    """Returns a mask of the keys in the query's chunk.

    With `causal=True` this is the chunked attention of Llama 4.

    chunked(3), 7 queries, 7 keys:
        x x x . . . .
        x x x . . . .
        x x x . . . .
        . . . x x x .
        . . . x x x .
        . . . x x x .
        . . . . . . x

    Parameters
    ----------
    size : int
        Number of tokens in a chunk, at least 1.

    Returns
    -------
    callable
        A mask_mod, `mask_mod(b, h, q_idx, k_idx)`.

    Raises
    ------
    ProblemError
        If `size` is no integer or is below 1.

    Examples
    --------
    >>> out = cuflash.forward(q, k, v, mask_mod=mods.chunked(3))
    >>> np.allclose(out[3:], cuflash.forward(q[3:], k[3:], v[3:]))
    True
    """
    size = check_number("size", size, 1)

    def mask_mod(b: Any, h: Any, q_idx: Any, k_idx: Any) -> Any:
        return position_of(q_idx) // size == k_idx // size

    return mask_mod


def prefix_lm(prefix_length: Any) -> Mod:
    """Returns a mask of a prefix that all queries see, and a causal mask after it.

    prefix_lm(3), 6 queries, 6 keys:
        x x x . . .
        x x x . . .
        x x x . . .
        x x x x . .
        x x x x x .
        x x x x x x

    Parameters
    ----------
    prefix_length : int or array (batch,) of integers
        Number of keys in the prefix, at least 0.

    Returns
    -------
    callable
        A mask_mod, `mask_mod(b, h, q_idx, k_idx)`.

    Raises
    ------
    ProblemError
        If `prefix_length` is neither an array nor an integer of at least 0.

    References
    ----------
    T5, arXiv 1910.10683, section 3.2.1.

    Examples
    --------
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
    """Returns a mask of the keys in the query's document, for documents that are packed into each sequence.

    document(numpy.array([0, 2, 5, 6])), 7 queries, 7 keys:
        x x . . . . .
        x x . . . . .
        . . x x x . .
        . . x x x . .
        . . x x x . .
        . . . . . x .
        . . . . . . .

    Parameters
    ----------
    offsets : array (num_documents + 1,) of integers
        At least 2 offsets, which never decrease. Document i has the tokens offsets[i] … offsets[i + 1] - 1. Tokens in
        no document see nothing.

    Returns
    -------
    callable
        A mask_mod, `mask_mod(b, h, q_idx, k_idx)`.

    Raises
    ------
    ProblemError
        If `offsets` has another shape.

    Notes
    -----
    Each row finds its document by a binary search, so nothing is computed beforehand when offsets change. Numbers of
    offsets up to the same power of two share a kernel, such as 5 to 8 offsets. For a batch without padding,
    `cu_seqlens_q` and `cu_seqlens_k` are faster.

    Examples
    --------
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
        # Binary search for the last document that begins at the position or before it. The code does not depend on
        # the number of documents, so it serves all numbers of offsets up to a power of two. An index past the end reads
        # the last offset, so documents past the last one begin and end there and have no tokens.
        for step in steps:
            index = index + (offsets[index + step] <= position) * step
        begin, end = offsets[index], offsets[index + 1]
        return (begin <= position) & (position < end) & (begin <= other) & (other < end)

    def mask_mod(b: Any, h: Any, q_idx: Any, k_idx: Any) -> Any:
        position = position_of(q_idx)
        return equivalent(has_both(position, k_idx), has_both(k_idx, position))

    return mask_mod


def segments(ids: Any) -> Mod:
    """Returns a mask of the keys with the query's segment id.

    A segment is a document, an image or a turn of a dialogue. Its tokens need not be adjacent.

    segments(numpy.array([0, 0, 1, 0, 1])), 5 queries, 5 keys:
        x x . x .
        x x . x .
        . . x . x
        x x . x .
        . . x . x

    Parameters
    ----------
    ids : array (seqlen_k,) or (batch, seqlen_k) of integers
        Segment id of each token.

    Returns
    -------
    callable
        A mask_mod, `mask_mod(b, h, q_idx, k_idx)`.

    Raises
    ------
    ProblemError
        If `ids` has neither one axis nor two.

    Notes
    -----
    Where the tokens of each segment are adjacent, `document` is faster.

    Examples
    --------
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
    """Returns a mask of the keys around the query on a canvas of one or more axes, in row-major order.

    At the edges of the canvas the window is moved inside, so it always has the same size.

    neighborhood(3, 6), 6 queries, 6 keys:
        x x x . . .
        x x x . . .
        . x x x . .
        . . x x x .
        . . . x x x
        . . . x x x

    Parameters
    ----------
    size : int or sequence of int
        Window length along each axis: odd, and at most the canvas.
    canvas : int or sequence of int
        Length of the canvas along each axis, at least 1.

    Returns
    -------
    callable
        A mask_mod, `mask_mod(b, h, q_idx, k_idx)`.

    Raises
    ------
    ProblemError
        If the two have different lengths or are empty, or if a number is not as above.

    References
    ----------
    NATTEN, arXiv 2204.07143.

    Examples
    --------
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
    """Returns the mask for training of block diffusion: `seqlen` noisy tokens, then the same tokens without noise.

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

    Parameters
    ----------
    seqlen : int
        Number of noisy tokens, which equals the number of clean tokens, at least 1.
    block : int
        Number of tokens in a block, at least 1.

    Returns
    -------
    callable
        A mask_mod, `mask_mod(b, h, q_idx, k_idx)`.

    Raises
    ------
    ProblemError
        If a number is no integer or is below 1.

    References
    ----------
    Block diffusion, arXiv 2503.09573.

    Examples
    --------
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
    """Returns the mask for speculative decoding, where queries are nodes of a tree of drafts.

    The keys of the tree are the last keys in the cache. A node sees all keys before the tree, its ancestors and itself.

    tree(numpy.array([1, 3, 5, 13])), 4 queries, 6 keys:
        x x x . . .
        x x x x . .
        x x x . x .
        x x x . x x

    Parameters
    ----------
    ancestors : array of bool or of integers
        Visible nodes of each node. An array of bool is (nodes, nodes) or (batch, nodes, nodes). An array of integers is
        (nodes,) or (batch, nodes): bit j is set if node j is visible.

    Returns
    -------
    callable
        A mask_mod, `mask_mod(b, h, q_idx, k_idx)`.

    Raises
    ------
    ProblemError
        If `ancestors` has another number of axes.

    Notes
    -----
    Bits take less time than an array of bool. Integers of 64 bits hold 64 nodes.

    Examples
    --------
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
