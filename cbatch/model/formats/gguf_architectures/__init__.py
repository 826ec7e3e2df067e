"""The architectures of GGUF files that are read."""
