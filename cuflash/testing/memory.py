"""GPU memory for calls under test, filled with NaN and surrounded by guard bytes that no kernel may write."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

from .oracle import demand

GUARD = 1 << 14  # bytes before and behind an allocation, a multiple of CuPy's alignment
FILL = 0xFF  # all bits set are a NaN in every float dtype


class GuardedMemory:
    """An allocator for CuPy inside `active`: for the caller's arrays, results and workspaces."""

    def __init__(self, cupy: Any) -> None:
        self._cupy = cupy
        self._pool = cupy.cuda.MemoryPool()
        self._allocations: list[tuple[Any, int]] = []

    def active(self) -> AbstractContextManager[Any]:
        """Returns a context in which this thread's arrays are allocated here."""
        context: AbstractContextManager[Any] = self._cupy.cuda.using_allocator(self._allocate)
        return context

    def _allocate(self, nbytes: int) -> Any:
        size = nbytes + 2 * GUARD
        memory = self._pool.malloc(size)
        memory.memset_async(FILL, size, self._cupy.cuda.get_current_stream())
        self._allocations.append((memory, nbytes))
        return memory + GUARD

    def forget(self) -> None:
        """Drops all references to the memory."""
        self._allocations.clear()

    def check(self) -> None:
        """Raises MismatchError if a guard was written to. The GPU must have finished its work."""
        for memory, nbytes in self._allocations:
            for place, begin in (("before", 0), ("behind", GUARD + nbytes)):
                guard = self._cupy.ndarray((GUARD,), "uint8", memptr=memory + begin).get()
                demand((guard == FILL).all(), f"something wrote {place} an array of {nbytes} bytes")
