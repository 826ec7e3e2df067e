"""Steps of a transformers model in two parts, as they are captured as CUDA graphs.

The decoder and the output head are called by themselves. What a network does to its logits beside that, a factor or a
softcap, is found by comparing both parts with the network's own forward. Whether the code of a model can be captured
at all shows when it is tried: code that waits for the device cannot be (see `execution/cuda_graphs.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from cbatch.attention.base import AttentionBackend, CapturableAttention
from cbatch.kernels.layer_ops import multiply_logits
from cbatch.model.base import DeviceInputs, HiddenStates
from cbatch.runtime.kv_cache import KVCache

_TOLERANCES = {torch.float32: 1e-3, torch.float16: 1e-2, torch.bfloat16: 6e-2}
"""Most that rounding changes logits, as a share of their spread."""

_TRIAL_TOKENS = 4

Finish = Callable[[Tensor], Tensor]
"""What becomes of the head's product."""


class RaggedNetwork(Protocol):
    """A model of transformers that runs ragged batches; see `TransformersModel`."""

    config: Any
    device: torch.device
    dtype: torch.dtype
    vocab_size: int
    max_model_len: int

    def in_step(
        self, kv_cache: KVCache, attention: AttentionBackend, metadata: Any
    ) -> AbstractContextManager[None]: ...

    def plain_logits(self, token_ids: list[int]) -> Tensor: ...

    def plain_hidden_states(self, decoder: Any, token_ids: list[int]) -> Tensor: ...


@dataclass(eq=False)
class CapturableNetwork:
    """A `CapturableModel`.

    decoder: gives the hidden states [1, T, hidden] that the head takes
    head:    the output embedding
    """

    model: RaggedNetwork
    decoder: Any
    head: nn.Linear
    finish: Finish

    def __post_init__(self) -> None:
        self.device: torch.device = self.model.device
        self.vocab_size: int = self.model.vocab_size
        self.max_model_len: int = self.model.max_model_len

    @classmethod
    def of(cls, model: RaggedNetwork, network: Any) -> CapturableNetwork | None:
        """None if the two parts do not give what the network gives."""
        decoder, head = _parts_of(network)
        if decoder is None or not isinstance(head, nn.Linear):
            return None
        ids = list(range(_TRIAL_TOKENS))
        with torch.inference_mode():
            expected = model.plain_logits(ids)
            try:
                hidden = model.plain_hidden_states(decoder, ids)
                product = head(hidden)
            except Exception:  # whatever a decoder raises that is not called as its network calls it
                return None
            softcap = getattr(model.config, "final_logit_softcapping", None)
            finish = _finish_of(product.float(), expected.float(), softcap, _TOLERANCES[product.dtype])
        return None if finish is None else cls(model, decoder, head, finish)

    def new_hidden_states(self, tokens: int) -> HiddenStates:
        """Everything is in `added`; there is no residual beside it."""
        added = torch.empty(tokens, self.head.in_features, dtype=self.model.dtype, device=self.device)
        return HiddenStates(added[:, :0].float(), added)

    @torch.inference_mode()
    def run_layers(
        self,
        inputs: DeviceInputs,
        metadata: Any,
        kv_cache: KVCache,
        attention: CapturableAttention,
        out: HiddenStates | None = None,
    ) -> HiddenStates:
        """See `CapturableModel`."""
        with self.model.in_step(kv_cache, attention, metadata):
            hidden = self.decoder(
                input_ids=inputs.input_ids[None], position_ids=inputs.position_ids[None], use_cache=False
            )[0][0]
        out = self.new_hidden_states(len(inputs.input_ids)) if out is None else out
        out.added.copy_(hidden)
        return out

    @torch.inference_mode()
    def run_head(self, hidden: HiddenStates, rows: Tensor, out: Tensor | None = None) -> Tensor:
        """See `CapturableModel`."""
        chosen = hidden.added[rows]
        if self.head.bias is None:
            logits = self.finish(multiply_logits(chosen, self.head.weight))
        else:
            logits = self.finish(self.head(chosen).float())
        return logits if out is None else out.copy_(logits)


def _parts_of(network: Any) -> tuple[Any, Any]:
    """The decoder and the head of a network, where it has them."""
    try:
        return network.get_decoder(), network.get_output_embeddings()
    except Exception:  # whatever a network raises that has none
        return None, None


def _finish_of(product: Tensor, expected: Tensor, softcap: float | None, tolerance: float) -> Finish | None:
    """What makes logits [T, vocabulary] of the head's product, if it is a factor or a softcap; else None."""
    scale = float((product * expected).sum() / product.square().sum().clamp(min=1e-12))
    candidates: list[Finish] = [lambda logits: logits, lambda logits: logits * scale]
    if softcap:
        candidates.append(lambda logits: softcap * torch.tanh(logits / softcap))
    for finish in candidates:
        error = (finish(product) - expected).square().mean().sqrt() / expected.std().clamp(min=1e-12)
        if float(error) <= tolerance:
            return finish
    return None
