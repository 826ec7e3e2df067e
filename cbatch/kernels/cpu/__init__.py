"""CPU kernels, compiled with numba on the machine that runs them.

`matmul` has the products, `attention` and `recurrent` what mixes tokens. `program` runs a step of them, which
`work_queue` and `thread_pool` share among threads; `sampling` chooses its tokens.
"""

from cbatch.runtime.numba_setup import prepare_numba

prepare_numba()
