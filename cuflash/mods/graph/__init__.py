"""The expression IR of score_mod and mask_mod, and its algebra: operations, simplification, derivatives."""

from .graph import Graph, Node

__all__ = ["Graph", "Node"]  # under this name in pickled block masks
