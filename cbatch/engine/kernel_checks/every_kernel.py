"""Every check of what a model uses on its device, for people who want to see them."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from cbatch.attention.base import AttentionBackend
from cbatch.engine.kernel_checks.attention import AttentionChecks
from cbatch.engine.kernel_checks.gpu import GpuChecks
from cbatch.engine.kernel_checks.kernel_check import KernelCheck
from cbatch.engine.kernel_checks.sampling import check_sampling
from cbatch.engine.kernel_checks.whole_step import ExpectedSteps
from cbatch.model.base import Model
from cbatch.runtime.triton_setup import triton_problem
from cbatch.sample.sampler import Sampler


def check_all(
    model: Model, attention: AttentionBackend, sampler: Sampler, block_size: int, make_plain: Callable[[], Model]
) -> Iterator[KernelCheck]:
    """Checks the kernels of a model with an attention backend, one after the other; none if torch computes everything.

    make_plain: makes the same model by transformers
    """
    if triton_problem(model.device):
        return
    if attention.name == "triton":
        checks = GpuChecks(model, attention, sampler, block_size)
        yield from checks.attention_kernels
        yield from checks.layer_kernels
        yield from checks.products
        yield checks.step
        yield from checks.captured_steps
    elif attention.name == "cpu":
        from cbatch.engine.kernel_checks.cpu import CpuChecks
        from cbatch.model.cpu import CpuModel

        if isinstance(model, CpuModel):
            yield from CpuChecks(model, attention, block_size, make_plain).run()
        else:
            expected = ExpectedSteps.of(model, block_size, attention.kv_dtype)
            yield from AttentionChecks(attention, block_size, model.dtype, model.device).run(expected.calls)
            yield expected.check("a whole step", model, attention, block_size)
    yield check_sampling(sampler, model.vocab_size)
