"""Readers of GGUF files and of quantized folders: each turns its tensors into the named weights of a program."""
