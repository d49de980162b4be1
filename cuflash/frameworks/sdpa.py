"""scaled_dot_product_attention on cuflash: the module `cuflash.frameworks.torch.sdpa` under its public name."""

import sys

from .torch import sdpa
from .torch.sdpa import *  # noqa: F403 - for type checkers; at run time the module itself takes this name

sys.modules[__name__] = sdpa
