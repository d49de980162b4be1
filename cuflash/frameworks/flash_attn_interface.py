"""The functions of flash-attn 2: the module `cuflash.frameworks.flash_attn.v2` under its public name."""

import sys

from .flash_attn import v2
from .flash_attn.v2 import *  # noqa: F403 - for type checkers; at run time the module itself takes this name

sys.modules[__name__] = v2
