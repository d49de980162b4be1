"""Table of array libraries. This module imports nothing, so that `mods/tracing`, a lower layer, can import it."""

# The package of a library, and the name of its array class. `library()` in this folder's file of the same name returns
# the adapter. None marks a package that belongs to another one and has no adapter.
PACKAGES: dict[str, str | None] = {
    "numpy": "ndarray",
    "torch": "Tensor",
    "cupy": "ndarray",
    "jax": "Array",
    "jaxlib": None,
}
