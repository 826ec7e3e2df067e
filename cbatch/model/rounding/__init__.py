"""Rounding the matrices of a model to 4 bits by what goes through it."""
