"""Runs rows of an output file again, and says which of them differ."""
