"""Functions that a model may call: Python functions and commands, each run in a process of its own."""
