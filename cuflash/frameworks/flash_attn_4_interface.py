"""The functions of FlashAttention-4: the module `cuflash.frameworks.flash_attn.v4` under its public name."""

import sys

from .flash_attn import v4
from .flash_attn.v4 import *  # noqa: F403 - for type checkers; at run time the module itself takes this name

sys.modules[__name__] = v4
