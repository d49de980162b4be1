"""Alias of `cuflash.mods.graph.operations`, under the name in pickled block masks."""

import sys

from .graph import operations

sys.modules[__name__] = operations
