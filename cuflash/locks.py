"""Fork-safe locks: a fork waits until they are free, so a child never inherits a held lock.

A lock of `threading` is not fork-safe. Fork copies only the calling thread, so a lock that another thread holds is
never released in the child. The same is true of locks inside compilers and imports that such a thread runs.
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
    sections = 0  # nesting depth of this thread's sections


PAUSE = 1e-3  # seconds between two polls of a waiting thread
# Limit in seconds for the length of a section and for the wait of a fork. The limit for waiting on another process in a
# section derives from it: runtime/disk_cache.py.
MOST_SECONDS = 600.0

_thread = _ThreadState()
_gate = threading.RLock()  # reentrant: a signal handler may enter a section or fork while this thread holds it
_inside = 0  # number of threads in a section
_forks = 0  # number of waiting forks. New sections wait for them, as busy threads could delay a fork for ever.


class Section:
    """A context manager: forks of other threads wait until this thread leaves the `with` block."""

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
    """A `threading.Lock`, or RLock if `reentrant`, for `with` only; holding it or waiting for it is a section."""

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
    """A `functools.cached_property` without a lock: before Python 3.12, that lock is not fork-safe."""

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
    """Waits for open sections and acquires the gate: no thread enters a section until the process is forked."""
    global _forks
    end = time.monotonic() + MOST_SECONDS
    with _gate:
        _forks += 1
    try:
        while True:
            _gate.acquire()
            # A thread in a section forks without waiting: another one may wait for a lock that this thread holds.
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


# Both modules take locks before a fork, for which a thread in a section may wait. Handlers run in reverse order of
# registration, so these modules are imported first: a fork then waits below before their locks are taken.
REGISTERED_BEFORE = _logging, _thread_pools
if hasattr(os, "register_at_fork"):  # Windows has no fork
    os.register_at_fork(before=_before_fork, after_in_parent=_after_fork_in_parent, after_in_child=_after_fork_in_child)
