"""*Which* scores and masks? Functions traced into expression graphs, with derivatives, intervals and CUDA text."""
