"""Sizes of memory, amounts of work and names of types in words."""

from __future__ import annotations

import re


def kind_of(value: object) -> str:
    """Returns the name of a value's type with its article: "a tuple", "an int", "an ndarray"."""
    return with_article(value.__class__.__name__)  # unlike type(), right for a stand-in: the class of its object


def with_article(noun: object) -> str:
    """Returns a noun with its article, chosen by sound: "a list", "an int", "an ndarray", "a uint8"."""
    text = str(noun)
    is_vowel = re.match(r"(?!uint|uni|us|uuid|one)[aeiou]|nd", text, re.IGNORECASE)
    return f"{'an' if is_vowel else 'a'} {text}"


def memory(num_bytes: float) -> str:
    """Returns a size in the largest unit that gives at least 1: "512 B", "1.5 KiB", "24 MiB"."""
    return _scaled(num_bytes, 1024, ("B", "KiB", "MiB", "GiB", "TiB"))


def work(flops: float) -> str:
    """Returns a number of operations in the largest unit that gives at least 1: "12 FLOP", "1.1 TFLOP"."""
    return _scaled(flops, 1000, ("FLOP", "kFLOP", "MFLOP", "GFLOP", "TFLOP", "PFLOP"))


def _scaled(number: float, step: int, units: tuple[str, ...]) -> str:
    place = 0
    # Rounded first: 1023.7 KiB would otherwise be written as 1024 KiB.
    while place < len(units) - 1 and round(number) >= step:
        number /= step
        place += 1
    digits = 1 if place and number < 9.95 else 0
    return f"{number:.{digits}f}".removesuffix(".0") + f" {units[place]}"
