"""Tools that a model may call: Python functions, commands and servers, each in a process of its own."""
