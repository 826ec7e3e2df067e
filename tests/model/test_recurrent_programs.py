"""Programs with recurrent layers on the CPU: against `generate`, in any chunks, with snapshots, and with faults."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch

from cbatch.attention.cpu import CpuAttention
from cbatch.attention.reference import ReferenceAttention
from cbatch.model.config import UnsupportedConfig
from cbatch.model.cpu import CpuModel
from cbatch.model.cuda import CudaModel
from cbatch.model.families import read_program
from cbatch.model.ops.device_kernel import by_torch
from cbatch.model.program_model import check_weights, resolved
from tests.support.model_checks import reference_logits
from tests.support.programs import PROMPT, error_of, expected_logits, reconfigured, saved_model
from tests.support.recurrent_runs import Chunk, Runner

pytestmark = pytest.mark.kernels

MIXERS = ["qwen3_next", "lfm2", "granitemoehybrid"]
"""One of each kind of recurrent layer."""
DENSE = ["qwen3_5_text", "lfm2"]
"""Two without experts, for which the kernels are compiled once more."""


@cache
def cpu_model(kind: str, dtype: torch.dtype = torch.float32) -> CpuModel:
    saved = saved_model(kind)
    return CpuModel(saved.config, saved.tensors, dtype)


def runner(kind: str, sequences: int = 2, dtype: torch.dtype = torch.float32, **settings: Any) -> Runner:
    return Runner(cpu_model(kind, dtype), CpuAttention(), sequences, **settings)


def logits_in_chunks(run: Runner, *lengths: int) -> torch.Tensor:
    """Of PROMPT in chunks of these lengths, each beside a chunk of another sequence."""
    found, start = [], run.lengths[0]
    for length in lengths:
        found.append(run.step([Chunk(1, PROMPT[5:7]), Chunk(0, PROMPT[start : start + length])])[2:])
        start += length
    return torch.cat(found)


@pytest.mark.parametrize(
    ("kind", "dtype"), [*((kind, torch.float32) for kind in MIXERS), *((kind, torch.bfloat16) for kind in DENSE)]
)
def test_cuts_change_no_bit(kind: str, dtype: torch.dtype) -> None:
    """Guards whole steps: the logits of a prompt have the same bits in one chunk or many, with rounded states too."""
    whole, cut = (
        logits_in_chunks(runner(kind, dtype=dtype, state_dtype=dtype), *lengths)
        for lengths in ([30], [1, 2, 11, 1, 15])
    )
    assert torch.equal(whole, cut)


@pytest.mark.parametrize("fault", [None, "zeroed", "neighbour", "late", "early"])
@pytest.mark.parametrize("kind", MIXERS)
def test_states_of_others_are_seen(kind: str, fault: str | None) -> None:
    """Guards the comparison: a state that was zeroed, a neighbour's, or a snapshot one token late changes logits."""
    run, cut = runner(kind), 24
    taken = {"late": cut + 1, "early": cut - 1}.get(fault or "", cut)
    run.step([Chunk(1, PROMPT[3:30]), Chunk(0, PROMPT[: cut + 2], (taken, 2))])
    run.lengths[0], run.slots[0] = cut, 1 if fault == "neighbour" else 2  # goes on from the snapshot
    if fault == "zeroed":
        run.pool.zero([2])
    error = error_of(run.step([Chunk(0, PROMPT[cut:])]), expected_logits(kind)[cut:])
    assert error < 2e-4 if fault is None else error > 1e-2


@pytest.mark.parametrize("kind", MIXERS)
def test_torch_has_the_same_snapshots(kind: str) -> None:
    """Guards snapshots of programs that run operation by operation, and the way from a batch to their arguments."""
    saved, cut = saved_model(kind), 24
    model = CudaModel(saved.config, saved.tensors, torch.float32, torch.device("cpu"), by_torch())
    run = Runner(model, ReferenceAttention(), 2)
    run.step([Chunk(1, PROMPT[3:30]), Chunk(0, PROMPT[: cut + 2], (cut, 2))])
    run.lengths[0], run.slots[0] = cut, 2
    assert error_of(run.step([Chunk(0, PROMPT[cut:])]), expected_logits(kind)[cut:]) < 2e-4


