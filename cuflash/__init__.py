"""FlashAttention for every array library, with no compile step.

    out = cuflash.forward(q, k, v, causal=True)    # CuPy, PyTorch, JAX or NumPy arrays (batch, seqlen, heads, head_dim)
"""

from .errors import CompileError, ProblemError, UnsupportedError
from .ops.append import append_kv
from .ops.backward import backward
from .ops.forward import forward
from .ops.lse import lse
from .ops.merge import merge_states
from .ops.plan import plan

__version__ = "0.1.0"
__all__ = [
    "CompileError",
    "ProblemError",
    "UnsupportedError",
    "append_kv",
    "backward",
    "forward",
    "lse",
    "merge_states",
    "plan",
]
