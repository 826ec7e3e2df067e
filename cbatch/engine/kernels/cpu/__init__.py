"""Kernels for the CPU, compiled on the machine they run on.

`multiply_tile` is the one inner loop of all matrix products; `queue` and `team` split a step among threads; `linear`,
`attention` and `decoder` are the parts of a step.
"""
