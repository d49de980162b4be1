"""The expression IR of score_mod and mask_mod, and its algebra: operations, simplification, derivatives."""
