"""Models that several processes compute together: each part of a program, against the network and transformers' plans.

The processes are threads here, joined by gloo; `tests/engine/test_followers.py` has real ones.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from cbatch.attention.reference import ReferenceAttention
from cbatch.base.quantization import Quantization
from cbatch.model.families import read_program
from cbatch.model.formats.quantized import without_quantization
from cbatch.model.lora_files import read_adapters
from cbatch.model.ops.all import Program, Weight
from cbatch.model.ops.device_kernel import by_torch
from cbatch.model.ops.shards import Heads, Part, Shards, shard_of
from cbatch.runtime.process_group import ProcessGroup
from tests.support.adapters import draw_adapter, save_adapter
from tests.support.architectures import CLASSES, VARIANTS, WITHOUT_CAUSAL_CLASS
from tests.support.declared import declared_kinds
from tests.support.process_groups import together
from tests.support.programs import CHUNKS, error_of, expected_logits, logits_in_chunks, saved_model, typical_error
from tests.support.published_configs import EXPECTED, FAST, published
from tests.support.samples import sampled

pytest.importorskip("triton", reason="a model for a GPU is imported with its kernels")

from cbatch.model.cuda import CudaModel

KINDS = [*(kind for kind in declared_kinds() if kind in CLASSES | WITHOUT_CAUSAL_CLASS), *VARIANTS]
CHOSEN = [
    "llama", "qwen3_moe", "gemma4_text", "phi3", "gpt2", "falcon", "olmo2", "deepseek_v3", "gpt_oss", "qwen3_5_text",
    "bamba", "lfm2", "nemotron_h", "afmoe",
]  # fmt: skip
"""Types that have every operation in every form that is cut."""

CPU = torch.device("cpu")


def part_of(kind: str, part: Part, **options: Any) -> CudaModel:
    saved = saved_model(kind)
    return CudaModel(saved.config, saved.tensors, torch.float32, CPU, by_torch(), part=part, **options)


def logits_of_all(kind: str, size: int, **options: Any) -> list[Tensor]:
    def run(group: ProcessGroup) -> Tensor:
        model = part_of(kind, Part(group.rank, size), **options).in_group(group)
        return logits_in_chunks(model, ReferenceAttention())

    return together(size, run)


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("kind", sampled(KINDS, 16, keep=CHOSEN))
def test_parts_equal_the_network(kind: str, size: int) -> None:
    """Guards every way in which an operation is cut, also where heads or columns cannot be shared evenly."""
    for logits in logits_of_all(kind, size):
        assert error_of(logits, expected_logits(kind)) < 2e-4


def test_without_sums_nothing_is_right(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards this test itself: parts whose products are not summed differ."""
    monkeypatch.setattr(ProcessGroup, "all_reduce", lambda self, part: None)
    assert all(error_of(logits, expected_logits("llama")) > 0.1 for logits in logits_of_all("llama", 2))


@pytest.mark.parametrize("weights", ["int8", "int4"])
@pytest.mark.parametrize("kind", ["llama", "qwen3_moe", "qwen3_5_text"])
def test_quantized_parts_equal_the_whole(kind: str, weights: str) -> None:
    """Guards that a group of numbers with one scale is not separated: all integers are those of one process."""
    quantize = Quantization(weights)
    whole = logits_in_chunks(part_of(kind, Part(0, 1), quantize=quantize), ReferenceAttention())
    for logits in logits_of_all(kind, 2, quantize=quantize):
        assert typical_error(logits, whole) < 1e-5


@pytest.mark.parametrize("kind", ["llama", "phi3", "gpt2"])
def test_adapters_are_cut_like_their_linears(kind: str, tmp_path: Path) -> None:
    """Guards LoRA adapters: a part of their columns, or of their depth, in every form that files have linears in."""
    names = ("qkv_proj", "o_proj", "gate_up_proj", "down_proj", "c_attn", "c_proj", "c_fc", "q_proj", "up_proj")
    folder = save_adapter(tmp_path / "one", draw_adapter(saved_model(kind).network, names))
    adapters = read_adapters({"one": str(folder)})

    def run(group: ProcessGroup | None) -> Tensor:
        part = Part(0, 1) if group is None else Part(group.rank, group.size)
        model = part_of(kind, part).with_adapters(adapters)
        return adapted_logits(model if group is None else model.in_group(group))

    whole = run(None)
    assert error_of(whole, expected_logits(kind)) > 0.1
    for logits in together(2, run):
        assert error_of(logits, whole) < 2e-4


def adapted_logits(model: CudaModel) -> Tensor:
    forward = model.forward

    def with_adapter(batch: Any, *rest: Any) -> Any:
        return forward(replace(batch, adapters=torch.ones(len(batch.ids), dtype=torch.int64).numpy()), *rest)

    model.forward = with_adapter  # type: ignore[method-assign]
    return logits_in_chunks(model, ReferenceAttention())


