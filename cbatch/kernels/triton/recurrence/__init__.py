"""Kernels of recurrent layers. A sequence has a slot of states, which a kernel reads and writes on the device.

The result of a token depends on its own sequence only, and on where the tokens of a chunk are cut; never on the other
chunks of the step.
"""
