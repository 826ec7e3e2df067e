"""Readers of checkpoints that are not safetensors: each turns a file into the named weights of its family's program."""
