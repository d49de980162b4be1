"""cuflash as an attention backend of SGLang 0.5.23: `--attention-backend cuflash`.

cuflash beside SGLang in one environment is all that it takes: SGLang finds the backend by an entry point. The backend
serves decoder, encoder and cross attention over paged caches in the model's dtype: grouped heads, windows, softcap,
sinks, CUDA graphs, chains of draft tokens and bitwise repeatable inference.

It refuses other cases with an `UnsupportedError` that names the case: quantised caches, MLA, head dims over 256, trees
of draft tokens, chunked local attention and context parallelism.
"""

from .backend import Backend

__all__ = ["Backend"]
