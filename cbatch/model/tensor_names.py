"""How files name the weights of a language model: alone, or within a larger model."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from cbatch.model.ops.program import Program

HEAD = "lm_head.weight"
"""The output head, as most families call it."""

PREFIXES = (
    "model.language_model.model.", "model.language_model.", "language_model.model.", "language_model.",
    "model.text_model.", "text_model.model.", "thinker.model.", "thinker.", "language_model.backbone.", "llm.model.",
    "model.", "transformer.", "backbone.", "decoder.", "",
)  # fmt: skip
"""Beginnings of the names, the longer ones first."""


def names_in_files(program: Program, tensors: Mapping[str, Any]) -> dict[str, str]:
    """The tensors of the files by the names that the program has for them.

    Those of a larger model around it are left out.
    tensors: by their names in the files, with a `shape` each
    """
    root, table_name = program.root, program.embedding.name
    table = table_name.removeprefix(root)
    prefix = next((one for one in (root, *PREFIXES) if _is_table(program, tensors.get(one + table))), root)
    ends = {HEAD, *(weight.name for weight in (*program.head.parts, *program.head.biases))}
    heads = {
        next((one + ours for one in ("", *PREFIXES) if one + ours in tensors), ours): ours
        for ours in ends - {table_name}
    }
    own = {name.removeprefix(root).partition(".")[0] for name in program.shapes if name.startswith(root)}
    found = {}
    for name in tensors:
        if name in heads:
            found[heads[name]] = name
        elif (renamed := _renamed(program, name)) is not None:
            found[renamed] = name
        elif name.startswith(prefix):
            rest = name.removeprefix(prefix)
            if not program.is_wrapped or rest.partition(".")[0] in own:
                found[root + rest] = name
        elif not program.is_wrapped:
            found[name] = name
    return found


def _renamed(program: Program, name: str) -> str | None:
    return next((ours + name.removeprefix(one) for one, ours in program.renamed if name.startswith(one)), None)


def has_own_head(program: Program, tensors: Mapping[str, Tensor]) -> bool:
    """Whether the files hold a head that is not the embedding, although their config.json ties the two."""
    if not program.is_tied:
        return False
    names = names_in_files(program, tensors)
    head, table = names.get(HEAD), names.get(program.embedding.name)
    if head is None or table is None:
        return False
    ours, theirs = tensors[head], tensors[table]
    return ours.dtype != theirs.dtype or not torch.equal(ours, theirs)


def lacks_head(program: Program, tensors: Mapping[str, Any]) -> bool:
    """Whether a model has no output head: by its class, or by bare names. Other files without one are torn."""
    if is_classifier([program.name]):
        return True
    head = program.head.parts[0].name
    if program.is_tied or head in names_in_files(program, tensors) or _is_packed(head, tensors):
        return False
    has_full_names = program.embedding.name in tensors or _is_packed(program.embedding.name, tensors)
    return not (has_causal_class(program.name) and has_full_names)


def _is_packed(name: str, tensors: Iterable[str]) -> bool:
    """Whether files have a weight as several tensors of its module, such as its integers and their scales."""
    module = name.removesuffix("weight")
    return any(module in each for each in tensors)


def has_causal_class(name: str) -> bool:
    """Whether models of a class of transformers have an output head."""
    return name.endswith(("ForCausalLM", "LMHeadModel", "ForConditionalGeneration"))


def is_classifier(architectures: Iterable[str] | None) -> bool:
    """Whether a model of these classes of transformers has a classification head instead of an output head."""
    return any(str(name).endswith("ForSequenceClassification") for name in architectures or ())


def _is_table(program: Program, tensor: Any) -> bool:
    return tensor is not None and tuple(tensor.shape) == program.embedding.shape
