"""The self-test: random problems over the whole contract, on the GPU or the CPU of this machine, against float64."""
