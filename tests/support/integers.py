"""Calls on host arrays with unchecked integers, which are clamped as on a device."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any
from unittest import mock

from cuflash.runtime import cpu


def without_check_of_integers() -> AbstractContextManager[Any]:
    """Returns a context in which lengths and indices in host memory are not checked."""
    return mock.patch.object(cpu, "check_integers")
