"""Other ways to do the same work with the same weights in memory: what transformers itself offers."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

import torch

from cbatch.cli.bench.recorder import RecordedRequest, RunRecord
from cbatch.cli.bench.workload import Workload

if TYPE_CHECKING:
    from cbatch.engine import LoadedModel

PAGE_SIZE = 256
"""Tokens in a page of transformers' own paged cache, which is what it takes where nothing is said."""

WARM_ROWS, WARM_TOKENS = 2, 8

Timed = tuple[list[list[int]], float]
"""The output tokens of each row, and the seconds that they took."""


@dataclass(frozen=True, slots=True)
class PeerResult:
    """What became of one peer: seconds and the tokens of each row, or why there are none.

    attention: what transformers calls the one that was used
    trouble:   a sentence where the peer did not get through; empty where it did
    """

    elapsed_s: float = 0.0
    outputs: tuple[tuple[int, ...], ...] = ()
    attention: str = ""
    error: str = ""

    @property
    def output_tokens(self) -> int:
        return sum(map(len, self.outputs))

    def record(self, slots: int) -> RunRecord:
        """As far as it is known here, what our own runs leave behind: no steps, and no times of tokens."""
        rows = [RecordedRequest(len(tokens), list(tokens)) for tokens in self.outputs]
        return RunRecord(slots, rows, elapsed_s=self.elapsed_s)


@dataclass(frozen=True, slots=True)
class PeerSetup:
    """What peers get: a network of transformers in memory, the rows, and the sizes that ours had.

    slots:            most rows at once
    max_batch_tokens: most tokens in a step, where a peer knows steps
    clock:            seconds
    """

    network: Any
    work: Workload
    slots: int
    max_batch_tokens: int
    clock: Callable[[], float] = time.perf_counter

    @property
    def warm_lengths(self) -> list[int]:
        """Output tokens of the first rows in the short run before the one that counts; they fit the context."""
        return [min(length, WARM_TOKENS) for length in self.work.lengths[:WARM_ROWS]]

    def now(self) -> float:
        """The clock, when the device has done what it was given."""
        if self.network.device.type == "cuda":
            torch.cuda.synchronize(self.network.device)
        return self.clock()


def generate_static(setup: PeerSetup) -> Timed:
    """`generate` on batches of `slots` rows in order, padded on the left; each goes on until its longest row has all.

    Rows are cut to their length afterwards.
    """
    work, network = setup.work, setup.network
    _set_attention(network, "sdpa", "eager")
    warm = setup.warm_lengths
    _generate_batch(network, work.prompts[: len(warm)], min(warm))
    outputs: list[list[int]] = []
    start = setup.now()
    for batch in work.batches(setup.slots):
        longest = max(work.lengths[row] for row in batch)
        tokens = _generate_batch(network, [work.prompts[row] for row in batch], longest)
        outputs += [row_tokens[: work.lengths[row]] for row, row_tokens in zip(batch, tokens, strict=True)]
    return outputs, setup.now() - start


def _generate_batch(network: Any, prompts: list[list[int]], length: int) -> list[list[int]]:
    """`length` tokens for each of some prompts, greedily, past any end token."""
    width = max(map(len, prompts))
    ids = torch.zeros(len(prompts), width, dtype=torch.long)
    mask = torch.zeros_like(ids)
    for row, prompt in enumerate(prompts):
        ids[row, width - len(prompt) :] = torch.tensor(prompt)
        mask[row, width - len(prompt) :] = 1
    full = network.generate(
        ids.to(network.device),
        attention_mask=mask.to(network.device),
        generation_config=_greedy(max_new_tokens=length, pad_token_id=0),  # no end token: no row ends early
    )
    tokens: list[list[int]] = full[:, width:].tolist()
    return tokens


