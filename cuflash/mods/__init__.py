"""*Which* scores and masks? Their expression graphs, with derivatives, the keys that rows see, and their CUDA text."""
