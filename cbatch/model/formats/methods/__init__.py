"""Quantized checkpoints in safetensors files: a module for each `quant_method`, found by being here.

Its `METHOD` says how a checkpoint is read. Matrices that are integers in groups say their integers, scales and zero
points only; what is packed of them, and for which device, follows from these (see `GroupedMatrix`).
"""
