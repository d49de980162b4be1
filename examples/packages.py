"""Says which package an example needs, and how it is installed, where Python would say that there is no such module.

    with explain_missing():
        import torch

It is shared by the examples that need more than cuflash and NumPy.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

# What pip installs, where it is not the name of the package alone.
INSTALLED_AS = {"jax": 'jax, or on a GPU "jax[cuda13]" ("jax[cuda12]" with a driver older than 580)'}


@contextmanager
def explain_missing() -> Iterator[None]:
    """Ends the program with the name of the package that an import inside lacks, and the command that installs it."""
    try:
        yield
    except ModuleNotFoundError as error:
        package = str(error.name).partition(".")[0]
        if package == "cuflash":  # a part of it that is missing is no package to install
            raise
        example = Path(sys.argv[0]).name
        sys.exit(f"{example} needs {package}, which is not installed: pip install {INSTALLED_AS.get(package, package)}")
