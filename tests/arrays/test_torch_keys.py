"""Keys of tensors: equal if tensors differ only in their memory, with and without guards."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from cuflash.arrays import torch_keys
from cuflash.arrays.find import library_of
from cuflash.arrays.torch import TorchLibrary
from cuflash.arrays.torch_keys import RECENT, TensorKeys


@pytest.fixture(params=["guards", "no guards"])
def find(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    if request.param == "no guards":
        monkeypatch.setattr(torch_keys, "_guards", lambda torch: None)
    return TensorKeys(torch, TorchLibrary()._key).find


def call(**changes: Any) -> list[Any]:
    """Returns the arrays of a call, with some changed."""
    operands = {"q": torch.zeros(2, 3, 4), "k": torch.zeros(2, 3, 4), "v": torch.zeros(2, 3, 5), "lengths": None}
    return [*(operands | changes).values()]


CHANGED = {
    "shape": lambda: {"k": torch.zeros(2, 4, 4)},
    "stride": lambda: {"k": torch.zeros(2, 4, 3).transpose(1, 2)},
    "dtype": lambda: {"v": torch.zeros(2, 3, 5, dtype=torch.float16)},
    "one more": lambda: {"lengths": torch.zeros(2, dtype=torch.int32)},
    "one less": lambda: {"v": None},
    "requires grad": lambda: {"q": torch.zeros(2, 3, 4, requires_grad=True)},
    "negated view": lambda: {"q": torch.zeros(2, 3, 4, dtype=torch.complex64).conj().imag},
}


@pytest.mark.parametrize("change", CHANGED)
def test_what_differs_in_more_than_memory_has_another_key(find: Any, change: str) -> None:
    plain = find(call())
    other = find(call(**CHANGED[change]()))
    assert plain != other
    for _ in range(3):
        assert find(call()) == plain
        assert find(call(**CHANGED[change]())) == other


def test_a_tensor_that_requires_grad_has_another_key_in_grad_mode(find: Any) -> None:
    arrays = call(q=torch.zeros(2, 3, 4, requires_grad=True))
    with torch.no_grad():
        without = [find(arrays) for _ in range(3)]
    assert find(arrays) not in without
    with torch.no_grad():
        assert {find(arrays), *without} == {without[0]}


def test_keys_are_found_again_after_many_others_and_hold_no_tensor(find: Any) -> None:
    arrays = call()
    first = find(arrays)
    for length in range(1, 3 * RECENT):
        find(call(q=torch.zeros(length, 3, 4)))
    assert find(arrays) == first
    held = weakref.ref(arrays[0])
    del arrays
    gc.collect()
    assert held() is None


def test_one_tensor_in_two_places_has_a_key(find: Any) -> None:
    one = torch.zeros(2, 3, 4)
    first = find([one, one, one])
    assert [find([one, one, one]) for _ in range(3)] == [first] * 3
    assert find([torch.zeros(2, 3, 4) for _ in range(3)]) == first  # only memory differs


def test_guards_are_found_in_the_pytorch_that_is_tested() -> None:
    with torch.inference_mode():
        assert torch_keys._guards(torch) is not None


def test_guards_that_do_not_tell_tensors_apart_are_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    class Untraceable:
        def __init__(self, *tensors: Any, **dims: Any) -> None: ...
        def check(self, *tensors: Any) -> bool:
            return True

    for guards in (Untraceable, lambda *tensors: None, None):
        monkeypatch.setattr(torch._C._dynamo.guards, "TensorGuards", guards)
        assert torch_keys._guards(torch) is None


@pytest.mark.filterwarnings("ignore:.*nested tensors")
@pytest.mark.parametrize("layout", ["nested", "sparse"])
def test_nested_and_sparse_tensors_are_refused_by_name(layout: str) -> None:
    import cuflash
    from cuflash.errors import UnsupportedError

    dense = torch.zeros(2, 3, 4)
    library = library_of("q", dense)
    plain = [torch.zeros(2, 3, 4) for _ in range(3)]
    keys = library.key(plain), library.key(plain)  # the first creates a guard, the second uses it
    other = torch.nested.nested_tensor([torch.zeros(3, 4)] * 2) if layout == "nested" else dense.to_sparse()
    for _ in range(2):
        with pytest.raises(UnsupportedError, match="k is a nested or sparse tensor; give a dense one"):
            cuflash.forward(dense, other, dense)
    for _ in range(2):
        assert library.key([plain[0], other, plain[1]]) not in keys
        assert library.key([other, *plain[1:]]) not in keys


def test_where_kinds_are_more_than_guards_most_calls_still_find_theirs(monkeypatch: pytest.MonkeyPatch) -> None:
    keys = TensorKeys(torch, TorchLibrary()._key)
    calls, guards = [], keys._guards
    monkeypatch.setattr(keys, "_guards", lambda *tensors: calls.append(1) or guards(*tensors))
    kinds = [call(q=torch.zeros(length + 1, 3, 4)) for length in range(RECENT + 5)]
    first = [keys.find(kind) for kind in kinds]
    for _ in range(20):
        assert [keys.find(kind) for kind in kinds] == first
    assert RECENT <= len(calls) <= RECENT + (20 + 1) * 5 // torch_keys.MISSES_OF_A_GUARD + 1
