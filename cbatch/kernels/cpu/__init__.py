"""CPU kernels, compiled with numba on the machine that runs them.

`microkernel` is the inner loop of every matrix product. `work_queue` and `thread_pool` share a step among threads.
`linear`, `attention` and `decoder` are the parts of a step, `sampling` and `argmax` choose its tokens.
"""

from cbatch.runtime.numba_setup import prepare_numba

prepare_numba()
