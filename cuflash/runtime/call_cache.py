"""A cache of what repeated calls share, bounded in bytes, with second-chance eviction."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable
from typing import Any

from ..locks import Lock


class SecondChanceCache:
    """A map that drops the values unused for longest; all but the newest take at most `max_bytes`.

    Values stand in a queue. A value that was used since it came to the back goes there again instead of being dropped
    (the "second chance" algorithm). Recording a use costs a third of moving the value at once.
    """

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes, self.num_bytes = max_bytes, 0
        self._entries: OrderedDict[Hashable, list[Any]] = OrderedDict()  # value, bytes, True if it was used
        self._lock = Lock(reentrant=True)  # the finalizer of a value dropped in `put` may make a call
        self._find = self._entries.get

    def get(self, key: Hashable) -> Any:
        """Returns the value of this key, or None; raises TypeError for an unhashable key."""
        entry = self._find(key)
        if entry is None:
            return None
        entry[2] = True
        return entry[0]

    def put(self, key: Hashable, value: Any, size: int) -> None:
        """Stores a value of about `size` bytes."""
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
        self._hashes: OrderedDict[int, None] = OrderedDict()  # a dict searches long for its first item

    def add(self, key: Hashable) -> bool:
        """Adds a key and returns False; removes it and returns True if its hash was there."""
        number, hashes = hash(key), self._hashes
        if number in hashes:
            hashes.pop(number, None)
            return True
        hashes[number] = None
        if len(hashes) > self._count:
            hashes.popitem(last=False)
        return False
