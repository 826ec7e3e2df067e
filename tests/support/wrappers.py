"""Tiny random models that wrap a language model, as files hold them under several names of their weights."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import CONFIG_MAPPING
from transformers.models.auto import modeling_auto

from cbatch.model.config_classes import wrapper_of
from cbatch.model.families import read_program
from cbatch.model.tensor_names import names_in_files
from tests.support.architectures import draw, shrunk
from tests.support.declared import has_declaration, wrappers
from tests.support.programs import SavedModel, as_files

LAYOUTS = {
    "model.language_model.": "",
    "language_model.model.": "language_model.",
    "model.text_model.": "",
    "model.": "",
    "model.language_model.model.": "model.language_model.",
}
"""Beginnings of the names of a language model's weights in published files, and that of its head."""


WRONGLY_SAVED = {"kimi_k25": ".blocks.", "qianfan_ocr": ".encoder.layers."}
"""Names that transformers 5.24 gives the layers of the text model when it saves one: it takes them for the tower's."""

NOT_TRIED: dict[str, str] = {
    "cosmos3_omni": "its attention has names of its own",
    "emu3": "no small one can be made of its configuration",
    "fast_vlm": "its vision tower needs the package timm",
    "fun_asr_nano": "no small one can be made of its configuration",
    "nemo_speechlm": "its embedding lies beside its language model",
    "paligemma": "its language model sees tokens behind",
    "perception_lm": "its vision tower needs the package timm",
    "qwen2_5_omni": "only its thinker continues a text, which is tried by itself",
    "qwen3_omni_moe": "only its thinker continues a text, which is tried by itself",
}
"""Wrappers of declared language models that are not compared, and why."""


def wrapper_kinds() -> list[str]:
    """The types of models that wrap a language model which is declared, but for those that are not tried."""
    return [kind for kind in wrappers() if has_declaration(kind) and kind not in NOT_TRIED]


@cache
def saved_wrapper(kind: str) -> SavedModel:
    """A tiny model of a type, as transformers saves it."""
    cls = CONFIG_MAPPING[kind]
    network = _class_of(kind)._from_config(cls(**shrunk(cls().to_dict()))).eval()
    draw(network, 1.5)
    config, tensors = as_files(network)
    return SavedModel(network, config, layers_renamed(kind, tensors))


def layers_renamed(kind: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors that transformers saves of a type of wrapper, with the layers of its text model called such."""
    wrong = WRONGLY_SAVED.get(kind, "\0")
    return {name.replace(wrong, ".layers."): tensor for name, tensor in tensors.items()}


def _class_of(kind: str) -> Any:
    wrapper = wrapper_of(kind)
    assert wrapper is not None
    mappings = (
        modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
        modeling_auto.MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES,
        modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    )
    name: Any = next(names[kind] for names in mappings if kind in names)
    return getattr(transformers, name if isinstance(name, str) else name[0])


def published(saved: SavedModel) -> Iterator[tuple[str, dict[str, Tensor]]]:
    """The tensors of a model under each of the names that published files have, and how these begin."""
    program = read_program(saved.config)
    theirs = {name: ours for ours, name in names_in_files(program, saved.tensors).items()}
    for prefix, head in LAYOUTS.items() if not program.renamed else ():  # with names of its own
        yield prefix, dict(_renamed(saved.tensors, theirs, program.root, prefix, head))


def _renamed(
    tensors: Mapping[str, Tensor], theirs: Mapping[str, str], root: str, prefix: str, head: str
) -> Iterator[tuple[str, Tensor]]:
    for name, tensor in tensors.items():
        ours = theirs.get(name)
        if ours is None:
            yield name, tensor
        else:
            yield (prefix + ours.removeprefix(root) if ours.startswith(root) else head + ours), tensor


def text_logits(network: Any, prompt: list[int]) -> Tensor:
    """Logits [T, vocabulary] of a model for text alone."""
    if network.config.model_type == "llama4":  # which looks for pictures in what its language model gives
        network = network.language_model
    with torch.inference_mode():
        found: Tensor = network(input_ids=torch.tensor([prompt]), use_cache=False).logits[0].float()
        return found
