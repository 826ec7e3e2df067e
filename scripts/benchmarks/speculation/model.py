"""A model that computes everything, and then says what a script tells it to say.

So a random model of a real size can rewrite its prompt: its steps cost what they cost, and what comes out is known.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray

from cbatch.attention.base import AttentionBackend
from cbatch.model.cpu import CpuModel
from cbatch.model.loader import LoadedModel
from cbatch.runtime.batch import Argmax, Logits, RaggedBatch
from cbatch.runtime.kv_cache import KVCache
from scripts.benchmarks.models import RandomTensors, load_random
from scripts.benchmarks.shapes import Config

Script = Callable[[NDArray[np.int64], NDArray[np.int64]], NDArray[np.int64]]
"""The next tokens [R], from the tokens [R] that the model has just read and their positions [R] in their sequences."""

BONUS = np.float32(1e4)
"""More than any logit of a random model."""


class ScriptedModel(CpuModel):
    """A model on the CPU's fast path whose logits have a large bonus for the token of the script.

    script: None leaves the logits as they are
    """

    script: Script | None = None

    def forward(self, batch: RaggedBatch, kv_cache: KVCache, attention: AttentionBackend) -> Logits:
        logits = super().forward(batch, kv_cache, attention)
        if self.script is None:
            return logits
        told = self.script(batch.ids[batch.rows], batch.positions[batch.rows])
        values, rows = logits.values.numpy(), np.arange(len(told))
        values[rows, told] += BONUS
        return Logits(logits.values, Argmax(told, values[rows, told]))


def load_scripted(name: str, config: Config) -> tuple[LoadedModel, ScriptedModel]:
    """A random bfloat16 model as an engine takes it, and the model itself, to give it scripts."""
    device = torch.device("cpu")
    model = ScriptedModel(config, RandomTensors(config, device, torch.bfloat16), torch.bfloat16)
    return replace(load_random(name, config, device, fast_path=False), fast_model=model), model
