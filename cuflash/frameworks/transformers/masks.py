"""Masks of transformers that only say where sequences lie: packed rows, batches with padding, caches that have room.

transformers describes a mask by a function that is put together from a few of its own, and by a table of which tokens
count. Both are read here. A `SequenceMask` goes through the model in place of the mask that it stands for. Functions
that say more than where sequences lie are those of `mask_mod.py`.
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
    """What a mask function hides, apart from padding: later keys, keys before a window, keys of other sequences."""

    causal: bool = False
    window: int | None = None  # how many keys a query sees at most, its own among them
    packed: Tensor | None = None  # (batch, seqlen), to which sequence each token belongs

    @classmethod
    def from_function(cls, mask_function: Callable[..., Any]) -> Pattern | None:
        """None if the function hides anything else."""
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
        if name == _REMAPPED:  # positions within a sequence are consecutive, so that differences stay the same
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


class Places(NamedTuple):
    """Where sequences lie in the rows of a batch that are put one after the other, as keywords of `attention`."""

    keywords: dict[str, Any]
    causal: bool
    window: int | None = None


def places_of_packed(ids: Tensor, pattern: Pattern) -> Places:
    """Of rows that hold one sequence after the other: a new one begins where the number (batch, seqlen) changes.

    It waits for the device.
    """
    begins = pad(ids.diff(dim=1) != 0, (1, 0), value=True).flatten().nonzero().flatten()
    bounds = pad(begins, (0, 1), value=ids.numel()).int()
    longest = int(bounds.diff().max())
    keywords = {f"cu_seqlens_{side}": bounds for side in "qk"} | {f"max_seqlen_{side}": longest for side in "qk"}
    return Places(keywords, pattern.causal, pattern.window)


def places_of_padded(padding_mask: Tensor, seqlen_q: int, pattern: Pattern) -> Places | None:
    """Of rows with padding before and behind their tokens; None if it also lies between them.

    padding_mask (batch, seqlen_k) is True where a key counts. The last of causal queries stands at the last key, and
    those without a key of their own become 0. It waits for the device.
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
    return Places(keywords, pattern.causal, pattern.window)


def places_of_function(
    mask_function: Any, padding: Tensor | None, seqlen_q: int, kv_offset: int, seqlen_k: int, ends: bool
) -> Places | None:
    """Where sequences lie if a mask says just that; None if it says less, or anything else."""
    pattern = None if mask_function is None else Pattern.from_function(mask_function)
    if pattern is None or (pattern.causal and not ends):
        return None
    if pattern.packed is not None:
        is_plain = padding is None and pattern.packed.shape[1] == seqlen_q == seqlen_k
        return places_of_packed(pattern.packed, pattern) if is_plain else None
    end = kv_offset + seqlen_k
    if padding is None or padding.shape[1] < end:
        return None
    return places_of_padded(padding[:, kv_offset:end].bool(), seqlen_q, pattern)


def places_of_static(
    pattern: Pattern | None,
    padding_mask: Tensor | None,
    begin: int,
    used: int,
    shape: tuple[int, ...],
    device: torch.device,
) -> Places | None:
    """Of causal queries that end at key number `used` of a cache with more room; None if padding hides some before it.

    padding_mask (batch, positions) is True where a key counts; the cache holds those from `begin` on. shape: (batch, 1,
    seqlen_q, seqlen_k). It waits for the device.
    """
    batch, _, seqlen_q, seqlen_k = shape
    if pattern is None or not pattern.causal or pattern.packed is not None or not seqlen_q <= used <= seqlen_k:
        return None
    if padding_mask is not None and (
        padding_mask.shape[1] < begin + used or not padding_mask[:, begin : begin + used].all()
    ):
        return None
    keywords = {"seqused_k": torch.full((batch,), used, dtype=torch.int32, device=device)}
    return Places(keywords, True, pattern.window)


def _ranges(side: str, first: Tensor, used: Tensor, seqlen: int) -> dict[str, Any]:
    """`used` rows of each row of the batch, from `first` on. What lies between two ranges is given as not used."""
    batch = len(first)
    begins = torch.arange(batch, device=first.device) * seqlen + first
    bounds = pad(begins, (0, 1), value=batch * seqlen).int()
    return {f"cu_seqlens_{side}": bounds, f"seqused_{side}": used.int(), f"max_seqlen_{side}": seqlen}


_last_visible: list[tuple[Any, int, Places | None]] = []  # the last position_ids, their version, and what they said


