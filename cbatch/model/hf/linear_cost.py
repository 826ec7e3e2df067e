"""What a transformers model has to read and multiply in a step."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn

from cbatch.model.base import ALL_EXPERTS_READ, LinearCost

EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
"""Config keys for the number of experts of a layer."""


def linear_cost_of(network: Any, config: Any) -> LinearCost:
    """Matrices are all parameters of two dimensions or more, except embeddings, of which only rows are read.

    An embedding that is also the head counts once, as the head. Experts are all read in each step,
    and each token is multiplied with those that it chooses. Weights that are not parameters are not seen.
    """
    weight = getattr(network.get_output_embeddings(), "weight", None)
    head = weight if isinstance(weight, nn.Parameter) else None
    experts, share = _experts(config)
    weight_bytes, parameters, in_experts = 0, 0.0, 0
    for parameter in _matrices(network, head):
        weight_bytes += parameter.numel() * parameter.element_size()
        is_expert = experts > 1 and parameter.dim() == 3 and parameter.shape[0] == experts
        in_experts += is_expert
        if parameter is not head:
            parameters += parameter.numel() * (share if is_expert else 1)
    assumed = _assumed(network, head, experts, in_experts)
    return LinearCost(weight_bytes, parameters, head.numel() if head is not None else 0, assumed)


def _matrices(network: Any, head: nn.Parameter | None) -> Iterator[nn.Parameter]:
    """Yields each matrix once, however many modules share it."""
    embeddings = {id(module.weight) for module in network.modules() if isinstance(module, nn.Embedding)}
    for parameter in network.parameters():
        if parameter.dim() >= 2 and (parameter is head or id(parameter) not in embeddings):
            yield parameter


def _experts(config: Any) -> tuple[int, float]:
    """The number of experts of a layer, and the share of them that a token is multiplied with (1 if unknown)."""
    number = next((found for name in EXPERTS if isinstance(found := getattr(config, name, None), int)), 0)
    chosen = getattr(config, "num_experts_per_tok", None) or getattr(config, "moe_topk", None)
    return number, chosen / number if number and isinstance(chosen, int) else 1.0


def _assumed(network: Any, head: nn.Parameter | None, experts: int, in_experts: int) -> tuple[str, ...]:
    notes = []
    if head is None:
        notes.append("The model does not say which weights are its output head, so they count for every token.")
    if experts > 1 and in_experts:
        notes.append(ALL_EXPERTS_READ)
    elif experts > 1:
        notes.append("The weights of experts could not be identified, so every token is assumed to use all of them.")
    if any(not parameter.dtype.is_floating_point for parameter in network.parameters()):
        notes.append("Some weights are not floating-point numbers; if several share a byte, they count as one.")
    return tuple(notes)
