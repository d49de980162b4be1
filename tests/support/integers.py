"""Calls on host arrays whose integers are not checked: they are clamped, as those of a device."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any
from unittest import mock

from cuflash.runtime import cpu


def without_check_of_integers() -> AbstractContextManager[Any]:
    """Leaves lengths and places of the host unchecked."""
    return mock.patch.object(cpu, "check_integers")
