"""From expression graphs to CUDA text, with invariants hoisted to heads and rows."""
