"""The module `cuflash.mods.graph.operations` under the name that it has in pickled block masks."""

import sys

from .graph import operations

sys.modules[__name__] = operations
