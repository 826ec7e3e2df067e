"""Tiny random models that have a program, as files hold them, and what their programs give."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
import transformers
from torch import Tensor

from cbatch.attention.base import AttentionBackend
from cbatch.model.base import Model
from cbatch.runtime.batch import RaggedBatch
from cbatch.runtime.kv_cache import U8, KVCache
from cbatch.runtime.state_pool import StatePool, StepStates
from tests.support.architectures import CONTEXT, WITHOUT_CAUSAL_CLASS, draw, make_architecture
from tests.support.model_checks import GAINS, depends_on_context, reference_logits
from tests.support.tiny_models import make_prompts

BLOCK_SIZE = 16
PROMPT = make_prompts([60], seed=6)[0]
CHUNKS = [0, 7, 30, 31, 32, 60]
"""Where the prompt is cut into steps."""


_OF_TEXT = re.compile(
    r"(?:model\.)?(?:(?:language|text)_model\.)?(?:(lm_head\..*)|"
    r"(?:model\.)?((?:embed_tokens|layers|norm|transformer)\..*))"
)
"""Names of the weights of a text model in files of a model with pictures."""


_WITHOUT_CHOICE = {
    "deepseek_v32": {"index_topk": CONTEXT},
    "glm_moe_dsa": {"index_topk": CONTEXT},
    "minimax_m3_vl_text": {"index_topk_blocks": CONTEXT},
}
"""Sizes with which an index chooses every token, as it has to on the fast path."""


@dataclass(frozen=True)
class SavedModel:
    """A network, and the config.json and tensors that it saves."""

    network: Any
    config: dict[str, Any]
    tensors: Mapping[str, Tensor]


@cache
def saved_model(kind: str) -> SavedModel:
    """A tiny model of a type whose output depends on its context, named as its files name it."""
    network = make_architecture(kind, GAINS[0], **_WITHOUT_CHOICE.get(kind, {}))
    for gain in GAINS:
        draw(network, gain)
        draw_buffers(network)
        if depends_on_context(network):
            break
    config, tensors = as_files(network)
    if kind in WITHOUT_CAUSAL_CLASS and "text_config" in config:
        config = config["text_config"] | {"tie_word_embeddings": config.get("tie_word_embeddings", False)}
        parts = ((_OF_TEXT.fullmatch(name), tensor) for name, tensor in tensors.items())
        tensors = {found[1] or f"model.{found[2]}": tensor for found, tensor in parts if found}
    return SavedModel(network, config, tensors)


def as_files(network: Any) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The config.json and the tensors that transformers makes of a network."""
    transformers.utils.logging.disable_progress_bar()
    with TemporaryDirectory() as folder:
        network.save_pretrained(folder)
        config = json.loads((Path(folder) / "config.json").read_text(encoding="utf-8"))
        return config, _read_all(Path(folder))


def reconfigured(saved: SavedModel, settings: dict[str, Any]) -> SavedModel:
    """The same weights in a network with other settings."""
    config = saved.config | settings
    network = type(saved.network)(type(saved.network.config)(**config)).eval()
    network.load_state_dict(saved.network.state_dict())
    return SavedModel(network, config, saved.tensors)


def draw_buffers(network: Any) -> None:
    """Numbers of the files that are not parameters, such as the biases of routers, which are 0 in a new network."""
    generator = torch.Generator().manual_seed(1)
    for name, buffer in network.named_buffers():
        if "correction_bias" in name:
            buffer.copy_(0.3 * torch.randn(buffer.shape, generator=generator))
        elif "layer_scalar" in name:
            buffer.fill_(0.8)


def _read_all(folder: Path) -> dict[str, Tensor]:
    from safetensors.torch import load_file

    return {name: tensor for path in folder.glob("*.safetensors") for name, tensor in load_file(path).items()}


def logits_in_chunks(
    model: Model, attention: AttentionBackend, prompt: list[int] = PROMPT, chunks: Sequence[int] = CHUNKS
) -> Tensor:
    """Logits [T, vocabulary] of a prompt that goes through a model in several steps, over a cache full of NaN."""
    kv_dtype = attention.kv_dtype or model.dtype
    num_blocks = -(-len(prompt) // BLOCK_SIZE)
    shapes = [attention.block_shapes(layer, BLOCK_SIZE, kv_dtype) for layer in model.layers]
    kv_cache = KVCache(shapes, num_blocks + 1, BLOCK_SIZE, kv_dtype, model.layer_devices)
    for layer in (*kv_cache.keys, *kv_cache.values):
        layer.fill_(255 if kv_dtype == U8 else torch.nan)
    table = np.arange(1, num_blocks + 1, dtype=np.int32)[None]
    states = state_pool_of(model)
    found = []
    for start, stop in pairwise(chunks):
        positions = np.arange(start, stop)
        slots, rows = positions + BLOCK_SIZE, np.arange(stop - start)
        ids = np.array(prompt[start:stop])
        batch = RaggedBatch(ids, positions, slots, rows, table, [start], [stop], model.device)
        if states is not None:
            batch = replace(batch, states=StepStates(states, np.array([1]), np.array([0]), np.array([-1])))
        with torch.inference_mode():
            found.append(model.forward(batch, kv_cache, attention).values.float().cpu().clone())
    return torch.cat(found)


def state_pool_of(model: Model, slots: int = 3) -> StatePool | None:
    """States of zeros in slot 1 and of NaN in the others; None for a model without recurrent layers."""
    if not model.states:
        return None
    pool = StatePool(model.states, slots, model.device)
    for tensor in pool.tensors:
        tensor.fill_(torch.nan)
    pool.zero([1])
    return pool


@cache
def expected_logits(kind: str) -> Tensor:
    """Logits of the network's own forward for PROMPT."""
    return reference_logits(saved_model(kind).network, [PROMPT])[0].float()


def typical_error(found: Tensor, expected: Tensor) -> float:
    """The root mean square of the differences, as a share of the spread of the logits."""
    return float((found - expected).square().mean().sqrt() / expected.std())


def error_of(found: Tensor, expected: Tensor) -> float:
    """The largest difference, as a share of the spread of the logits."""
    error = float((found - expected).abs().max() / expected.std())
    return error if error == error else float("inf")
