"""Peers: transformers' own ways on the same weights give the same tokens, and leave the network as it was."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import pytest

from cbatch.api import Engine
from cbatch.base.params import SamplingParams
from cbatch.cli.bench.peers import PEERS, PeerError, PeerSetup, run_peer
from cbatch.cli.bench.workload import Workload
from tests.support.tiny_models import loaded, make_network, make_prompts

LENGTHS = [3, 9, 20, 1, 12]


def make_shared(network: Any) -> Engine:
    return Engine(loaded=loaded(network), device="cpu", block_size=4, kv_blocks=64, max_seqs=8)


@pytest.fixture
def engine() -> Iterator[Engine]:
    """An engine whose model has sampling defaults of its own: an end token and a penalty."""
    network = make_network("llama")
    network.generation_config.repetition_penalty = 1.8
    network.generation_config.eos_token_id = 7
    with make_shared(network) as made:
        yield made


@pytest.fixture
def work() -> Workload:
    return Workload(make_prompts([5, 17, 3, 30, 8]), LENGTHS, "drawn")


def our_outputs(engine: Engine, work: Workload) -> list[list[int]]:
    params = [SamplingParams(max_tokens=length, ignore_eos=True) for length in work.output_lengths]
    return [list(output.token_ids) for output in engine.generate(work.prompts, params)]


def setup_of(engine: Engine, work: Workload) -> PeerSetup:
    return PeerSetup(engine.loaded.network, work, slots=2, max_batch_tokens=16)


@pytest.mark.parametrize("name", PEERS)
def test_a_peer_gives_our_tokens(engine: Engine, work: Workload, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards the comparison: same requests, greedy, to the wanted length, whatever the model's own defaults are.

    After it, the network has our attention again, and the model's own settings.
    """
    network, ours = engine.loaded.network, our_outputs(engine, work)
    settings = network.generation_config
    assert any(7 in tokens[:-1] for tokens in ours), "nothing would be seen of the end token"
    seconds = iter((5.0, 6.0))
    monkeypatch.setattr(PeerSetup, "now", lambda setup: next(seconds))
    outputs, figures = run_peer(name, setup_of(engine, work))
    assert outputs == ours
    assert (figures["elapsed_s"], figures["output_tokens_per_s"]) == (1, sum(LENGTHS))
    assert figures["attention"] == "sdpa" or "paged" in figures["attention"]
    assert network.config._attn_implementation == "cbatch" and network.generation_config is settings
    assert our_outputs(engine, work) == ours


@pytest.mark.parametrize("error", [RuntimeError("No kernel for it. See there.\nmore"), KeyboardInterrupt()])
def test_a_peer_that_fails(
    engine: Engine, work: Workload, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    """Guards the bench against one peer's error, and the network against any end, Ctrl-C too."""

    def fail(setup: PeerSetup) -> Any:
        setup.network.set_attn_implementation("eager")
        raise error

    monkeypatch.setitem(PEERS, "failing", fail)
    with pytest.raises((PeerError, KeyboardInterrupt)) as raised:
        run_peer("failing", setup_of(engine, work))
    assert raised.value is error or str(raised.value) == "not available here: No kernel for it."
    assert engine.loaded.network.config._attn_implementation == "cbatch"


def test_a_failure_within_the_continuous_peer(engine: Engine, work: Workload, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against waiting forever on a thread of transformers that has died, and against one that keeps running."""
    network = engine.loaded.network
    forward, passes = network.forward, [0]

    def fail_later(*arguments: Any, **keywords: Any) -> Any:
        passes[0] += 1
        if passes[0] > 20:
            raise RuntimeError("the device is gone")
        return forward(*arguments, **keywords)

    monkeypatch.setattr(network, "forward", fail_later)
    with pytest.raises(PeerError, match=r"^not available here: the device is gone\.$"):
        run_peer("transformers-cb", setup_of(engine, work))
    monkeypatch.undo()
    assert network.config._attn_implementation == "cbatch"
    with make_shared(make_network("llama")) as fresh:
        assert our_outputs(engine, work) == our_outputs(fresh, work)


def test_a_model_without_sdpa(engine: Engine, work: Workload, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards families whose only attention is eager: they run, and the result names it."""
    monkeypatch.setattr(type(engine.loaded.network), "_supports_sdpa", False)
    outputs, figures = run_peer("transformers-cb", setup_of(engine, work))
    assert figures["attention"] == "paged|eager"
    assert outputs == our_outputs(engine, work)


def test_outputs_that_are_too_short(engine: Engine, work: Workload, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against a speed that was reached with less work."""
    monkeypatch.setitem(PEERS, "lazy", lambda setup: nullcontext(lambda work: [[1] * 3, *[[1]] * 4]))
    with pytest.raises(PeerError, match=r"^not comparable: request 1 got 1 tokens and wanted 9\.$"):
        run_peer("lazy", setup_of(engine, work))
