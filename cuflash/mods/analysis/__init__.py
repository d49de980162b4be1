"""Properties that can be proved of an expression: bands, intervals, signs and magnitudes."""