def places_of_positions(position_ids: Any, batch: int, seqlen_q: int, seqlen_k: int) -> Places | None:
    """Where the sequences lie whose positions start again in a single row; None for one sequence.

    why: with a new cache transformers makes no mask of packed rows. All layers get the same tensor, which is read once.
    """
    if not isinstance(position_ids, Tensor) or position_ids.shape != (1, seqlen_k) or is_traced():
        return None
    if batch != 1 or seqlen_q != seqlen_k or seqlen_k < 2:
        return None
    # why: tensors of torch.inference_mode have no version, so that a change of them would not be seen.
    version = -1 if position_ids.is_inference() else position_ids._version
    for mask, at_version, places in _last_visible:
        if mask() is position_ids and at_version == version >= 0:
            return places
    is_first = position_ids == position_ids.min()
    is_first[:, 0] = True
    several = bool(is_first[:, 1:].any())
    places = places_of_packed(is_first.cumsum(1), Pattern()) if several else None
    _last_visible[:] = [(weakref.ref(position_ids), version, places)]
    return places


_ABOUT = frozenset(
    {
        getattr(Tensor, name).__get__
        for name in (
            *("shape", "dtype", "device", "ndim", "layout", "requires_grad", "is_cuda", "is_nested", "is_sparse"),
            *("is_quantized", "is_mkldnn", "is_meta", "is_leaf", "grad", "grad_fn", "_base"),
        )
    }
    | {Tensor.size, Tensor.dim, Tensor.is_floating_point}
    # why: Dynamo asks for these, and expects those of the memory.
    | {Tensor.stride, Tensor.storage_offset, Tensor.is_contiguous, Tensor.is_conj, Tensor.is_neg}
    | {Tensor._is_view, Tensor.untyped_storage}
)


class SequenceMask(Tensor):
    """Stands for a boolean mask (batch, 1, seqlen_q, seqlen_k), which is made only if a function is called with it.

    why: layers pass their masks on, and a few look at them or cut them to the keys that there are; a mask of 32k tokens
    has 1 GB.
    """

    places: Places | None
    _make: Callable[[], Tensor]
    _mask_mod: Callable[..., Any]

    @staticmethod
    def create(
        places: Places | None,
        shape: tuple[int, ...],
        device: Any,
        make: Callable[[], Tensor],
        mask_mod: Callable[..., Any],
    ) -> SequenceMask:
        """places: where sequences lie, if that is all that the mask says. mask_mod: the mask as a function."""
        # why zeros: code that reads this memory past `__torch_function__` sees no key, and not those of others.
        mask: Any = torch.zeros((), dtype=torch.bool, device=device).expand(shape).as_subclass(SequenceMask)
        mask.places, mask._make, mask._mask_mod = places, make, mask_mod
        return mask  # type: ignore[no-any-return]

    def whole(self) -> Tensor:
        """The mask as a plain tensor."""
        tensor = self.__dict__.get("_whole")
        if tensor is None:
            tensor = self._whole = self._make()
        return tensor

    def as_function(self, heads: int) -> dict[str, Any] | None:
        """The keywords of `attention`, which all layers share; None if cuflash cannot trace the function."""
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
    """Whether this takes a part of a mask that is all of it."""
    if func is not Tensor.__getitem__ or not isinstance(args[1], tuple) or len(args[1]) > args[0].dim():
        return False
    lengths = zip(args[1], args[0].shape, strict=False)
    return all(isinstance(x, slice) and x.indices(length) == (0, length, 1) for x, length in lengths)


def also_packed(mask: Tensor, bounds_q: Tensor, bounds_k: Tensor) -> Tensor:
    """A mask tensor that also hides keys of other sequences than the query's."""
    batch, _, seqlen_q, seqlen_k = mask.shape
    of_q, of_k = (
        torch.searchsorted(bounds, torch.arange(batch * length, device=mask.device), right=True).view(-1, length)
        for bounds, length in ((bounds_q, seqlen_q), (bounds_k, seqlen_k))
    )
    same = (of_q[:, :, None] == of_k[:, None])[:, None]
    return mask & same if mask.dtype == torch.bool else mask.masked_fill(~same, torch.finfo(mask.dtype).min)


def is_recorded() -> bool:
    """Whether somebody makes a graph of PyTorch's ops of what runs."""
    return bool(torch.compiler.is_compiling() or torch.jit.is_tracing())


def is_traced() -> bool:
    """Whether a trace or a capture runs, in which the values of tensors cannot be read."""
    if is_recorded():  # why first: Dynamo cannot trace the question below
        return True
    return bool(torch.cuda.is_available() and torch.cuda.is_current_stream_capturing())


def is_whole(padding: Tensor | None, begin: int, end: int) -> bool:
    """Whether none of the keys `begin … end - 1` is padding."""
    if padding is None:
        return True
    return padding.shape[1] >= end and not is_traced() and bool(padding[:, begin:end].all())
