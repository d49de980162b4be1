"""Validates the arguments of a call, here and nowhere else, into one frozen `Problem`: *what* is computed."""
