"""A cache of what repeated calls share, bounded in bytes, with second-chance eviction."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable
from typing import Any

from ..locks import Lock


class SecondChanceCache:
    """Values by key, of which those that were not used for longest are dropped.

    All but the newest take at most `max_bytes`.

    Values stand in a queue. One that was used since it was put in, or last spared, goes to the back again instead of
    being dropped (the "second chance" algorithm): to note a use is a third of the cost of moving it at once.
    """

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes, self.num_bytes = max_bytes, 0
        self._entries: OrderedDict[Hashable, list[Any]] = OrderedDict()  # value, bytes, whether it was used
        self._lock = Lock(reentrant=True)  # why: what is dropped in `put` may end with a call of its own
        self._find = self._entries.get

    def get(self, key: Hashable) -> Any:
        """Returns the value of this key, or None. TypeError for a key that cannot be hashed."""
        entry = self._find(key)
        if entry is None:
            return None
        entry[2] = True
        return entry[0]

    def put(self, key: Hashable, value: Any, size: int) -> None:
        """Keeps a value that takes about `size` bytes."""
        with self._lock:
            entries, new = self._entries, [value, size, False]
            self.num_bytes += size
            if (entry := entries.setdefault(key, new)) is not new:
                self.num_bytes -= entry[1]
                entry[:] = new
            while self.num_bytes > self.max_bytes and len(entries) > 1:
                oldest, entry = entries.popitem(last=False)
                if entry[2] or oldest == key:
                    entry[2] = False
                    entries[oldest] = entry
                else:
                    self.num_bytes -= entry[1]

    def clear(self) -> None:
        """Drops everything."""
        with self._lock:
            self._entries.clear()
            self.num_bytes = 0

    def __len__(self) -> int:
        return len(self._entries)


class RecentKeys:
    """The last `count` keys that were added for the first time."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._hashes: OrderedDict[int, None] = OrderedDict()  # why not a dict: it searches long for its first item

    def add(self, key: Hashable) -> bool:
        """Returns True and forgets a key if it was there, else adds it. Keys are compared by their hash."""
        number, hashes = hash(key), self._hashes
        if number in hashes:
            hashes.pop(number, None)
            return True
        hashes[number] = None
        if len(hashes) > self._count:
            hashes.popitem(last=False)
        return False
