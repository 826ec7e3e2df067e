"""Whole runs: all requests at once through the engine, and through transformers' own continuous batching."""

from __future__ import annotations

import gc
import random
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from importlib.util import find_spec

import torch

from cbatch.api import Engine
from cbatch.base.config import EngineConfig
from cbatch.base.params import SamplingParams
from cbatch.cli.bench.peers import PEERS, PeerError, PeerSetup, continuous, run_peer
from cbatch.cli.bench.roofline import DeviceRates, ModelCost, roofline_bound
from cbatch.cli.bench.workload import LengthDistribution, Workload, synthetic_workload
from cbatch.model.loader import LoadedModel
from cbatch.runtime.transfer import synchronize


@dataclass(frozen=True, slots=True)
class Run:
    """A whole run: output tokens per second, and its share of the speed that the floor allows; 0 if there is no floor.

    shape, requests, by: the model, how many requests, and what ran them, for whoever reads the JSON
    """

    what: str
    shape: str
    requests: int
    by: str
    tokens_per_s: float = 0.0
    share: float = 0.0
    error: str = ""

    def __str__(self) -> str:
        if self.error:
            return f"{self.what}: {self.error}"
        share = f", {self.share:.0%} of the floor" if self.share else ""
        return f"{self.what}: {self.tokens_per_s:,.0f} output tokens/s{share}"


def work_of(requests: int, low: int, high: int, vocabulary: int, context: int) -> Workload:
    lengths = LengthDistribution(low, high, "uniform")
    return synthetic_workload(requests, lengths, lengths, vocabulary, context, seed=0)


def yardstick() -> Workload:
    """The field's shared work: 256 requests with prompts and outputs of 100 to 1,024 tokens.

    Drawn as nano-vllm's benchmark does (https://github.com/GeeeekExplorer/nano-vllm/blob/main/bench.py), to the token.
    """
    chance = random.Random(0)
    prompts = [[chance.randint(0, 10000) for _ in range(chance.randint(100, 1024))] for _ in range(256)]
    return Workload(prompts, [chance.randint(100, 1024) for _ in range(256)], "nano-vllm's bench.py")


@dataclass(frozen=True)
class Setup:
    """A model, how it is run, and the rates of the device.

    temperature:   of all requests
    deterministic: as the option has it
    """

    shape: str
    loaded: LoadedModel
    max_seqs: int
    max_batch_tokens: int
    rates: DeviceRates
    temperature: float = 0.0
    deterministic: bool = False

    @property
    def device(self) -> torch.device:
        return self.loaded.fast_model.device if self.loaded.fast_model is not None else torch.device("cpu")

    def run(self, work: Workload, *, graphs: bool = True) -> Run:
        """All requests at once through the engine."""
        config = EngineConfig(
            device=str(self.device),
            max_seqs=self.max_seqs,
            max_batch_tokens=self.max_batch_tokens,
            prefix_cache=False,
            cuda_graphs=graphs,
            deterministic=self.deterministic,
        )
        settings = SamplingParams(temperature=self.temperature, ignore_eos=True)
        params = [replace(settings, max_tokens=length) for length in work.output_lengths]
        with Engine(config, loaded=self.loaded) as engine:
            engine.generate(work.prompts[:8], replace(settings, max_tokens=8))  # compiles the kernels
            synchronize(engine.device)
            start = time.perf_counter()
            outputs = engine.generate(work.prompts, params)
            elapsed = time.perf_counter() - start
            share = roofline_bound(work, ModelCost.of(engine), self.rates).reached(elapsed)
            stats = engine.stats()
        requests, tokens = len(work.prompts), sum(len(output.token_ids) for output in outputs)
        what = f"{self.shape}, {requests} requests, {'graphs' if graphs else 'no graphs'}"
        if self.temperature:
            what += f", temperature {self.temperature:g}"
        by = "cbatch" if graphs else "cbatch without graphs"
        if self.deterministic:
            what, by = f"{what}, deterministic", f"{by}, deterministic"
        if tokens != work.output_tokens:
            error = f"{tokens} tokens came out, and {work.output_tokens} were asked for"
            return Run(what, self.shape, requests, by, error=error)
        what += f", {stats.num_steps} steps in {elapsed:.1f} s"
        return Run(what, self.shape, requests, by, tokens / elapsed, share)

    def peers(self, work: Workload) -> Iterator[Run]:
        """The same requests by transformers' own continuous batching."""
        ways = ["transformers-cb"]
        if find_spec("flash_attn"):
            PEERS["with flash attention"] = partial(continuous, attention="paged|flash_attention_2")
            ways.append("with flash attention")
        requests = len(work.prompts)
        for way in ways:
            what = f"{self.shape}, {requests} requests, transformers' continuous batching"
            setup = PeerSetup(self.loaded.network, work, min(self.max_seqs, requests), self.max_batch_tokens)
            try:
                _, figures = run_peer(way, setup)
            except PeerError as error:
                yield Run(f"{what} ({way})", self.shape, requests, way, error=str(error))
            else:
                speed = figures["output_tokens_per_s"]
                yield Run(f"{what} ({figures['attention']})", self.shape, requests, way, speed)


def free(device: torch.device) -> None:
    """Gives memory that nobody holds any more back to the device."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def first_of(work: Workload, count: int) -> Workload:
    return Workload(work.prompts[:count], work.output_lengths[:count], work.source)


def runs(setup: Setup, work: Workload, peer_rows: int) -> Iterator[Run]:
    """All of the work; then its first requests, with and without graphs, and by transformers."""
    yield setup.run(work)
    if peer_rows:
        few = first_of(work, peer_rows)
        yield setup.run(few)
        yield setup.run(few, graphs=False)
        yield from setup.peers(few)


def yardstick_lines(setup: Setup, requests: int) -> Iterator[Run | str]:
    """The field's work at its temperature, and greedily, which nobody's figures are for.

    requests: how many of them, to try the script
    """
    whole = yardstick()
    yield f"{len(whole.prompts)} requests, {whole.prompt_tokens:,} prompt tokens, {whole.output_tokens:,} output tokens"
    work = first_of(whole, requests)
    if requests < len(whole.prompts):  # for a tiny model
        work = Workload([[token % 300 for token in prompt[:16]] for prompt in work.prompts], [8] * requests, "")
    for temperature in (0.6, 0.0):
        yield replace(setup, temperature=temperature).run(work)
