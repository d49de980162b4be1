"""The array libraries, a line for each. It imports nothing, so that the tracing of mods knows their functions, too."""

# The package of a library, and the class of its arrays in it. `library()` of the file of that name in this folder
# returns its adapter. None is a package that holds a part of another one.
PACKAGES: dict[str, str | None] = {
    "numpy": "ndarray",
    "torch": "Tensor",
    "cupy": "ndarray",
    "jax": "Array",
    "jaxlib": None,
}
