"""Locks that a child by fork never finds held by a thread that it does not have: a fork waits until they are free.

why no lock of `threading`: fork copies the thread that calls it alone, so that a lock which another thread has is never
released in the child. That goes for locks inside of what that thread is doing, too, as compilers and imports have them.
"""

from __future__ import annotations

import concurrent.futures.thread as _thread_pools
import logging as _logging
import os
import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import Any, Generic, Self, TypeVar, overload

Value = TypeVar("Value")


class _ThreadState(threading.local):
    sections = 0  # that this thread is in


PAUSE = 1e-3  # seconds between two looks of a thread that waits
# The most seconds that a section may last and that a fork waits. A thread that waits for another process in a section
# derives its limit from this one: runtime/disk_cache.py.
MOST_SECONDS = 600.0

_thread = _ThreadState()
_gate = threading.RLock()  # why reentrant: a signal may call what enters a section, or forks, while this thread has it
_inside = 0  # threads that are in a section
_forks = 0  # that wait. New sections wait for them: of busy threads there would always be one in a section.


class Section:
    """Forks of other threads wait until this thread has left what is inside of `with`."""

    __slots__ = ()

    def __enter__(self) -> None:
        global _inside
        if not _thread.sections:
            while _forks:
                time.sleep(PAUSE)
            with _gate:
                _inside += 1
        _thread.sections += 1

    def __exit__(self, *error: BaseException | type[BaseException] | TracebackType | None) -> None:
        global _inside
        _thread.sections -= 1
        if not _thread.sections:
            with _gate:
                _inside -= 1


uninterrupted = Section()


class Lock:
    """`threading.Lock`, or RLock if `reentrant`, for `with` alone; a thread that has or awaits it is in a section."""

    __slots__ = ("_lock",)

    def __init__(self, reentrant: bool = False) -> None:
        self._lock = threading.RLock() if reentrant else threading.Lock()

    def __enter__(self) -> None:
        uninterrupted.__enter__()
        try:
            self._lock.acquire()
        except BaseException:
            uninterrupted.__exit__()
            raise

    def __exit__(self, *error: BaseException | type[BaseException] | TracebackType | None) -> None:
        self._lock.release()
        uninterrupted.__exit__()


class Once(Generic[Value]):
    """`functools.cached_property`, which before Python 3.12 has a lock that a thread may have while another forks."""

    def __init__(self, function: Callable[[Any], Value]) -> None:
        self.function, self.__doc__ = function, function.__doc__

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name

    @overload
    def __get__(self, instance: None, owner: type | None = None) -> Self: ...

    @overload
    def __get__(self, instance: object, owner: type | None = None) -> Value: ...

    def __get__(self, instance: object | None, owner: type | None = None) -> Self | Value:
        if instance is None:
            return self
        value = instance.__dict__[self.name] = self.function(instance)
        return value


def _before_fork() -> None:
    """Returns with the gate closed, so that no thread enters a section until the process is forked."""
    global _forks
    end = time.monotonic() + MOST_SECONDS
    with _gate:
        _forks += 1
    try:
        while True:
            _gate.acquire()
            # why not from within a section: a thread in one may wait for a lock that this thread has.
            if not _inside or _thread.sections or time.monotonic() > end:
                break
            _gate.release()
            time.sleep(PAUSE)
    finally:
        with _gate:
            _forks -= 1


def _after_fork_in_parent() -> None:
    _gate.release()


def _after_fork_in_child() -> None:
    global _gate, _inside, _forks
    _gate, _inside, _forks = threading.RLock(), min(_thread.sections, 1), 0


# why they are imported first: before a fork they take locks, for which a thread in a section may wait. What is
# registered last is called first, so that none of these locks is taken yet while a fork waits below.
REGISTERED_BEFORE = _logging, _thread_pools
if hasattr(os, "register_at_fork"):  # why asked: Windows has no fork
    os.register_at_fork(before=_before_fork, after_in_parent=_after_fork_in_parent, after_in_child=_after_fork_in_child)
