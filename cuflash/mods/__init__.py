"""*Which* scores and masks? Their expression graphs, with derivatives and the intervals of keys that rows see."""
