"""From hidden states to an embedding, as the files of sentence-transformers beside a model say.

https://sbert.net/docs/package_reference/sentence_transformer/models.html describes `modules.json`, which lists the
parts that follow the model: pooling, dense layers, and a norm. A model without it gets the last token's hidden state if
its tokenizer ends each text with a special token, as that of Qwen3-Embedding does; else the mean of all; and the norm.

A sequence classifier of transformers has one linear behind the last token's hidden state, `score.weight`.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from cbatch.base.errors import ModelError, invalid_row
from cbatch.base.model_files import check_files, read_json_object
from cbatch.model.config_classes import text_config
from cbatch.model.tensor_files import Tensors
from cbatch.text.tokenizer import ChatTokenizer

FILES = ["modules.json", "config_sentence_transformers.json", "*/config.json", "*_Dense/model.safetensors"]
"""Files of a model on the hub that are read beside its weights."""

MODES = {"cls": "cls", "cls_token": "cls", "mean": "mean", "mean_tokens": "mean", "lasttoken": "lasttoken"}
"""Names of ways to pool, and ours."""

ACTIVATIONS = ("Identity", "Tanh", "ReLU", "GELU", "SiLU", "Sigmoid")
"""Classes of torch.nn."""


class Dense(NamedTuple):
    """A linear [columns, depth] in float32, its biases if it has any, and the activation after it."""

    weight: Tensor
    bias: Tensor | None
    activation: str

    def __call__(self, vector: Tensor) -> Tensor:
        made: Tensor = getattr(torch.nn, self.activation)()(torch.nn.functional.linear(vector, self.weight, self.bias))
        return made


@dataclass(frozen=True)
class Pooling:
    """The way of a model from the hidden states of a text to its embedding.

    mode:       which hidden states count: of the first token (cls), of the last (lasttoken), or the mean of all
    dense:      layers that follow
    normalizes: whether the embedding has length 1
    prompts:    instructions in front of a text, by name; `default_prompt` names the one that is there if none is asked
    labels:     names of the numbers that a classification head gives instead of an embedding; empty without one
    activation: what makes scores of these numbers: one of ACTIVATIONS, or Softmax
    """

    mode: str = "mean"
    dense: Sequence[Dense] = field(default=(), repr=False)
    normalizes: bool = True
    prompts: Mapping[str, str] = field(default_factory=dict)
    default_prompt: str | None = None
    labels: Sequence[str] = field(default=(), repr=False)
    activation: str = field(default="Identity", repr=False)

    @cached_property
    def identity(self) -> str:
        """A hash of all this, for keys."""
        weights = [part for layer in self.dense for part in layer[:2] if part is not None]
        digest = hashlib.blake2b(repr((self, [one.activation for one in self.dense])).encode(), digest_size=8)
        for weight in weights:
            digest.update(weight.numpy().tobytes())
        return digest.hexdigest()

    def positions(self, count: int) -> range:
        """The tokens, of so many of a text, whose hidden states are averaged."""
        return {"cls": range(1), "lasttoken": range(count - 1, count)}.get(self.mode, range(count))

    def prompt(self, name: str | None) -> str:
        """The instruction of that name. Raises RequestError if there is none."""
        name = self.default_prompt if name is None else name
        if name is not None and name not in self.prompts:
            names = ", ".join(self.prompts) or "none"
            raise invalid_row(f"the model's files have no prompt {name!r}; those they have: {names}")
        return "" if name is None else self.prompts[name]

    def embedding(self, pooled: NDArray[np.float32], dimensions: int | None = None) -> NDArray[np.float32]:
        """[dimensions] float32, of the mean hidden state [hidden size]. Raises RequestError if it has not so many.

        dimensions: how many of its numbers are kept, for models that are trained so that the first ones say most
                    (Matryoshka, https://arxiv.org/abs/2205.13147); None for all
        """
        vector = torch.from_numpy(np.asarray(pooled, np.float32))
        for layer in self.dense:
            vector = layer(vector)
        if dimensions is not None and dimensions > len(vector):
            raise invalid_row(f"dimensions must be at most {len(vector)}, the size of the model's embeddings")
        vector = vector[:dimensions]
        if self.normalizes:
            vector = torch.nn.functional.normalize(vector, dim=0)
        return vector.numpy()

    def scores(self, logits: NDArray[np.float32]) -> list[float]:
        """The score of each label, of the numbers [labels] that the classification head gives."""
        function = torch.nn.Softmax(0) if self.activation == "Softmax" else getattr(torch.nn, self.activation)()
        made: list[float] = function(torch.from_numpy(logits)).tolist()
        return made


def read_classifier(folder: Path, config: Mapping[str, Any]) -> Pooling:
    """The classification head of a model in a folder, by its config.json. Raises ModelError if it is not as that says.

    Its scores go through the activation that sentence-transformers has written there, or by `problem_type`: none for a
    regression, a sigmoid for several labels at once. Else a sigmoid for one label, and a softmax for several.
    """
    names: Mapping[str, Any] = config.get("id2label") or {}
    number = len(names) or config.get("num_labels") or 2  # as in transformers
    labels = [str(names.get(str(at), f"LABEL_{at}")) for at in range(number)]
    if len({*labels}) < number:  # they name the fields of a row
        labels = [f"LABEL_{at}" for at in range(number)]
    settings = config.get("sentence_transformers")
    asked = settings.get("activation_fn") if isinstance(settings, Mapping) else None
    asked = asked or config.get("sbert_ce_default_activation_function")
    by_problem = {"regression": "Identity", "multi_label_classification": "Sigmoid"}
    usual = by_problem.get(str(config.get("problem_type")), "Sigmoid" if number == 1 else "Softmax")
    activation = str(asked or usual).rpartition(".")[2]
    if activation not in (*ACTIVATIONS, "Softmax"):
        raise ModelError(f"{folder / 'config.json'} names the activation {activation[:80]}, which is not supported.")
    tensors, size = Tensors(folder), text_config(config).get("hidden_size")
    weight, bias = tensors.get("score.weight"), tensors.get("score.bias")
    if weight is None:
        raise ModelError(f"{folder} holds no tensor score.weight, the classification head that its config.json names.")
    if tuple(weight.shape) != (number, size) or (bias is not None and tuple(bias.shape) != (number,)):
        raise ModelError(
            f"score.weight in {folder} is {list(weight.shape)}, and {[number, size]} by the labels (id2label) and "
            "hidden_size of its config.json."
        )
    dense = Dense(weight.float(), None if bias is None else bias.float(), "Identity")
    return Pooling("lasttoken", [dense], normalizes=False, labels=labels, activation=activation)


def read_pooling(folder: Path, tokenizer: ChatTokenizer | None) -> Pooling:
    """The pooling that the files in a model's folder describe. Raises ModelError for a kind that is not known."""
    settings = read_json_object(folder / "config_sentence_transformers.json")
    found: dict[str, Any] = {"prompts": settings.get("prompts") or {}}
    found["default_prompt"] = settings.get("default_prompt_name")
    try:
        modules = json.loads((folder / "modules.json").read_text(encoding="utf-8"))
        parts = [(str(one["type"]).rpartition(".")[2], str(one["path"])) for one in modules]
    except FileNotFoundError:
        return Pooling(default_mode(tokenizer), **found)
    except (ValueError, TypeError, KeyError) as error:
        raise ModelError(f"{folder / 'modules.json'} is no list of modules with a type and a path each.") from error
    mode, dense, normalizes = "mean", list[Dense](), False
    for kind, name in parts:
        if Path(name).name != name:
            raise ModelError(f"{folder / 'modules.json'} names {name[:80]!r}, which is no folder beside it.")
        if kind == "Pooling":
            mode = _mode(folder / name / "config.json")
        elif kind == "Dense":
            _append(dense, _dense(folder / name))
        elif kind == "Normalize":
            normalizes = True
        elif kind != "Transformer":
            raise ModelError(f"{folder / 'modules.json'} has a module {kind[:80]}, which is not supported.")
    return Pooling(mode, dense, normalizes, **found)


def default_mode(tokenizer: ChatTokenizer | None) -> str:
    """The pooling of a model whose files do not describe it."""
    ids = [] if tokenizer is None else tokenizer.encode("a")
    return "lasttoken" if tokenizer is not None and ids[-1] in tokenizer.special_ids else "mean"


def _mode(path: Path) -> str:
    settings = read_json_object(path)
    if settings.get("include_prompt") is False:
        raise ModelError(f"{path} leaves prompts out of the pooling, which is not supported.")
    named = settings.get("pooling_mode")
    prefix = "pooling_mode_"
    flags = [name.removeprefix(prefix) for name, value in settings.items() if name.startswith(prefix) and value is True]
    modes = [named] if isinstance(named, str) else flags
    if len(modes) != 1 or modes[0] not in MODES:
        raise ModelError(f"{path} pools by {' and '.join(modes) or 'nothing'}; cls, mean and lasttoken are supported.")
    return MODES[modes[0]]


def _dense(folder: Path) -> Dense:
    from safetensors.torch import load_file

    check_files(folder)
    settings, path = read_json_object(folder / "config.json"), folder / "model.safetensors"
    activation = str(settings.get("activation_function", "Tanh")).rpartition(".")[2]
    if activation not in ACTIVATIONS:
        raise ModelError(f"{folder / 'config.json'} names the activation {activation[:80]}, which is not supported.")
    if not path.is_file():
        raise ModelError(f"There is no file {path}; weights are read from safetensors files only.")
    tensors = {name: tensor.float() for name, tensor in load_file(path).items()}
    weight, bias = tensors.get("linear.weight"), tensors.get("linear.bias")
    if weight is None or weight.dim() != 2 or (bias is None) == bool(settings.get("bias", True)):
        raise ModelError(f"{path} does not hold the linear that its config.json describes.")
    return Dense(weight, bias, activation)


def _append(dense: list[Dense], layer: Dense) -> None:
    """Adds a layer. It becomes one with a linear before it that has no activation, since their product is smaller."""
    if dense and dense[-1].activation == "Identity" and dense[-1].bias is None:
        layer = layer._replace(weight=layer.weight @ dense.pop().weight)
    dense.append(layer)
