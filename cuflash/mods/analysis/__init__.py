"""Provable properties of expressions: bands, intervals, signs and magnitudes."""
