"""Cache keys for the tensors of a call, found by guards of torch.compile.

A guard compares all tensors of a call with the tensors of an earlier call. It covers types, shapes, strides, dtypes,
devices and the state of autograd and views, in less time than Python takes to read one tensor's attributes. Guards are
not public: if PyTorch has no guards, or unexpected ones, keys are built from attributes that Python reads.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from functools import lru_cache, partial
from operator import itemgetter
from typing import Any, NamedTuple

RECENT = 16  # most guards, one for each kind of call that a program repeats in turns. A guard that fails takes 0.1 µs
MISSES_OF_A_GUARD = 64  # every so many calls without a guard, a new guard replaces the oldest one
MAX_KEYS = 4096  # keys in the cache of key objects


class _Recent(NamedTuple):
    """A guard for the arrays of a call, and their key.

    types: types of all arrays. tensors: selects the tensors among the arrays. is_alike: True if tensors pass the guard.
    has_grad: True if a tensor requires grad; the key is then for calls that record no gradients.
    """

    types: list[type]
    tensors: Callable[[Sequence[Any]], tuple[Any, ...]]
    is_alike: Callable[..., bool]
    has_grad: bool
    key: Hashable


class TensorKeys:
    """A finder of keys of arrays. Keys are equal if arrays differ only in their memory.

    key_of: returns the key of one tensor; the key's last element is True if every call must validate the tensor.
    """

    def __init__(self, torch: Any, key_of: Callable[[Any], tuple[Any, ...]]) -> None:
        self._torch, self._key_of, self._records_grad = torch, key_of, torch.is_grad_enabled
        self._plain_types = {torch.Tensor, torch.nn.Parameter}
        self._guards = _guards(torch)
        self._recent: tuple[_Recent, ...] = ()
        self._misses = 0
        # An object as key: it is compared by identity, which makes lookups faster than with a tuple.
        self._object_of = lru_cache(MAX_KEYS)(lambda keys: object())

    def find(self, arrays: Sequence[Any]) -> Hashable:
        """Returns the key of the arrays of a call; None is no array."""
        types = [*map(type, arrays)]
        # A guard that checks a nested tensor ends the process.
        if not any([x is not None and x.is_nested for x in arrays]):
            for recent in self._recent:
                if recent.types == types and recent.is_alike(*recent.tensors(arrays)):
                    if recent.has_grad and self._records_grad():
                        break
                    return recent.key
        key_of = self._key_of
        keys = tuple([None if x is None else key_of(x) for x in arrays])
        key = self._object_of(keys)
        self._misses += 1
        # Replaced every 64 misses only: with more than 16 kinds of calls in turns, each new guard would be dropped
        # before its kind of call returns.
        has_room = len(self._recent) < RECENT or self._misses % MISSES_OF_A_GUARD == 0
        if has_room and self._guards is not None and not any([x is not None and x[-1] for x in keys]):
            self._remember(arrays, types, key)
        return key

    def _remember(self, arrays: Sequence[Any], types: list[type], key: Hashable) -> None:
        """Puts a guard of these arrays in front of the others."""
        present = [number for number, x in enumerate(arrays) if x is not None]
        tensors = [arrays[number] for number in present]
        # A guard refuses a repeated tensor. A single tensor gets none: `itemgetter` of one index returns no tuple.
        if len({*map(id, tensors)}) < max(len(tensors), 2) or not all(map(self._is_plain, tensors)):
            return
        has_grad = any(x.requires_grad for x in tensors)
        recent = _Recent(types, itemgetter(*present), self._guards(*tensors).check, has_grad, key)
        self._recent = (recent, *self._recent)[:RECENT]

    def _is_plain(self, tensor: Any) -> bool:
        is_strided = tensor.layout is self._torch.strided and not tensor.is_nested
        return is_strided and type(tensor) in self._plain_types


def _guards(torch: Any) -> Any:
    """Returns PyTorch's class of guards, or None if there is none that distinguishes tensors as needed here."""
    like = partial(torch.empty, dtype=torch.float32, device="cpu")
    try:
        guards = partial(torch._C._dynamo.guards.TensorGuards, dynamic_dims_sizes=None, dynamic_dims_strides=None)
        with torch.inference_mode(False), torch.enable_grad():
            one, other = like(2, 3), like(3, 2)
            others = [(one.t(), other), (one, one), (one.double(), other), (one, other[:, :1])]
            others.append((like(2, 3, requires_grad=True), other))
            check = guards(one, other).check
            tells_apart = check(like(2, 3), like(3, 2)) and not any(check(*each) for each in others)
    except Exception:  # private functions may raise anything
        return None
    return guards if tells_apart else None
