"""Random models of real shapes, made on the device: nothing has to be downloaded to measure a machine."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from cbatch.engine import SamplingParams
from cbatch.engine.models.llama_spec import read_llama_spec, weight_shapes
from cbatch.engine.models.loader import LoadedModel

Config = dict[str, Any]

_COMMON: Config = {"hidden_act": "silu", "attention_bias": False, "dtype": "bfloat16", "eos_token_id": 0}

SHAPES: dict[str, Config] = {
    "0.6B": _COMMON
    | {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 151936,
        "max_position_embeddings": 40960,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1000000.0,
        "tie_word_embeddings": True,
        "sliding_window": None,
        "use_sliding_window": False,
        "max_window_layers": 28,
    },
    "8B": _COMMON
    | {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 128256,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
        "tie_word_embeddings": False,
    },
}

TINY: Config = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 320,
    "max_position_embeddings": 512,
}
"""Sizes with which the whole script can be tried anywhere."""


class RandomTensors(Mapping[str, Tensor]):
    """The weights of a model by name, each made when it is asked for, and always the same.

    Norms are near 1, and matrices keep the size of what goes through them.
    """

    def __init__(self, config: Config, device: torch.device, dtype: torch.dtype) -> None:
        self.shapes = weight_shapes(read_llama_spec(config))
        self.device = device
        self.dtype = dtype

    def __getitem__(self, name: str) -> Tensor:
        shape = self.shapes[name]
        generator = torch.Generator(self.device).manual_seed(zlib.crc32(name.encode()))
        tensor = torch.randn(shape, generator=generator, device=self.device, dtype=self.dtype)
        if len(shape) == 1:
            return 1 + tensor / 10 if name.endswith("norm.weight") else tensor / 10
        return tensor if "embed" in name else tensor * (1.5 / shape[1] ** 0.5)

    def __iter__(self) -> Iterator[str]:
        return iter(self.shapes)

    def __len__(self) -> int:
        return len(self.shapes)


def make_network(config: Config, tensors: Mapping[str, Tensor], dtype: torch.dtype, device: torch.device) -> Any:
    """The model of transformers with these weights."""
    from transformers import AutoConfig, AutoModelForCausalLM

    kind = config["model_type"]
    settings = {key: value for key, value in config.items() if key not in ("model_type", "dtype", "architectures")}
    with device:
        network = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **settings), dtype=dtype)
    with torch.no_grad():
        for name, parameter in network.named_parameters():
            parameter.copy_(tensors[name])
    return network.eval().requires_grad_(False)


def load(name: str, config: Config, device: torch.device) -> LoadedModel:
    """The model as an engine takes it: on the fast path where the device is a GPU."""
    tensors = RandomTensors(config, device, torch.bfloat16)
    decoder = None
    if device.type == "cuda":
        from cbatch.engine.models.cuda import CudaModel

        decoder = CudaModel(config, tensors, torch.bfloat16, device)
    return LoadedModel(
        name=name,
        make_network=lambda: make_network(config, tensors, torch.bfloat16, device),
        tokenizer=None,
        defaults=SamplingParams(),
        eos_ids=frozenset(),
        decoder=decoder,
    )
