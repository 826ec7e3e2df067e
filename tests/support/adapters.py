"""LoRA adapters of tiny models, in folders as PEFT writes them, and what PEFT makes of them."""

from __future__ import annotations

import json
import re
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from cbatch.model.lora_files import Adapter, LowRank

LINEARS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")

SETTINGS: dict[str, Any] = {
    "peft_type": "LORA", "task_type": "CAUSAL_LM", "r": 4, "lora_alpha": 8, "lora_dropout": 0.1, "bias": "none",
    "inference_mode": True, "fan_in_fan_out": False, "init_lora_weights": True, "use_rslora": False, "use_dora": False,
    "rank_pattern": {}, "alpha_pattern": {}, "modules_to_save": None, "base_model_name_or_path": "somewhere/else",
}  # fmt: skip
"""PEFT's settings, with more keys that are null."""


def draw_adapter(
    network: Any, targets: tuple[str, ...] = LINEARS, *, rank: int = 4, seed: int = 0
) -> dict[str, Tensor]:
    """The tensors of an adapter that changes what comes out, for linears whose names end in one of the targets."""
    generator = torch.Generator().manual_seed(seed)
    tensors: dict[str, Tensor] = {}
    for name, module in network.named_modules():
        if name.rpartition(".")[2] in targets and getattr(module, "weight", None) is not None:
            shape = tuple(module.weight.shape)
            columns, depth = shape[::-1] if type(module).__name__ == "Conv1D" else shape
            tensors[f"base_model.model.{name}.lora_A.weight"] = torch.randn(rank, depth, generator=generator)
            tensors[f"base_model.model.{name}.lora_B.weight"] = torch.randn(columns, rank, generator=generator)
            tensors[f"base_model.model.{name}.lora_A.weight"] *= 0.7 * depth**-0.5
            tensors[f"base_model.model.{name}.lora_B.weight"] *= 0.5 * rank**-0.5
    return tensors


def save_adapter(folder: Path, tensors: dict[str, Tensor], **settings: Any) -> Path:
    """settings: in place of those of SETTINGS; the rank is that of the tensors if it is not given"""
    folder.mkdir(parents=True, exist_ok=True)
    rank = next(len(tensor) for name, tensor in tensors.items() if "lora_A" in name)
    targets = sorted({name.rpartition(".lora_")[0].rpartition(".")[2] for name in tensors})
    config = SETTINGS | {"r": rank, "target_modules": targets} | settings
    (folder / "adapter_config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "adapter_model.safetensors")
    return folder


def drawn_adapters(network: Any, *targets: tuple[str, ...]) -> list[Adapter]:
    """Adapters in memory, each of other linears and another rank."""
    found = []
    for number, names in enumerate(targets):
        tensors = draw_adapter(network, names, rank=3 + number, seed=number)
        pairs = {name.removeprefix("base_model.model.").partition(".lora_")[0]: name for name in tensors}
        modules = {
            module: LowRank(*(tensors[re.sub("lora_[AB]", f"lora_{one}", name)] for one in "AB"))
            for module, name in pairs.items()
        }
        found.append(Adapter(f"adapter {number}", modules))
    return found


def merged_by_peft(network: Any, folder: Path) -> Any:
    """A copy of the network with the adapter in its weights."""
    peft = pytest.importorskip("peft", reason="PEFT merges the adapters that ours are compared with")
    return peft.PeftModel.from_pretrained(deepcopy(network), folder).merge_and_unload().eval()
