"""A process of a tensor-parallel engine that computes what the first one sends (see `followers.py`)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from cbatch.base.config import EngineConfig
from cbatch.engine.kv_cache_sizing import CacheSize, MeasuredCache, make_runner, measure_cache
from cbatch.engine.loading import load_execution
from cbatch.engine.model_runner import ModelRunner
from cbatch.model.load_plan import LoadPlan
from cbatch.model.ops.shards import Part
from cbatch.runtime.batch import RaggedBatch
from cbatch.runtime.process_group import ProcessGroup
from cbatch.runtime.state_pool import StepStates
from cbatch.runtime.transfer import computing_on
from cbatch.schedule.limits import StepLimits


class Follower:
    """Has loaded its part of the model. Its methods are called in the order in which they stand here."""

    def __init__(self, config: EngineConfig, part: Part) -> None:
        """Raises what loading the model raises."""
        self._config, self._part = config, part
        _, self._execution, _ = load_execution(config, replace(LoadPlan.of(config), part=part))
        self._measured: MeasuredCache | None = None
        self._runner: ModelRunner | None = None

    def measure(self, limits: StepLimits) -> tuple[bool, int, int]:
        """Whether steps can be captured, and the blocks and slots that it has memory for."""
        self._measured = measure_cache(self._config, self._execution, limits, self._part.size)
        return self._execution.graphs, *self._measured.size

    def make(self, store: str, limits: StepLimits, size: Sequence[int]) -> None:
        """Joins the group, and makes the cache and the graphs.  size: its blocks and slots"""
        assert self._measured is not None
        device = self._execution.model.device
        group = ProcessGroup(store, self._part.rank, self._part.size, device)
        measured = self._measured._replace(size=CacheSize(*size))
        self._runner = make_runner(self._config, self._execution, limits, measured, group)

    def step(self, batch: RaggedBatch, states: Sequence[Any]) -> None:
        """Computes a step; nobody reads its logits here.  batch, states: see `RaggedBatch.for_others`"""
        runner = self._runner
        assert runner is not None
        device, pool = runner.model.device, runner.state_pool
        with computing_on(device):
            step_states = None if pool is None else StepStates(pool, *states)
            runner.forward(replace(batch, device=device, states=step_states))
