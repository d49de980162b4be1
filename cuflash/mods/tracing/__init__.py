"""From Python functions to expression graphs: tracers, captured values, guards and branches."""
