"""Warnings that fail a test which takes them as errors."""

from __future__ import annotations

import warnings

import pytest
from warned import FOREIGN, warnings_are_errors


def warn_from(module: str) -> None:
    warnings.warn_explicit("deprecated", DeprecationWarning, f"{module.replace('.', '/')}.py", 1, module=module)


@pytest.mark.parametrize("module", [*FOREIGN, "torch.jit._script", "jax._src.core"])
def test_those_of_other_packages_about_themselves_pass(module: str) -> None:
    with warnings_are_errors():
        warn_from(module)


@pytest.mark.parametrize(
    "module", ["cuflash", "cuflash.frameworks.torch", "tests.frameworks.test_torch", "torch_calls"]
)
def test_ours_are_errors(module: str) -> None:
    with warnings_are_errors(), pytest.raises(DeprecationWarning, match="deprecated"):
        warn_from(module)
