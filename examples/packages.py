"""Message for a missing package: its name and the command that installs it, in place of a traceback.

    with explain_missing():
        import torch

Examples that need more than cuflash and NumPy import it.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

# Arguments of `pip install`, if they differ from the package's name.
INSTALLED_AS = {"jax": 'jax, or on a GPU "jax[cuda13]" ("jax[cuda12]" with a driver older than 580)'}


@contextmanager
def explain_missing() -> Iterator[None]:
    """Ends the program if an import inside fails, with the package's name and the command that installs it."""
    try:
        yield
    except ModuleNotFoundError as error:
        package = str(error.name).partition(".")[0]
        if package == "cuflash":  # a missing module of cuflash is a bug, not a package to install
            raise
        example = Path(sys.argv[0]).name
        sys.exit(f"{example} needs {package}, which is not installed: pip install {INSTALLED_AS.get(package, package)}")