OWN_WAY = {
    "linear_attn.out_proj": "rowwise",  # transformers gathers its output
    "mixer.out_proj": "rowwise",
    "mamba.out_proj": "rowwise",
}
"""Matrices that are cut another way here than by transformers."""


def has_plan(kind: str) -> bool:
    return kind in CLASSES and bool(getattr(transformers.CONFIG_MAPPING[kind], "base_model_tp_plan", None))


@pytest.mark.parametrize("kind", filter(has_plan, KINDS))
def test_cut_as_by_transformers(kind: str) -> None:
    """Guards that no large matrix is left whole: transformers' own plan says which are cut, and along which side."""
    plan: dict[str, str] = transformers.CONFIG_MAPPING[kind].base_model_tp_plan
    program = read_program(saved_model(kind).config)
    cut = {weight.name: weight for weight in shard_of(program, Part(0, 2), lambda matrices: 1).weights}
    for pattern, way in plan.items():
        expected = next((ours for name, ours in OWN_WAY.items() if pattern.endswith(name)), way)
        if "wise" not in expected or expected.startswith("embedding"):
            continue
        for name in matching(pattern, cut):
            found = cut[name]
            side = "row" if found.depth is not None else "col" if found.size[0] < whole_rows(found) else "not at all"
            if found.transpose:  # the plan is of what is stored
                side = {"row": "col", "col": "row"}.get(side, side)
            assert expected.replace("packed_", "").startswith(side), f"{name} is cut {side}, and {way} by transformers"


def matching(pattern: str, weights: Mapping[str, Weight]) -> list[str]:
    """The matrices that a pattern of transformers' plan names."""
    expression = re.compile(r"(.*\.)?" + re.escape(pattern).replace(r"\*", r"\d+") + r"(\.weight)?")
    return [name for name, weight in weights.items() if expression.fullmatch(name) and len(weight.size) == 2]


def whole_rows(weight: Weight) -> int:
    shape = weight.shape if weight.index is None else weight.shape[1:]
    return shape[-1] if weight.transpose else shape[0]


PUBLISHED = [name for name, path in json.loads(EXPECTED.read_text(encoding="utf-8")).items() if path == FAST]


@pytest.mark.parametrize("name", sampled(PUBLISHED, 8))
def test_published_models_are_shared_evenly(name: str) -> None:
    """Guards memory: each of four processes has a quarter of a published model's weights, times 1.3 at most."""
    program = read_program(without_quantization(published(name)))
    largest = max(numbers_of(shard_of(program, Part(rank, 4), lambda matrices: 32)) for rank in (0, 3))
    assert largest * 4 < numbers_of(program) * 1.3


def numbers_of(program: Program) -> int:
    return sum(math.prod(weight.size) for weight in {id(one): one for one in program.weights}.values())


@pytest.mark.parametrize(
    ("heads", "groups", "size", "grain", "expected"),
    [
        (32, 8, 4, 16, [(8, 2)] * 4),
        (9, 3, 2, 16, [(3, 1), (6, 2)]),
        (32, 2, 8, 16, [(4, 1)] * 8),
        (9, 3, 4, 16, None),
        (6, 2, 4, 16, None),
        (16, 16, 2, 128, [(8, 8)] * 2),
        (6, 6, 4, 128, None),
    ],
)
def test_heads_of_each_process(heads: int, groups: int, size: int, grain: int, expected: Any) -> None:
    """Guards queries apart from the keys that they use, and groups of numbers with one scale that are separated."""
    program = read_program(saved_model("llama").config)
    found = [
        Shards(program, Part(rank, size), lambda matrices: 1).heads_of(heads, groups, 64, grain) for rank in range(size)
    ]
    if expected is None:
        assert found == [None] * size
        return
    assert all(isinstance(one, Heads) for one in found)
    own = [one for one in found if one is not None]
    assert [(len(one.queries), len(one.keys)) for one in own] == expected
    assert [query for one in own for query in one.queries] == list(range(heads))
    for one in own:
        assert {query * groups // heads for query in one.queries} == set(one.keys)


def test_two_sums_a_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards the time of a step: one sum after attention and one after the feed-forward part, and one before."""
    counted = []
    all_reduce = ProcessGroup.all_reduce

    def counting(group: ProcessGroup, part: Tensor) -> None:
        counted.append(group.rank)
        all_reduce(group, part)

    monkeypatch.setattr(ProcessGroup, "all_reduce", counting)
    logits_of_all("llama", 2)
    steps, layers = len(CHUNKS) - 1, len(read_program(saved_model("llama").config).caches)
    assert counted.count(0) == counted.count(1) == steps * (1 + 2 * layers)