def test_files_of_models_for_pictures() -> None:
    """Guards checkpoints of text with pictures: their names, their other weights, and settings in a part of a file."""
    saved = saved_model("qwen3_5_text")
    config = {
        "model_type": "qwen3_5", "architectures": ["Qwen3_5ForConditionalGeneration"], "image_token_id": 5,
        "video_token_id": 6, "vision_config": {"depth": 2}, "text_config": saved.config, "tie_word_embeddings": False,
    }  # fmt: skip
    tensors = {name.replace("model.", "model.language_model.", 1): one for name, one in saved.tensors.items()}
    tensors |= {"model.visual.patch_embed.bias": torch.zeros(3), "mtp.fc.weight": torch.zeros(2, 2)}
    program = read_program(config)
    assert check_weights(program, resolved(program, tensors)) == cpu_model("qwen3_5_text").num_parameters
    found = logits_in_chunks(Runner(CpuModel(config, tensors, torch.float32), CpuAttention(), 2), 25, 35)
    assert error_of(found, expected_logits("qwen3_5_text")) < 2e-4


def test_files_with_all_experts_in_one_tensor() -> None:
    """Guards the two ways in which files hold experts: matrix by matrix, and gates and ups of all of them together."""
    saved = saved_model("qwen3_5_moe_text")
    network = {name: one for name, one in saved.network.state_dict().items() if ".experts." in name}
    tensors = {name: one for name, one in saved.tensors.items() if ".experts." not in name} | network
    assert all(name.endswith(("gate_up_proj", "down_proj")) for name in network)
    found = logits_in_chunks(Runner(CpuModel(saved.config, tensors, torch.float32), CpuAttention(), 2), 25, 35)
    assert error_of(found, expected_logits("qwen3_5_moe_text")) < 2e-4
    name = next(iter(network))
    with pytest.raises(UnsupportedConfig, match="missing"):
        CpuModel(saved.config, {key: one for key, one in tensors.items() if key != name}, torch.float32)


@pytest.mark.parametrize(
    "settings",
    [
        {"ssm_multipliers": [0.5, 2.0, 0.3, 3.0, 0.7], "ssm_in_multiplier": 1.5, "key_multiplier": 0.6},
        {"attention_in_multiplier": 1.3, "mlp_multipliers": [0.7, 1.6], "lm_head_multiplier": 0.4},
        {"embedding_multiplier": 2.5, "ssm_out_multiplier": 1.2, "attention_out_multiplier": 0.8},
    ],
)
def test_multipliers_of_falcon(settings: dict[str, Any]) -> None:
    """Guards multipliers that go into weights, scores and sums: the tiny model has none of them by itself."""
    saved = reconfigured(saved_model("falcon_h1"), settings | {"time_step_limit": [0.0, float("inf")]})
    run = Runner(CpuModel(saved.config, saved.tensors, torch.float32), CpuAttention(), 2)
    expected = reference_logits(saved.network, [PROMPT])[0].float()
    assert error_of(logits_in_chunks(run, 25, 35), expected) < 2e-4
    assert error_of(expected_logits("falcon_h1"), expected) > 1e-2


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        ("qwen3_5_text", {"layer_types": ["linear_attention", "conv"]}),
        ("lfm2", {"layer_types": ["conv", "linear_attention"]}),
        ("granitemoehybrid", {"position_embedding_type": "alibi"}),
        ("granitemoehybrid", {"mamba_d_head": 8}),
    ],
)
def test_unknown_layers_are_refused(kind: str, settings: dict[str, Any]) -> None:
    """Guards newer models of a family, whose layers would be taken for others."""
    with pytest.raises(UnsupportedConfig):
        read_program(saved_model(kind).config | settings)


def test_older_names_of_layers_mean_the_same() -> None:
    """Guards Granite's files, which say mamba and attention."""
    config = saved_model("granitemoehybrid").config
    older = read_program(config | {"layer_types": ["mamba", "attention"], "position_embedding_type": "nope"})
    assert older.shapes == read_program(config).shapes and older.states == read_program(config).states
