"""FlashAttention for every array library, with no compile step.

    out = cuflash.forward(q, k, v, causal=True)    # CuPy, PyTorch, JAX or NumPy arrays (batch, seqlen, heads, head_dim)
"""

from .backward import backward
from .errors import CompileError, ProblemError, UnsupportedError
from .forward import forward
from .lse import lse
from .merge import merge_states
from .planner import plan

__version__ = "0.1.0"
__all__ = [
    "CompileError",
    "ProblemError",
    "UnsupportedError",
    "backward",
    "forward",
    "lse",
    "merge_states",
    "plan",
]
