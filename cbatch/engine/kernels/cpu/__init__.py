"""Kernels for the CPU, compiled on the machine they run on.

`tile` is the one inner loop of all matrix products; `board` and `team` split a step among threads; `linear`,
`attention` and `decoder` are the parts of a step.
"""
