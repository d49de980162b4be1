"""Keys of the tensors of a call. The guards of torch.compile recognize tensors like those of one of the last calls.

A guard compares types, shapes, strides, dtypes, devices and all that autograd and views add to a tensor, of all tensors
of a call together, in less time than Python takes to ask one of them. It is not public: where PyTorch has none, or
another one than is expected here, keys are made of attributes that Python reads.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from functools import lru_cache, partial
from operator import itemgetter
from typing import Any, NamedTuple

RECENT = 16  # kinds of calls that have guards: as many as a program may repeat in turns. One that fails takes 0.1 µs
MISSES_OF_A_GUARD = 64  # calls without a guard after which the oldest guard gives way to a new one
MAX_KEYS = 4096  # keys


class _Recent(NamedTuple):
    """Of the arrays of a call: their types, which are tensors, whether others are like them, and their key.

    has_grad: whether some require grad. The key is then of calls for which no gradients are recorded.
    """

    types: list[type]
    tensors: Callable[[Sequence[Any]], tuple[Any, ...]]
    is_alike: Callable[..., bool]
    has_grad: bool
    key: Hashable


class TensorKeys:
    """Finds keys of arrays, which are equal for those that differ in their memory alone.

    key_of: makes the key of one tensor; its last element is True where the tensor must be validated each time.
    """

    def __init__(self, torch: Any, key_of: Callable[[Any], tuple[Any, ...]]) -> None:
        self._torch, self._key_of, self._records_grad = torch, key_of, torch.is_grad_enabled
        self._plain_types = {torch.Tensor, torch.nn.Parameter}
        self._guards = _guards(torch)
        self._recent: tuple[_Recent, ...] = ()
        self._misses = 0
        # why an object for each: it is equal to itself alone, and so found faster than a tuple.
        self._object_of = lru_cache(MAX_KEYS)(lambda keys: object())

    def find(self, arrays: Sequence[Any]) -> Hashable:
        """The key of the arrays of a call, of which None is no array."""
        types = [*map(type, arrays)]
        # why: a guard that checks a nested tensor ends the process.
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
        # why not each time: of more kinds in turns, each guard would be dropped before its turn comes.
        has_room = len(self._recent) < RECENT or self._misses % MISSES_OF_A_GUARD == 0
        if has_room and self._guards is not None and not any([x is not None and x[-1] for x in keys]):
            self._remember(arrays, types, key)
        return key

    def _remember(self, arrays: Sequence[Any], types: list[type], key: Hashable) -> None:
        """Makes a guard of these arrays the first that is tried."""
        present = [number for number, x in enumerate(arrays) if x is not None]
        tensors = [arrays[number] for number in present]
        # why: a guard refuses a tensor that is given twice.
        if len({*map(id, tensors)}) < max(len(tensors), 2) or not all(map(self._is_plain, tensors)):
            return
        has_grad = any(x.requires_grad for x in tensors)
        recent = _Recent(types, itemgetter(*present), self._guards(*tensors).check, has_grad, key)
        self._recent = (recent, *self._recent)[:RECENT]

    def _is_plain(self, tensor: Any) -> bool:
        is_strided = tensor.layout is self._torch.strided and not tensor.is_nested
        return is_strided and type(tensor) in self._plain_types


def _guards(torch: Any) -> Any:
    """Returns the class of guards, or None if PyTorch has no such class that tells tensors apart."""
    like = partial(torch.empty, dtype=torch.float32, device="cpu")
    try:
        guards = partial(torch._C._dynamo.guards.TensorGuards, dynamic_dims_sizes=None, dynamic_dims_strides=None)
        with torch.inference_mode(False), torch.enable_grad():
            one, other = like(2, 3), like(3, 2)
            others = [(one.t(), other), (one, one), (one.double(), other), (one, other[:, :1])]
            others.append((like(2, 3, requires_grad=True), other))
            check = guards(one, other).check
            tells_apart = check(like(2, 3), like(3, 2)) and not any(check(*each) for each in others)
    except Exception:  # what is not public may raise anything
        return None
    return guards if tells_apart else None
