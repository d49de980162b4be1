"""GPU memory for calls under test: it holds NaN until it is written, and bytes beside it that nothing may write."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

from .oracle import demand

GUARD = 1 << 14  # bytes before and behind an allocation, a multiple of what CuPy aligns to
FILL = 0xFF  # in every dtype of floats, all bits are a NaN


class GuardedMemory:
    """The memory that CuPy allocates inside `active`: arrays of the caller, results and workspaces alike."""

    def __init__(self, cupy: Any) -> None:
        self._cupy = cupy
        self._pool = cupy.cuda.MemoryPool()
        self._allocations: list[tuple[Any, int]] = []

    def active(self) -> AbstractContextManager[Any]:
        """Inside, this thread's arrays come from here."""
        context: AbstractContextManager[Any] = self._cupy.cuda.using_allocator(self._allocate)
        return context

    def _allocate(self, nbytes: int) -> Any:
        size = nbytes + 2 * GUARD
        memory = self._pool.malloc(size)
        memory.memset_async(FILL, size, self._cupy.cuda.get_current_stream())
        self._allocations.append((memory, nbytes))
        return memory + GUARD

    def forget(self) -> None:
        """Gives all memory back, once nothing else refers to it."""
        self._allocations.clear()

    def check(self) -> None:
        """Raises MismatchError if a guard was written to. The GPU must have done its work."""
        for memory, nbytes in self._allocations:
            for place, begin in (("before", 0), ("behind", GUARD + nbytes)):
                guard = self._cupy.ndarray((GUARD,), "uint8", memptr=memory + begin).get()
                demand((guard == FILL).all(), f"something wrote {place} an array of {nbytes} bytes")
