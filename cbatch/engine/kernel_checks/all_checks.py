"""All checks of what a model uses on its device: for an engine on a GPU, and for people who want to see them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property

from cbatch.attention.base import AttentionBackend
from cbatch.attention.registry import PerDeviceAttention
from cbatch.engine.kernel_checks.attention import AttentionChecks
from cbatch.engine.kernel_checks.captured_step import check_captured
from cbatch.engine.kernel_checks.kernel_check import KernelCheck
from cbatch.engine.kernel_checks.layer import LayerChecks
from cbatch.engine.kernel_checks.sampling import check_sampling
from cbatch.engine.kernel_checks.whole_step import ExpectedSteps
from cbatch.model.base import Model
from cbatch.model.cuda import CudaModel
from cbatch.model.ops.device_kernel import by_torch
from cbatch.runtime.triton_setup import triton_problem
from cbatch.sample.sampler import Sampler


def without_kernels(model: Model, *, heads_first: bool = False) -> Model:
    """The model by operations of torch alone. heads_first: see `DeviceOps`"""
    return model.with_ops(by_torch(heads_first=heads_first)) if isinstance(model, CudaModel) else model


@dataclass(frozen=True)
class GpuChecks:
    """The checks of a model with an attention backend, whose results are kept."""

    model: Model
    attention: AttentionBackend
    sampler: Sampler
    block_size: int

    @cached_property
    def expected(self) -> ExpectedSteps:
        """Raises ModelError if the model does not even run by operations of torch."""
        return ExpectedSteps.of(without_kernels(self.model), self.block_size, self.attention.kv_dtype)

    @cached_property
    def _attention_checks(self) -> AttentionChecks:
        return AttentionChecks(self.attention, self.block_size, self.model.dtype, self.model.device)

    @cached_property
    def attention_kernels(self) -> list[KernelCheck]:
        checks = [self._attention_checks]
        if isinstance(self.attention, PerDeviceAttention):
            checks = [
                AttentionChecks(backend, self.block_size, self.model.dtype, device)
                for device, backend in self.attention.backends.items()
            ]
        return [check for one in checks for check in one.run(self.expected.calls)]

    @cached_property
    def layer_kernels(self) -> list[KernelCheck]:
        """No checks if the model has no such kernels."""
        if not isinstance(self.model, CudaModel):
            return []
        return list(LayerChecks(self.model, self.block_size, self.attention.kv_dtype).run())

    @cached_property
    def products(self) -> list[KernelCheck]:
        """The library's products of matrices, which the engine does not check: nothing could take their place.

        No checks if the model does without them.
        """
        if not isinstance(self.model, CudaModel) or self.model.ops.batch_invariant:
            return []
        return [LayerChecks(self.model, self.block_size).product()]

    @cached_property
    def step(self) -> KernelCheck:
        return self.expected.check("a whole step", self.model, self.attention, self.block_size)

    @cached_property
    def step_by_torch(self) -> KernelCheck:
        """A step of the model without kernels of its own."""
        model = without_kernels(self.model, heads_first=True)
        return self.expected.check("a whole step with torch's operations", model, self.attention, self.block_size)

    @cached_property
    def captured_steps(self) -> list[KernelCheck]:
        """No checks if steps of the model cannot be captured as CUDA graphs."""
        attention = self.attention.capturable
        if self.model.capturable is None or attention is None:
            return []
        return [
            self._attention_checks.check_captured(attention, self.expected.calls),
            check_captured(self.expected, self.model, attention, self.sampler, self.block_size),
        ]


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
