"""A setting in a module that only a function imports."""

FACTOR = 1.0