def generate_continuous(setup: PeerSetup, attention: str = "") -> Timed:
    """transformers' own continuous batching, with at most as many rows and tokens in a step as ours.

    attention: by its name in transformers; its sdpa where none is named

    Its cache is large enough for all slots, and as in our runs no prefix is shared.
    """
    from transformers import ContinuousBatchingConfig

    work, network = setup.work, setup.network
    _set_attention(network, attention or _paged_sdpa(), "paged|eager")
    longest = max(len(prompt) + length for prompt, length in zip(work.prompts, work.lengths, strict=True))
    known = {field.name for field in fields(ContinuousBatchingConfig)}
    sizes = {
        "page_size" if "page_size" in known else "block_size": PAGE_SIZE,
        "num_blocks": setup.slots * (-(-longest // PAGE_SIZE) + 1),
        "max_batch_tokens": setup.max_batch_tokens,
        "max_requests_per_batch": setup.slots,
        "safety_margin": 0.0,
        "allow_block_sharing": False,
        "auto_switch_to_flash": False,
    }
    config = ContinuousBatchingConfig(**{name: value for name, value in sizes.items() if name in known})
    with network.continuous_batching_context_manager(
        generation_config=_greedy(eos_token_id=-1), continuous_batching_config=config
    ) as manager:
        try:
            warm = setup.warm_lengths
            _drain(manager, work.prompts[: len(warm)], warm)
            start = setup.now()
            outputs = _drain(manager, work.prompts, work.lengths)
            return outputs, setup.now() - start
        except BaseException:
            manager.stop(hard_stop=True)  # else the manager would generate what is left before it ends
            raise


def _drain(manager: Any, prompts: list[list[int]], lengths: list[int]) -> list[list[int]]:
    """Submits all rows and waits for all outputs."""
    rows = {
        manager.add_request(prompt, max_new_tokens=length): row
        for row, (prompt, length) in enumerate(zip(prompts, lengths, strict=True))
    }
    outputs: list[list[int]] = [[] for _ in rows]
    while rows:
        result = manager.get_result(timeout=1)
        if result is None:
            if not manager.is_running():
                raise RuntimeError("its thread ended early")
        elif result.error is not None:
            raise RuntimeError(result.error)
        elif result.is_finished():
            outputs[rows.pop(result.request_id)] = list(result.generated_tokens)
    return outputs


def _paged_sdpa() -> str:
    """What this version of transformers calls its sdpa attention over pages; in older ones it has a name of its own."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    return "paged|sdpa" if "paged|sdpa" in ALL_ATTENTION_FUNCTIONS.valid_keys() else "sdpa"


def _set_attention(network: Any, name: str, otherwise: str) -> None:
    """Some families have none but `eager`."""
    try:
        network.set_attn_implementation(name)
    except ValueError:
        network.set_attn_implementation(otherwise)


def _greedy(**options: Any) -> Any:
    from transformers import GenerationConfig

    return GenerationConfig(do_sample=False, **options)


PEERS: dict[str, Callable[[PeerSetup], Timed]] = {
    "transformers-generate": generate_static,
    "transformers-cb": generate_continuous,
}


def run_peer(
    name: str,
    loaded: LoadedModel,
    work: Workload,
    slots: int,
    max_batch_tokens: int,
    clock: Callable[[], float] = time.perf_counter,
) -> PeerResult:
    """Does the work with one of PEERS, after a short run that warms it up; the network is afterwards as it was.

    Whatever goes wrong is in `error`, and raises nothing. No engine may run on the network meanwhile.
    """
    network = loaded.network
    try:
        with _borrowed(network):
            outputs, elapsed = PEERS[name](PeerSetup(network, work, slots, max_batch_tokens, clock))
            attention = network.config._attn_implementation
    except Exception as error:  # a peer that does not work here is a line of the table, not the end of it
        return PeerResult(error=f"not available here: {_first_sentence(error)}")
    lengths = [len(tokens) for tokens in outputs]
    if lengths != work.lengths:
        row, got, wanted = next(
            (row, *pair) for row, pair in enumerate(zip(lengths, work.lengths, strict=True)) if pair[0] != pair[1]
        )
        return PeerResult(error=f"not comparable: row {row} got {got} tokens and wanted {wanted}.")
    return PeerResult(elapsed, tuple(map(tuple, outputs)), attention)


def _first_sentence(error: Exception) -> str:
    line = next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
    return line.partition(". ")[0].rstrip(".") + "."


@contextmanager
def _borrowed(network: Any) -> Iterator[None]:
    """Puts back a network's attention and its own sampling defaults, which would be mixed into what peers ask for.

    What they log is not for people in front of this program; their errors still come.
    """
    from transformers import GenerationConfig

    attention, defaults = network.config._attn_implementation, network.generation_config
    logger = logging.getLogger("ContinuousBatchingLogger")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    network.generation_config = GenerationConfig()
    try:
        yield
    finally:
        logger.setLevel(level)
        network.generation_config = defaults
        network.set_attn_implementation(attention)
