"""Masks of transformers that only separate sequences: packed rows, padded batches, caches with free rows.

transformers describes a mask by a function, composed of a few of its own, and by a table of the tokens that
count. Both are read here. A `SequenceMask` passes through the model in place of the mask. `mask_mod.py` has all other
mask functions.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad
from torch.utils._pytree import tree_map
from transformers import masking_utils

from .mask_mod import keywords_of

_AND = "and_masks.<locals>.and_mask"
_WINDOW = "sliding_window_overlay.<locals>.inner_mask"
_PACKED = "packed_sequence_mask_function.<locals>.inner_mask"
_REMAPPED = "remap_positions_for_packed_sequence.<locals>.inner_mask"


class Pattern(NamedTuple):
    """Keys that a mask function hides, apart from padding: later keys, keys before a window, other sequences."""

    causal: bool = False
    window: int | None = None  # largest number of visible keys, including the query's own position
    packed: Tensor | None = None  # (batch, seqlen): the sequence id of each token

    @classmethod
    def from_function(cls, mask_function: Callable[..., Any]) -> Pattern | None:
        """Returns the pattern, or None if the function hides anything else."""
        whole = cls._read(mask_function)
        return whole if whole is None or whole.causal or whole.window is None else None

    @classmethod
    def _read(cls, mask_function: Callable[..., Any]) -> Pattern | None:
        if mask_function is masking_utils.causal_mask_function:
            return cls(causal=True)
        if mask_function is getattr(masking_utils, "bidirectional_mask_function", None):
            return cls()
        inner = dict(zip(mask_function.__code__.co_freevars, mask_function.__closure__ or (), strict=True))
        held = {name: cell.cell_contents for name, cell in inner.items()}
        name = mask_function.__qualname__
        if name == _WINDOW:
            return cls(window=held["sliding_window"])
        if name == _PACKED:
            return cls(packed=held["packed_sequence_mask"])
        if name == _REMAPPED:  # consecutive positions within a sequence keep their differences
            return cls._read(held["mask_function"])
        if name != _AND:
            return None
        whole = cls()
        for part in map(cls._read, held["mask_functions"]):
            if part is None or (part.window and whole.window) or (part.packed is not None and whole.packed is not None):
                return None
            packed = whole.packed if part.packed is None else part.packed
            whole = cls(whole.causal or part.causal, whole.window or part.window, packed)
        return whole


class VarlenKeywords(NamedTuple):
    """Bounds of the sequences in the flattened rows of a batch, as keywords of `attention`."""

    keywords: dict[str, Any]
    causal: bool
    window: int | None = None


def varlen_of_packed(ids: Tensor, pattern: Pattern) -> VarlenKeywords:
    """Returns the bounds of rows that hold several sequences: a new one begins where the id (batch, seqlen) changes.

    The host waits for the device.
    """
    begins = pad(ids.diff(dim=1) != 0, (1, 0), value=True).flatten().nonzero().flatten()
    bounds = pad(begins, (0, 1), value=ids.numel()).int()
    longest = int(bounds.diff().max())
    keywords = {f"cu_seqlens_{side}": bounds for side in "qk"} | {f"max_seqlen_{side}": longest for side in "qk"}
    return VarlenKeywords(keywords, pattern.causal, pattern.window)


def varlen_of_padded(padding_mask: Tensor, seqlen_q: int, pattern: Pattern) -> VarlenKeywords | None:
    """Returns the bounds of rows with padding before and behind their tokens; None if it also lies between them.

    padding_mask (batch, seqlen_k) is True where a key counts. The last causal query is at the last key, and causal
    queries at padding become 0. The host waits for the device.
    """
    if not (pad(padding_mask, (1, 0))[:, :-1] < padding_mask).sum(1).le(1).all():
        return None
    seqlen_k = padding_mask.shape[1]
    first, used = padding_mask.int().argmax(1), padding_mask.sum(1)
    keywords = _ranges("k", first, used, seqlen_k)
    if pattern.causal:
        before = seqlen_k - seqlen_q
        begin, end = ((x - before).clamp(0, seqlen_q) for x in (first, first + used))
        keywords |= _ranges("q", begin, end - begin, seqlen_q)
    return VarlenKeywords(keywords, pattern.causal, pattern.window)


def varlen_of_function(
    mask_function: Any, padding: Tensor | None, seqlen_q: int, kv_offset: int, seqlen_k: int, ends: bool
) -> VarlenKeywords | None:
    """Returns the bounds of the sequences if a mask only separates them; None for other masks, and for none."""
    pattern = None if mask_function is None else Pattern.from_function(mask_function)
    if pattern is None or (pattern.causal and not ends):
        return None
    if pattern.packed is not None:
        is_plain = padding is None and pattern.packed.shape[1] == seqlen_q == seqlen_k
        return varlen_of_packed(pattern.packed, pattern) if is_plain else None
    end = kv_offset + seqlen_k
    if padding is None or padding.shape[1] < end:
        return None
    return varlen_of_padded(padding[:, kv_offset:end].bool(), seqlen_q, pattern)


def varlen_of_static(
    pattern: Pattern | None,
    padding_mask: Tensor | None,
    begin: int,
    used: int,
    shape: tuple[int, ...],
    device: torch.device,
) -> VarlenKeywords | None:
    """Returns the bounds of causal queries that end at key `used` of a larger cache, or None if padding hides some.

    padding_mask (batch, positions) is True where a key counts; the cache holds positions from `begin` on. shape:
    (batch, 1, seqlen_q, seqlen_k). The host waits for the device.
    """
    batch, _, seqlen_q, seqlen_k = shape
    if pattern is None or not pattern.causal or pattern.packed is not None or not seqlen_q <= used <= seqlen_k:
        return None
    if padding_mask is not None and (
        padding_mask.shape[1] < begin + used or not padding_mask[:, begin : begin + used].all()
    ):
        return None
    keywords = {"seqused_k": torch.full((batch,), used, dtype=torch.int32, device=device)}
    return VarlenKeywords(keywords, True, pattern.window)


def _ranges(side: str, first: Tensor, used: Tensor, seqlen: int) -> dict[str, Any]:
    """Returns the keywords for `used` rows of each batch row, from `first` on. Rows between ranges are unused."""
    batch = len(first)
    begins = torch.arange(batch, device=first.device) * seqlen + first
    bounds = pad(begins, (0, 1), value=batch * seqlen).int()
    return {f"cu_seqlens_{side}": bounds, f"seqused_{side}": used.int(), f"max_seqlen_{side}": seqlen}


_last_visible: list[
    tuple[Any, int, VarlenKeywords | None]
] = []  # the last position_ids, their version, and their bounds


def varlen_of_positions(position_ids: Any, batch: int, seqlen_q: int, seqlen_k: int) -> VarlenKeywords | None:
    """Returns the bounds of the sequences of a single row whose positions start again; None for one sequence.

    With a new cache transformers makes no mask of packed rows. All layers get one tensor, which is read once.
    """
    if not isinstance(position_ids, Tensor) or position_ids.shape != (1, seqlen_k) or is_traced():
        return None
    if batch != 1 or seqlen_q != seqlen_k or seqlen_k < 2:
        return None
    # Inference-mode tensors have no version counter, so changes to them would go unnoticed.
    version = -1 if position_ids.is_inference() else position_ids._version
    for mask, at_version, varlen in _last_visible:
        if mask() is position_ids and at_version == version >= 0:
            return varlen
    is_first = position_ids == position_ids.min()
    is_first[:, 0] = True
    several = bool(is_first[:, 1:].any())
    varlen = varlen_of_packed(is_first.cumsum(1), Pattern()) if several else None
    _last_visible[:] = [(weakref.ref(position_ids), version, varlen)]
    return varlen


_ABOUT = frozenset(
    {
        getattr(Tensor, name).__get__
        for name in (
            *("shape", "dtype", "device", "ndim", "layout", "requires_grad", "is_cuda", "is_nested", "is_sparse"),
            *("is_quantized", "is_mkldnn", "is_meta", "is_leaf", "grad", "grad_fn", "_base"),
        )
    }
    | {Tensor.size, Tensor.dim, Tensor.is_floating_point}
    # Dynamo reads these, and expects the values of the memory.
    | {Tensor.stride, Tensor.storage_offset, Tensor.is_contiguous, Tensor.is_conj, Tensor.is_neg}
    | {Tensor._is_view, Tensor.untyped_storage}
)


class SequenceMask(Tensor):
    """A stand-in for a boolean mask (batch, 1, seqlen_q, seqlen_k), computed only if a function is called with it.

    Layers pass their masks on, and a few read them or cut them to the number of keys. A mask of 32k tokens has 1 GB.
    """

    varlen: VarlenKeywords | None
    _make: Callable[[], Tensor]
    _mask_mod: Callable[..., Any]

    @staticmethod
    def create(
        varlen: VarlenKeywords | None,
        shape: tuple[int, ...],
        device: Any,
        make: Callable[[], Tensor],
        mask_mod: Callable[..., Any],
    ) -> SequenceMask:
        """Builds a mask. varlen: None if it does more than separate sequences. mask_mod: the mask as a function."""
        # Zeros: code that reads this memory past `__torch_function__` sees no key, instead of other sequences' keys.
        mask: Any = torch.zeros((), dtype=torch.bool, device=device).expand(shape).as_subclass(SequenceMask)
        mask.varlen, mask._make, mask._mask_mod = varlen, make, mask_mod
        return mask  # type: ignore[no-any-return]

    def whole(self) -> Tensor:
        """Returns the mask as a plain tensor."""
        tensor = self.__dict__.get("_whole")
        if tensor is None:
            tensor = self._whole = self._make()
        return tensor

    def as_function(self, heads: int) -> dict[str, Any] | None:
        """Returns the keywords of `attention`, shared by all layers; None if cuflash cannot trace the function."""
        if heads not in (keywords := self.__dict__.setdefault("_keywords", {})):
            keywords[heads] = keywords_of(self._mask_mod, tuple(self.shape), heads, self.device)
        found_keywords: dict[str, Any] | None = keywords[heads]
        return found_keywords

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _ABOUT or _cuts_nothing(func, args):
            with torch._C.DisableTorchFunctionSubclass():
                return args[0] if func is Tensor.__getitem__ else func(*args, **(kwargs or {}))
        args, kwargs = tree_map(lambda x: x.whole() if isinstance(x, cls) else x, (args, kwargs or {}))
        return func(*args, **kwargs)


def _cuts_nothing(func: Any, args: Any) -> bool:
    """True if an index expression selects all of a mask."""
    if func is not Tensor.__getitem__ or not isinstance(args[1], tuple) or len(args[1]) > args[0].dim():
        return False
    lengths = zip(args[1], args[0].shape, strict=False)
    return all(isinstance(x, slice) and x.indices(length) == (0, length, 1) for x, length in lengths)


def also_packed(mask: Tensor, bounds_q: Tensor, bounds_k: Tensor) -> Tensor:
    """Returns a mask tensor that also hides keys of sequences other than the query's."""
    batch, _, seqlen_q, seqlen_k = mask.shape
    of_q, of_k = (
        torch.searchsorted(bounds, torch.arange(batch * length, device=mask.device), right=True).view(-1, length)
        for bounds, length in ((bounds_q, seqlen_q), (bounds_k, seqlen_k))
    )
    same = (of_q[:, :, None] == of_k[:, None])[:, None]
    return mask & same if mask.dtype == torch.bool else mask.masked_fill(~same, torch.finfo(mask.dtype).min)


def is_recorded() -> bool:
    """True while a graph of PyTorch's ops is recorded."""
    return bool(torch.compiler.is_compiling() or torch.jit.is_tracing())


def is_traced() -> bool:
    """True while a trace or a capture runs, in which the values of tensors cannot be read."""
    if is_recorded():  # first: Dynamo cannot trace the call below
        return True
    return bool(torch.cuda.is_available() and torch.cuda.is_current_stream_capturing())


def is_whole(padding: Tensor | None, begin: int, end: int) -> bool:
    """True if none of the keys `begin … end - 1` is padding."""
    if padding is None:
        return True
    return padding.shape[1] >= end and not is_traced() and bool(padding[:, begin:end].all())
