"""Serves the recurrent layers of transformers models: each chunk of a step goes on from the state in its slot.

From version 5.21 on, some two dozen models of transformers ask a cache object for the states of their recurrent layers
and give it the new ones. A probe learns which modules do that, and what they keep. In a step each of these modules is
called several times: once with all requests that decode, and once for each chunk of a prompt. What it sees as the cache
is a `StateView` of the slots. Everything else in the model runs on the ragged row as it is.

Some modules take no state into account if they are given more than one token (the scan of Mamba). With
`StateLayout.by_token` they go on from a state token by token.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import partial, partialmethod
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from cbatch.base.errors import ModelError
from cbatch.runtime.state_pool import StateShape, StepStates

PROBE_TOKENS = 5
FIRST_VERSION = "5.21"
"""Of transformers, whose caches have the methods that are served here."""

StateName = tuple[int, str, int]
"""Layer, kind, such as `conv` or `recurrent`, and the number among several of a layer."""


class Piece(NamedTuple):
    """Rows of a step that a module is given together.

    rows:     as an index of the step's tokens
    slots:    one for each row if `is_decode`, else one for all
    is_fresh: they begin their sequence
    copy_to:  the slot to which the state is copied after them; -1 for none
    """

    rows: slice | Tensor
    slots: list[int]
    is_decode: bool
    is_fresh: bool
    copy_to: list[int]


class StateView:
    """The cache as a module sees it: the states in the slots of one piece. The names are those of transformers.

    Each state is read when it is first asked for, and written by `keep`.
    """

    def __init__(self, states: StateLayout, tensors: Sequence[Tensor], piece: Piece) -> None:
        self._states = states
        self._tensors = tensors
        self._piece = piece
        self._held: dict[StateName, Tensor] = {}

    def get(self, kind: str, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        """A state [N, ...] of the piece's sequences; None if they begin. It may be changed in place."""
        if self._piece.is_fresh:
            return None
        name = layer_idx, kind, state_idx
        if name not in self._held:
            number = self._states.numbers[name]
            self._held[name] = self._tensors[number][self._piece.slots].to(self._states.shapes[number].dtype)
        return self._held[name]

    get_conv_state = partialmethod(get, "conv")
    get_recurrent_state = partialmethod(get, "recurrent")
    get_linear_cache = partialmethod(get, "linear")

    def update_conv_state(
        self, conv_states: Tensor, layer_idx: int, state_idx: int = 0, conv_kernel_size: int | None = None, **_: Any
    ) -> Tensor:
        """Keeps the last columns of the old state and the new ones [N, channels, T], and returns both."""
        width = self._states.shapes[self._states.numbers[layer_idx, "conv", state_idx]].shape[-1]
        before = self.get("conv", layer_idx, state_idx)
        if before is not None:
            conv_states = torch.cat([before, conv_states], dim=-1)
        elif conv_states.shape[-1] < width:
            conv_states = nn.functional.pad(conv_states, (width - conv_states.shape[-1], 0))
        self.set("conv", conv_states[..., -width:], layer_idx, state_idx)
        return conv_states

    def update_recurrent_state(self, recurrent_states: Tensor, layer_idx: int, state_idx: int = 0, **_: Any) -> Tensor:
        self.set("recurrent", recurrent_states, layer_idx, state_idx)
        return recurrent_states

    def set_linear_cache(self, layer_idx: int, linear_cache: Tensor) -> None:
        self.set("linear", linear_cache, layer_idx)

    def has_previous_state(self, layer_idx: int | None = None, state_idx: int | None = None) -> bool:
        return not self._piece.is_fresh

    def is_recording_past(self, layer_idx: int) -> bool:
        return False

    def set(self, kind: str, value: Tensor, layer_idx: int, state_idx: int = 0) -> None:
        """Keeps a state [N, ...]."""
        self._held[layer_idx, kind, state_idx] = value

    def keep(self) -> None:
        """Writes what the module has left to the slots."""
        for name, value in self._held.items():
            tensor = self._tensors[self._states.numbers[name]]
            tensor[self._piece.slots] = value.to(tensor.dtype)
            copied = [(row, slot) for row, slot in enumerate(self._piece.copy_to) if slot >= 0]
            if copied:
                rows, slots = zip(*copied, strict=True)
                tensor[list(slots)] = value[list(rows)].to(tensor.dtype)


