"""The commands: `info`, `warmup`, `bench`, `accuracy` and `selftest`."""
