"""GPU kernels, written in Triton. They are only imported if Triton is installed.

Kernels, and the functions that they call, take flat lists of arguments instead of records: Triton 3.6, which comes with
the oldest torch supported here, turns the fields of a constexpr record into plain numbers that `tl.zeros` refuses; 3.9
still loses the names of a tuple's fields; and `do_not_specialize` cannot name a field. Arguments in capitals are
constants of the compilation, which only kernels declare; the others are tensors, pointers and numbers. No global that a
kernel reads may be NaN: Triton compares them with what they were before each launch, and NaN equals nothing.
"""
