"""Checkpoints of bitsandbytes in 4 bits, written number by number as its `functional.quantize_4bit` does."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from cbatch.attention.cpu import CpuAttention
from cbatch.base.errors import ModelError
from cbatch.kernels.formats import BFLOAT16, INT8
from cbatch.model.cpu import CpuModel
from cbatch.model.formats.methods.bitsandbytes import NestedMatrix
from cbatch.model.load_plan import LoadPlan
from cbatch.model.loader import NoFastPath, load_fast_model
from tests.support.model_checks import reference_logits
from tests.support.programs import PROMPT, error_of, logits_in_chunks, typical_error
from tests.support.quantized_folders import Encoded, Encoder, change_tensors, tiny_model, write_folder

pytestmark = pytest.mark.kernels

NF4 = torch.tensor([
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
])  # fmt: skip
SETTINGS = {
    "quant_method": "bitsandbytes", "load_in_4bit": True, "_load_in_4bit": True, "load_in_8bit": False,
    "_load_in_8bit": False, "bnb_4bit_quant_type": "nf4", "bnb_4bit_compute_dtype": "bfloat16",
    "bnb_4bit_use_double_quant": True, "bnb_4bit_quant_storage": "uint8", "llm_int8_threshold": 6.0,
}  # fmt: skip


def nf4(*, nested: bool) -> Encoder:
    def encode(numbers: Tensor) -> Encoded:
        blocks = numbers.reshape(-1, 64)
        scales = blocks.abs().amax(1)
        state: dict[str, Any] = {"quant_type": "nf4", "blocksize": 64, "dtype": "bfloat16", "shape": [*numbers.shape]}
        parts = {".weight.quant_map": NF4.clone(), ".weight.absmax": scales}
        if nested:
            offset, table = scales.mean(), torch.linspace(-1, 1, 256)
            rest = torch.nn.functional.pad(scales - offset, (0, -len(scales) % 256)).view(-1, 256)
            steps = rest.abs().amax(1)
            places = ((rest / steps[:, None])[..., None] - table).abs().argmin(-1)
            scales = (table[places] * steps[:, None]).flatten()[: len(scales)] + offset
            state |= {"nested_blocksize": 256, "nested_offset": offset.item(), "nested_dtype": "float32"}
            parts |= {
                ".weight.absmax": places.flatten()[: len(scales)].to(torch.uint8), ".weight.nested_absmax": steps,
                ".weight.nested_quant_map": table,
            }  # fmt: skip
        codes = ((blocks / scales[:, None])[..., None] - NF4).abs().argmin(-1)
        pairs = codes.view(-1, 2)
        parts[".weight"] = (pairs[:, :1] << 4 | pairs[:, 1:]).to(torch.uint8)
        parts[".weight.quant_state.bitsandbytes__nf4"] = torch.tensor([*json.dumps(state).encode()], dtype=torch.uint8)
        return parts, (NF4[codes] * scales[:, None]).view(numbers.shape)

    return encode


def logits_of(folder: Path, dtype: str = "float32") -> Tensor:
    model = load_fast_model(LoadPlan(str(folder), dtype=dtype))
    assert isinstance(model, CpuModel)
    assert dtype == "float32" or (model.formats == {BFLOAT16, INT8} and "14 of NF4" in model.stored)
    return logits_in_chunks(model, CpuAttention())


@pytest.mark.parametrize("nested", [False, True])
def test_numbers_are_those_of_the_file(nested: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Guards the order of a byte, blocks, nested scales, and that the rounding to int8 is said."""
    settings = SETTINGS | {"bnb_4bit_use_double_quant": nested}
    network = write_folder(tmp_path / "model", tiny_model(), settings, nf4(nested=nested))
    expected = reference_logits(network, [PROMPT])[0]
    assert error_of(logits_of(tmp_path / "model"), expected) < 1e-4
    assert typical_error(logits_of(tmp_path / "model", "auto"), expected) < 0.08
    assert "Matrices in NF4 are rounded to int8" in caplog.text


@pytest.mark.parametrize("changed", [{"block": 128}, {"offset": 0.0}], ids=str)
def test_wrong_numbers_are_seen(changed: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards the test above: blocks of another size, or scales without their offset."""
    network = write_folder(tmp_path / "model", tiny_model(), SETTINGS, nf4(nested=True))
    expected = reference_logits(network, [PROMPT])[0]
    init = NestedMatrix.__init__
    monkeypatch.setattr(
        NestedMatrix, "__init__", lambda self, *given: (init(self, *given), self.__dict__.update(changed))[0]
    )
    assert error_of(logits_of(tmp_path / "model"), expected) > 0.05


LAST = "model.layers.1.mlp.down_proj.weight"
STATE = f"{LAST}.quant_state.bitsandbytes__nf4"
DAMAGES: dict[str, tuple[Callable[[dict[str, Tensor]], Any], str]] = {
    "no map": (lambda tensors: tensors.pop(f"{LAST}.quant_map"), f"lack {LAST}.quant_map"),
    "few numbers": (lambda tensors: tensors.update({LAST: tensors[LAST][:8].clone()}), "is U8 [8, 1], and should be"),
    "no JSON": (lambda tensors: tensors[STATE].fill_(0x5B), f"{STATE} does not say how"),
    "no sizes": (
        lambda tensors: tensors.update({STATE: torch.tensor([*b"{}"], dtype=torch.uint8)}),
        "does not say how",
    ),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_damaged_files(name: str, tmp_path: Path) -> None:
    """Guards tensors that are missing or misshaped, and a description that is none: one sentence."""
    damage, sentence = DAMAGES[name]
    write_folder(tmp_path / "model", tiny_model(), SETTINGS, nf4(nested=True))
    change_tensors(tmp_path / "model", damage)
    with pytest.raises(ModelError) as caught:
        logits_of(tmp_path / "model")
    assert sentence in str(caught.value) and "\n" not in str(caught.value)


def test_integers_of_8_bits_are_not_read(tmp_path: Path) -> None:
    """Guards the other format of the same tool, which transformers gets."""
    write_folder(tmp_path / "model", tiny_model(), SETTINGS | {"load_in_4bit": False}, nf4(nested=True))
    with pytest.raises(NoFastPath, match="bitsandbytes weights with load_in_4bit = False are not read"):
        logits_of(tmp_path / "model")
