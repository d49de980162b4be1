"""Attention backend of vLLM: `vllm serve MODEL --attention-backend CUFLASH`, once cuflash is installed beside vLLM.

`plugin` registers the backend by its dotted path. vLLM imports this module in processes that use it.

Decoders, encoders and cross attention run on cuflash: prefill in chunks or after a cached prefix, and decode steps,
also with several speculated tokens. Heads may be grouped; sliding windows, softcap, sinks and ALiBi are computed.
With `VLLM_BATCH_INVARIANT=1` the bits of a row do not depend on the batch. `Backend` lists what is refused.

Sources: v1/attention/backend.py, v1/attention/selector.py and v1/attention/backends/registry.py of vLLM 0.32.
"""

from __future__ import annotations

try:
    from .backend import Backend
except ImportError as error:
    if "vllm" not in (error.name or ""):
        raise
    raise ImportError(
        f"cuflash.frameworks.vllm needs the classes of attention backends of vLLM 0.32, but {error}; install this "
        "version, or a cuflash for yours"
    ) from error

__all__ = ["Backend"]
