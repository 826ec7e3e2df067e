"""What transformers itself offers: `generate` on one request or on padded batches, and its continuous batching."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from scripts.benchmarks.peers.work import Peer, PeerJob, PeerResult, PeerWork, Session

STATIC_ROWS = 8
PAGE_SIZE = 256
"""Tokens in a page of its cache: its own default."""


def load_network(job: PeerJob) -> Any:
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(job.threads)
    network = AutoModelForCausalLM.from_pretrained(job.model, dtype=getattr(torch, job.dtype))
    return network.eval().requires_grad_(False)


def greedy(**options: Any) -> Any:
    from transformers import GenerationConfig

    return GenerationConfig(do_sample=False, pad_token_id=0, **options)


@contextmanager
def batches(job: PeerJob, rows: int) -> Iterator[Callable[[PeerWork], PeerResult]]:
    """`generate` on so many requests at once, in order. Each batch goes on until its longest output is done."""
    network = load_network(job)

    def generate(work: PeerWork) -> PeerResult:
        outputs: list[list[int]] = []
        steps = 0
        for first in range(0, len(work.prompts), rows):
            lengths = work.lengths[first : first + rows]
            tokens = generate_batch(network, work.prompts[first : first + rows], max(lengths))
            outputs += [row[:length] for row, length in zip(tokens, lengths, strict=True)]
            steps += max(lengths)
        return PeerResult(outputs, steps)

    yield generate


def generate_batch(network: Any, prompts: list[list[int]], length: int) -> list[list[int]]:
    """`length` tokens for each prompt; prompts are padded on the left, and what is padded is masked."""
    import torch

    width = max(map(len, prompts))
    ids = torch.zeros(len(prompts), width, dtype=torch.long)
    mask = torch.zeros_like(ids)
    for row, prompt in enumerate(prompts):
        ids[row, width - len(prompt) :] = torch.tensor(prompt)
        mask[row, width - len(prompt) :] = 1
    full = network.generate(ids, attention_mask=mask, generation_config=greedy(max_new_tokens=length))
    tokens: list[list[int]] = full[:, width:].tolist()
    return tokens


@contextmanager
def continuous(job: PeerJob) -> Iterator[Callable[[PeerWork], PeerResult]]:
    """Its own continuous batching, with a cache for all requests that may run at once."""
    from transformers import ContinuousBatchingConfig
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    network = load_network(job)
    kernel = "sdpa" if network._supports_sdpa else "eager"
    network.set_attn_implementation(
        f"paged|{kernel}" if f"paged|{kernel}" in ALL_ATTENTION_FUNCTIONS.valid_keys() else kernel
    )
    config = ContinuousBatchingConfig(
        page_size=PAGE_SIZE,
        num_blocks=job.max_seqs * (-(-max(job.work.totals) // PAGE_SIZE) + 1),
        max_batch_tokens=job.max_batch_tokens,
        max_requests_per_batch=job.max_seqs,
        allow_block_sharing=False,
    )
    with network.continuous_batching_context_manager(
        generation_config=greedy(eos_token_id=-1),
        continuous_batching_config=config,
        timeout=10,  # else it would do all that is left when something goes wrong
    ) as manager:
        yield lambda work: PeerResult(drain(manager, work), None)


def drain(manager: Any, work: PeerWork) -> list[list[int]]:
    """Adds all requests, and waits for all outputs."""
    rows = {
        manager.add_request(prompt, max_new_tokens=length): row
        for row, (prompt, length) in enumerate(zip(work.prompts, work.lengths, strict=True))
    }
    outputs: list[list[int]] = [[] for _ in rows]
    while rows:
        result = manager.get_result(timeout=1)
        if result is None:
            if not manager.is_running():
                raise RuntimeError("continuous batching ended before all requests had their output.")
        elif result.error is not None:
            raise RuntimeError(result.error)
        elif result.is_finished():
            outputs[rows.pop(result.request_id)] = list(result.generated_tokens)
    return outputs


def _peer(what: str, session: Callable[[PeerJob], Session]) -> Peer:
    return Peer(
        f"transformers, {what}", ("transformers", "torch"), "pip install torch transformers accelerate", session
    )


PEERS = {
    "transformers-one": _peer("one by one", partial(batches, rows=1)),
    "transformers-static": _peer(f"static batches of {STATIC_ROWS}", partial(batches, rows=STATIC_ROWS)),
    "transformers-cb": _peer("continuous batching", continuous),
}
