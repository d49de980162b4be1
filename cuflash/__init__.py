"""FlashAttention for every array library, with no compile step.

Example::

    out = cuflash.forward(q, k, v, causal=True)    # CuPy, PyTorch, JAX or NumPy arrays (batch, seqlen, heads, head_dim)
    out = cuflash.forward(q, k, v, score_mod=cuflash.mods.alibi(heads))    # or scores and masks of your own
"""

from . import interrupt as interrupt  # first: Ctrl-C may come during the imports below

# isort: split
from typing import TYPE_CHECKING, Any

from . import mods as mods  # public, unlike the other packages
from .errors import CompileError, ProblemError, UnsupportedError
from .ops.append import append_kv
from .ops.backward import backward
from .ops.block_mask import BlockMask, create_block_mask
from .ops.forward import forward
from .ops.lse import lse
from .ops.merge import merge_states
from .ops.plan import plan
from .ops.triangle import triangle_attention
from .problem.foreign import no_attribute

__version__ = "0.1.0"
__all__ = [
    "BlockMask",
    "CompileError",
    "ProblemError",
    "UnsupportedError",
    "append_kv",
    "backward",
    "create_block_mask",
    "forward",
    "lse",
    "merge_states",
    "plan",
    "triangle_attention",
]


if not TYPE_CHECKING:  # a type checker that sees __getattr__ accepts any attribute

    def __getattr__(name: str) -> Any:
        raise no_attribute(name, __all__)


def __dir__() -> list[str]:
    """Returns the public names. Importing cuflash does not import `frameworks` and `testing`."""
    return [*__all__, "errors", "frameworks", "mods", "testing"]
