"""The functions of FlashAttention-3: the module `cuflash.frameworks.flash_attn.v3` under its public name."""

import sys

from .flash_attn import v3
from .flash_attn.v3 import *  # noqa: F403 - for type checkers; at run time the module itself takes this name

sys.modules[__name__] = v3