@dataclass(eq=False)
class StateLayout:
    """The states of a network's recurrent layers.

    numbers: of each state among the model's
    shapes, devices: of each state
    by_token: whether modules are given a chunk that goes on from a state token by token
    """

    numbers: dict[StateName, int] = field(default_factory=dict)
    shapes: list[StateShape] = field(default_factory=list)
    devices: list[torch.device] = field(default_factory=list)
    by_token: bool = False

    def add(self, name: StateName, example: Tensor) -> None:
        """Adds a state of which an example [1, ...] is given."""
        self.numbers[name] = len(self.shapes)
        self.shapes.append(StateShape(tuple(example.shape[1:]), example.dtype))
        self.devices.append(example.device)


class RecurrentStep(NamedTuple):
    """The state that the modules of a network share in a step.  tensors: of the pool"""

    states: StateLayout
    tensors: Sequence[Tensor]
    pieces: list[Piece]

    @classmethod
    def of(cls, states: StateLayout, step: StepStates, starts: Sequence[int], stops: Sequence[int]) -> RecurrentStep:
        return cls(states, step.pool.tensors, list(pieces_of(step, starts, stops, by_token=states.by_token)))


_current: ContextVar[RecurrentStep | None] = ContextVar("cbatch_recurrent_step", default=None)


@contextmanager
def holding(variable: ContextVar[Any], value: Any) -> Iterator[None]:
    """While a model runs, its modules find a value in a variable."""
    token = variable.set(value)
    try:
        yield
    finally:
        variable.reset(token)


recurring = partial(holding, _current)
"""While a model runs a step, its recurrent modules go on from the slots."""


def pieces_of(step: StepStates, starts: Sequence[int], stops: Sequence[int], *, by_token: bool) -> Iterator[Piece]:
    """The pieces of a step: all that decode together, then each chunk of a prompt, cut where a snapshot is made."""
    first, decoding, prompts = 0, [], []
    for number, (start, stop) in enumerate(zip(starts, stops, strict=True)):
        if start > 0 and stop - start == 1:
            decoding.append((first, number))
        else:
            prompts.append((first, number))
        first += stop - start
    if decoding:
        rows, chunks = (torch.tensor(column) for column in zip(*decoding, strict=True))
        slots, copies = step.slots[chunks.numpy()].tolist(), step.snapshot_slots[chunks.numpy()].tolist()
        yield Piece(rows, slots, True, False, copies)
    for first, number in prompts:
        start, count = starts[number], stops[number] - starts[number]
        slot, copy_to = int(step.slots[number]), int(step.snapshot_slots[number])
        snapshot_at = int(step.snapshot_counts[number]) if copy_to >= 0 else count
        alone = range(snapshot_at if start == 0 else 0, count) if by_token else ()
        cuts = sorted({0, snapshot_at, count, *alone})
        for before, after in pairwise(cuts):
            copied = copy_to if after == snapshot_at else -1
            yield Piece(slice(first + before, first + after), [slot], False, start == 0 and before == 0, [copied])


def serve_modules(network: Any, config: Any, device: torch.device) -> StateLayout:
    """Learns what the recurrent layers of a network keep, and serves their modules from now on.

    Raises ModelError if there are none, or if they keep their states in another way.
    """
    from transformers.cache_utils import Cache

    if not hasattr(Cache, "get_conv_state"):
        raise ModelError(f"its recurrent layers need transformers {FIRST_VERSION} or newer")
    ids = torch.arange(PROBE_TOKENS, device=device)[None] % config.vocab_size
    output = network(input_ids=ids, use_cache=True)
    # Its name differs: `past_key_values` of most, and of Mamba `cache_params`, or `cache` from transformers 5.24 on.
    name, cache = next(((name, one) for name, one in output.items() if isinstance(one, Cache)), ("", None))
    if cache is None:
        raise ModelError("its recurrent layers keep their states in a way that cannot be served")
    states = _states_of(cache)
    inputs = {"input_ids": ids[:, :1], name: cache, "use_cache": True}
    modules = modules_that_ask(network, cache, inputs, _METHODS)
    if not states.shapes or not modules:
        raise ModelError("its recurrent layers keep their states in a way that cannot be served")
    for module, parameter in modules.items():
        _serve(module, parameter)
    return states


def _states_of(cache: Any) -> StateLayout:
    """The states that a cache of transformers holds after a pass."""
    states = StateLayout()
    for number, layer in enumerate(cache.layers):
        for kind in ("conv", "recurrent"):
            held = getattr(layer, f"{kind}_states", None)
            for index, state in (held or {}).items():
                if state is not None:
                    states.add((number, kind, index), state)
    for number, state in enumerate(getattr(cache, "linear_cache", ())):
        if isinstance(state, Tensor):
            states.add((number, "linear", 0), state)
    return states


