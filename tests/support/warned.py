"""Warnings as errors, except those that another library gives about code of its own."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

FOREIGN = ("torch", "functorch", "triton", "jax", "jaxlib", "transformers")  # packages, with all of their modules


@contextmanager
def warnings_are_errors() -> Iterator[None]:
    """Turns warnings into errors, but for those that are attributed to modules of other packages.

    why: frameworks deprecate what they use themselves, and warn as they import parts of their own, which happens in
    whatever test comes first. What cuflash calls, or warns of, is attributed to cuflash or to the test.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", module=rf"({'|'.join(FOREIGN)})(\.|$)")
        yield
