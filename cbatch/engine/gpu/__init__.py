"""Triton kernels of the fast path on a GPU."""
