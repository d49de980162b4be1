"""*Do* it: compile, load, pack parameters and launch. The only code that compiles and launches kernels."""
