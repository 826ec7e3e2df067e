"""All checks of what a model uses on its device: for an engine on a GPU, and for people who want to see them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property

from cbatch.attention.registry import PerDeviceAttention
from cbatch.engine.kernel_checks.attention import AttentionChecks
from cbatch.engine.kernel_checks.kernel_check import KernelCheck
from cbatch.engine.kernel_checks.layer import LayerChecks
from cbatch.engine.kernel_checks.sampling import check_sampling
from cbatch.engine.kernel_checks.whole_step import ExpectedSteps
from cbatch.engine.model_runner import Execution
from cbatch.model.base import Model
from cbatch.model.cuda import CudaModel
from cbatch.model.ops.device_kernel import by_torch
from cbatch.runtime.triton_setup import triton_problem


def without_kernels(model: Model, *, heads_first: bool = False) -> Model:
    """The model by operations of torch alone. heads_first: see `DeviceOps`"""
    return model.with_ops(by_torch(heads_first=heads_first)) if isinstance(model, CudaModel) else model


@dataclass(frozen=True)
class ModelChecks:
    """The checks of what computes the steps of an engine. Each is made when it is asked for."""

    execution: Execution
    block_size: int

    @property
    def model(self) -> Model:
        return self.execution.model

    @cached_property
    def _expected(self) -> ExpectedSteps:
        """Raises ModelError if the model does not even run by operations of torch."""
        kv_dtype = self.execution.attention.kv_dtype
        return ExpectedSteps.of(without_kernels(self.model), self.block_size, kv_dtype)

    @cached_property
    def of_attention(self) -> AttentionChecks:
        model, attention = self.model, self.execution.attention
        return AttentionChecks(attention, self.block_size, model.dtype, model.device, self._expected.calls)

    def attention_kernels(self) -> Iterator[KernelCheck]:
        one = self.execution.attention
        backends = one.backends if isinstance(one, PerDeviceAttention) else {self.model.device: one}
        for device, backend in backends.items():
            yield from replace(self.of_attention, attention=backend, device=device).run()

    def layers(self) -> Iterator[KernelCheck]:
        """The kernels between attention, if the model has any, and whole steps."""
        if isinstance(self.model, CudaModel):
            yield from LayerChecks(self.model, self.block_size, self.execution.attention.kv_dtype).run()
        yield self._expected.check("a whole step", self.model, self.execution.attention)

    def step_by_torch(self) -> KernelCheck:
        """A step of the model without kernels of its own."""
        model = without_kernels(self.model, heads_first=True)
        return self._expected.check("a whole step with torch's operations", model, self.execution.attention)

    def captured_steps(self) -> Iterator[KernelCheck]:
        """No checks if steps of the model cannot be captured as CUDA graphs."""
        one = self.execution
        if one.model.capturable is not None and one.attention.graph_buffers is not None:
            yield self.of_attention.check_captured()
            yield self._expected.check_captured(one.model, one.attention, one.sampler)


def check_all(execution: Execution, block_size: int, make_plain: Callable[[], Model]) -> Iterator[KernelCheck]:
    """Checks the kernels of a model, one after the other; none if torch computes everything.

    make_plain: makes the same model by transformers
    """
    model, attention = execution.model, execution.attention
    if triton_problem(model.device):
        return
    checks = ModelChecks(execution, block_size)
    if attention.name == "triton":
        yield from checks.attention_kernels()
        yield from checks.layers()
        yield from checks.captured_steps()
    elif attention.name == "cpu":
        from cbatch.engine.kernel_checks.cpu import CpuChecks
        from cbatch.model.cpu import CpuModel

        if isinstance(model, CpuModel):
            yield from CpuChecks(model, attention, block_size, make_plain).run()
        else:
            yield from checks.attention_kernels()
            yield from checks.layers()
    yield check_sampling(execution.sampler, model.vocab_size)
