"""Entry point of vLLM's plugins: registers the attention backend CUFLASH by its dotted path.

Installed as the top-level module `cuflash_vllm`. vLLM imports the entry points of all plugins in each of its processes,
also for users of other backends, and `import cuflash` takes 0.3 s or more. This module takes less than 1 ms.
"""

from __future__ import annotations

import logging
import sys
from typing import Any

NAME, PATH = "CUFLASH", "cuflash.frameworks.vllm.Backend"
logger = logging.getLogger("cuflash")


def register() -> None:
    """Makes `--attention-backend CUFLASH` known to vLLM; logs one warning if its registry has changed."""
    try:
        registered()
    except Exception as error:  # an engine that uses another backend must start
        version = getattr(sys.modules.get("vllm"), "__version__", "of unknown version")
        logger.warning(
            "cuflash: --attention-backend %s is not available, as vLLM %s has another registry of attention backends "
            "than vLLM 0.32 (%s: %s); install another version of vLLM or cuflash",
            NAME,
            version,
            type(error).__name__,
            " ".join(str(error).split()),
        )


def registered() -> Any:
    """Returns vLLM's name of the backend, registered once in each process."""
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    if NAME not in AttentionBackendEnum.__members__:
        register_backend(NAME, PATH)
        # Processes that vLLM spawns unpickle their configuration before they load plugins: the name registers itself.
        AttentionBackendEnum[NAME].__reduce_ex__ = lambda protocol: (registered, ())
    return AttentionBackendEnum[NAME]