_METHODS = [name for name in vars(StateView) if name.startswith(("get_", "set_", "update_"))]


def modules_that_ask(network: Any, cache: Any, inputs: dict[str, Any], methods: Sequence[str]) -> dict[nn.Module, str]:
    """The modules that call such methods of a cache in a pass, and the parameter by which their `forward` gets it."""
    running: list[nn.Module] = []
    found: dict[nn.Module, str] = {}
    parameters: dict[nn.Module, str] = {}

    def enter(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        running.append(module)
        given = inspect.signature(module.forward).bind_partial(*args, **kwargs).arguments
        for name, value in given.items():
            if value is cache:
                parameters[module] = name

    def leave(module: nn.Module, args: Any, output: Any) -> None:
        running.pop()

    def noting(method: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            found[running[-1]] = parameters[running[-1]]
            return method(*args, **kwargs)

        return call

    handles = []
    for module in network.modules():
        handles += [module.register_forward_pre_hook(enter, with_kwargs=True), module.register_forward_hook(leave)]
    for method in methods:
        if hasattr(cache, method):
            setattr(cache, method, noting(getattr(cache, method)))
    try:
        network(**inputs)
    finally:
        for handle in handles:
            handle.remove()
    return found


Forward = Callable[..., Any]

Run = Callable[[Any, Forward, dict[str, Any], int], Any]
"""Runs a module in a pass, given that, the module's own `forward`, its arguments, and the number of tokens."""


def replace_forward(module: Any, current: Callable[[], Any], run: Run) -> None:
    """Gives a module another `forward` for passes that `current` gives; elsewhere it computes as before."""
    original: Callable[..., Any] = module.forward
    signature = inspect.signature(original)
    extra = next((each.name for each in signature.parameters.values() if each.kind is each.VAR_KEYWORD), "")

    def forward(*args: Any, **kwargs: Any) -> Any:
        step = current()
        if step is None:
            return original(*args, **kwargs)
        given = dict(signature.bind_partial(*args, **kwargs).arguments)
        given |= given.pop(extra, {})
        return run(step, original, given, next(one.shape[1] for one in given.values() if isinstance(one, Tensor)))

    module.cbatch_forward, module.forward = original, forward


def _serve(module: Any, parameter: str) -> None:
    """Makes a module run the pieces of a step by themselves.  parameter: its `forward` takes the cache by that name"""

    def run(step: RecurrentStep, original: Callable[..., Any], given: dict[str, Any], tokens: int) -> Any:
        results = []
        for piece in step.pieces:
            view = StateView(step.states, step.tensors, piece)
            part = {name: taken(value, piece.rows, tokens, piece.is_decode) for name, value in given.items()}
            results.append((piece, original(**part | {parameter: view})))
            view.keep()
        return _joined(results, tokens)

    if not hasattr(module, "cbatch_forward"):
        replace_forward(module, _current.get, run)


def taken(value: Any, rows: slice | Tensor, tokens: int, is_decode: bool = False) -> Any:
    """Some rows of an argument [1, tokens, ...]: [1, n, ...], or [n, 1, ...] of n sequences that decode."""
    if isinstance(value, Tensor) and value.ndim > 1 and value.shape[:2] == (1, tokens):
        return value[:, rows].transpose(0, 1) if is_decode else value[:, rows]
    if isinstance(value, tuple | list):
        return type(value)(taken(one, rows, tokens, is_decode) for one in value)
    return value


def _joined(results: list[tuple[Piece, Any]], tokens: int) -> Any:
    """A module's output for the ragged row [1, tokens, ...], made of those for the pieces; else None."""
    first = results[0][1]
    if isinstance(first, tuple):
        return tuple(_joined([(piece, given[at]) for piece, given in results], tokens) for at in range(len(first)))
    if not isinstance(first, Tensor):
        return first
    whole: Tensor | None = None
    for piece, given in results:
        rows = given.transpose(0, 1) if piece.is_decode else given
        if rows.ndim < 2 or rows.shape[0] != 1:
            return None
        if whole is None:
            whole = rows.new_empty(1, tokens, *rows.shape[2:])
        if rows[0].shape != whole[0, piece.rows].shape:
            return None
        whole[:, piece.rows] = rows
    return whole
