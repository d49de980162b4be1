"""Adapters of array libraries, one file each: they read a library's arrays and create new ones."""
