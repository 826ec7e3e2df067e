"""Kernels for a GPU, written in Triton; nobody imports them where Triton is not installed."""
