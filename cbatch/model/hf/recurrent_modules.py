"""Recurrent layers of transformers that know no cache object: RWKV, xLSTM and RecurrentGemma.

Each function here gives a module a `forward` that takes such an object as the keyword `held`, in place of a list of
tensors, a tuple of them, or attributes of the module.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

Forward = Callable[..., Any]


class HeldStates(Protocol):
    """The states of the sequences that a module is given; see `StateView`."""

    def get(self, layer: int, kind: str, index: int = 0) -> Tensor | None:
        """[N, ...], or None if the sequences begin."""

    def set(self, layer: int, kind: str, value: Tensor, index: int = 0) -> None:
        """Keeps a state [N, ...]."""


class _Columns:
    """Stands for a tensor [N, hidden, layers], of which a module reads and writes the column of its layer."""

    def __init__(self, column: Tensor) -> None:
        self.column = column

    def __getitem__(self, index: Any) -> Tensor:
        return self.column

    def __setitem__(self, index: Any, value: Tensor) -> None:
        self.column = value


def _rwkv(module: Any, number: int) -> Forward:
    """RWKV keeps, for each layer, what its two parts saw last, and numerator, denominator and maximum of a mean."""
    original: Forward = module.forward
    is_attention = hasattr(module, "time_decay")
    indices = (1, 2, 3, 4) if is_attention else (0,)

    def forward(hidden: Tensor, state: Any = None, use_cache: bool = False, *, held: HeldStates | None = None) -> Any:
        if held is None:
            return original(hidden, state, use_cache) if is_attention else original(hidden, state)
        columns: list[Any] = [None] * 5
        for index in indices:
            column = held.get(module.layer_id, "rwkv", index)
            if column is None:
                inner = module.attention_hidden_size if index >= 2 else hidden.shape[-1]
                dtype = torch.float32 if index >= 2 else hidden.dtype
                column = hidden.new_full((len(hidden), inner), -1e30 if index == 4 else 0.0, dtype=dtype)
            columns[index] = _Columns(column)
        out = original(hidden, columns, True)[0] if is_attention else original(hidden, columns)[0]
        for index in indices:
            held.set(module.layer_id, "rwkv", columns[index].column, index)
        return out, None

    return forward


def _xlstm(module: Any, number: int) -> Forward:
    """A block of xLSTM keeps a matrix, a vector and a maximum for each head."""
    original: Forward = module.forward

    def forward(x: Tensor, state: Any = None, *, held: HeldStates | None = None) -> Any:
        if held is None:
            return original(x, state)
        parts = [held.get(number, "xlstm", index) for index in range(3)]
        out, new = original(x, None if parts[0] is None else tuple(parts))
        for index, part in enumerate(new):
            held.set(number, "xlstm", part, index)
        return out, None

    return forward


def _recurrent_gemma(module: Any, number: int) -> Forward:
    """A block of RecurrentGemma keeps the last inputs of a convolution, and what its linear recurrence gave last."""
    original: Forward = module.forward

    def forward(hidden: Tensor, *args: Any, held: HeldStates | None = None, **kwargs: Any) -> Any:
        if held is None:
            return original(hidden, *args, **kwargs)
        module.conv1d_state = held.get(number, "conv")
        module.rg_lru.recurrent_states = held.get(number, "recurrent")
        out = original(hidden, *args, **kwargs | {"use_cache": True})
        held.set(number, "conv", module.conv1d_state)
        held.set(number, "recurrent", module.rg_lru.recurrent_states)
        module.conv1d_state = module.rg_lru.recurrent_states = None
        return out

    return forward


class Convention(NamedTuple):
    """How modules of a class are given their states.

    adapt:    makes their new `forward`, given a module and its number
    together: whether they can be given several sequences at once
    """

    adapt: Callable[[Any, int], Forward]
    together: bool = True


CONVENTIONS: dict[str, Convention] = {
    "RwkvSelfAttention": Convention(_rwkv, together=False),  # it mixes up the sequences of a batch
    "RwkvFeedForward": Convention(_rwkv, together=False),
    "xLSTMBlock": Convention(_xlstm),
    "RecurrentGemmaRecurrentBlock": Convention(_recurrent_gemma),
}
"""By the name of the class."""


def modules_with_conventions(network: nn.Module) -> list[tuple[nn.Module, Convention]]:
    """The modules of a network that are listed here, in their order."""
    names = ((module, CONVENTIONS.get(type(module).__name__)) for module in network.modules())
    return [(module, convention) for module, convention in names if convention is not None]
