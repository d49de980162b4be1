"""Entry point of SGLang's plugins: registers the attention backend "cuflash" when SGLang starts.

Installed as the top-level module `cuflash_sglang`, as `import cuflash` takes 0.1 s or more in each process of SGLang.
The package is imported once SGLang creates a backend of this name.
"""

from __future__ import annotations

import logging
import sys
from typing import Any

NAME = "cuflash"
# Lists of names in SGLang's command line that the backend belongs to.
_LISTS = (
    "add_attention_backend_choices",
    "add_draft_attention_backend_choices",
    "add_deterministic_attention_backend_choices",
    "add_radix_supported_deterministic_attention_backend_choices",
)


def register() -> None:
    """Adds "cuflash" to SGLang's attention backends. Logs one warning, and adds nothing, if SGLang has changed."""
    try:
        from sglang.srt.arg_groups import choices
        from sglang.srt.layers.attention import attention_registry

        adders = [getattr(choices, name) for name in _LISTS]
        if NAME not in attention_registry.ATTENTION_BACKENDS:
            attention_registry.register_attention_backend(NAME)(create_backend)
            for add in adders:
                add([NAME])
    except Exception as error:  # an engine that runs other backends starts all the same
        version = getattr(sys.modules.get("sglang"), "__version__", "of unknown version")
        logging.getLogger(NAME).warning(
            "cuflash is no attention backend of this SGLang (%s), whose registry differs from 0.5.23 (%s: %s); "
            "choose another --attention-backend, or install a cuflash and an SGLang that fit",
            version,
            type(error).__name__,
            " ".join(str(error).split()),
        )


def create_backend(runner: Any) -> Any:
    """Returns the attention backend of one of SGLang's model runners."""
    from cuflash.frameworks.sglang import Backend

    return Backend(runner)
