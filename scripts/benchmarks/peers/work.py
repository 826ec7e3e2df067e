"""Work for every system: a model of random weights, requests of random tokens, and the limits of a step.

Systems run in interpreters of their own, which may have little installed: nothing but Python is imported at the top.
"""

from __future__ import annotations

import json
import math
import random
import shutil
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from cbatch.cli.bench.workload import Workload

PROMPT_LENGTHS, OUTPUT_LENGTHS = (16, 512), (8, 256)
"""Tokens, log-uniform; the high end is not reached."""

FIRST_TOKEN = 10
"""The ids below stand for special tokens in most vocabularies."""

WARM_OUTPUT = 4


@dataclass(frozen=True)
class PeerWork:
    """Requests that are all there at the start: the token ids of each prompt, and the tokens of each output."""

    prompts: list[list[int]]
    lengths: list[int]

    @property
    def prompt_tokens(self) -> int:
        return sum(map(len, self.prompts))

    @property
    def output_tokens(self) -> int:
        return sum(self.lengths)

    @property
    def totals(self) -> list[int]:
        """Tokens of each request, prompt and output."""
        return [len(prompt) + length for prompt, length in zip(self.prompts, self.lengths, strict=True)]

    @property
    def distinct_prompts(self) -> list[list[int]]:
        """The prompts, each without what it has in common with the beginning of the first one."""
        first = self.prompts[0]

        def common(prompt: list[int]) -> int:
            pairs = zip(first, prompt[:-1], strict=False)
            return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))

        return [first, *(prompt[common(prompt) :] for prompt in self.prompts[1:])]

    @property
    def as_workload(self) -> Workload:
        """The same for `cbatch bench`."""
        from cbatch.cli.bench.workload import Workload

        return Workload(self.prompts, self.lengths, "")

    def warm_up(self) -> PeerWork:
        """As long prompts and the first tokens of each output, for what a system does only once: compile, touch memory.

        A virtual machine may take a second for each GiB that is touched for the first time.
        """
        return PeerWork(self._with_other_tokens(1), [min(length, WARM_OUTPUT) for length in self.lengths])

    def turn(self, number: int) -> PeerWork:
        """The work of a turn, from 1 to 31: the same lengths, with tokens that no other turn has in their places."""
        return PeerWork(self._with_other_tokens(2 * number), self.lengths)

    def _with_other_tokens(self, bits: int) -> list[list[int]]:
        """Every token differs, so that a prefix cache knows nothing of the work; prompts that begin alike still do.

        bits: below 64, which divides the sizes of vocabularies. A few tokens become special ones, which random weights
        and outputs of a fixed length know nothing of.
        """
        return [[token ^ bits for token in prompt] for prompt in self.prompts]


def make_work(requests: int, seed: int, vocabulary: int) -> PeerWork:
    """Prompts and outputs of mixed lengths: the same requests for the same seed, on any machine."""
    chance = random.Random(seed)

    def draw(ends: tuple[int, int]) -> int:
        return int(math.exp(chance.uniform(math.log(ends[0]), math.log(ends[1]))))

    prompts, lengths = [], []
    for _ in range(requests):
        size, length = draw(PROMPT_LENGTHS), draw(OUTPUT_LENGTHS)
        prompts.append([chance.randrange(FIRST_TOKEN, vocabulary) for _ in range(size)])
        lengths.append(length)
    return PeerWork(prompts, lengths)


def make_equal_work(
    requests: int, prompt: int, output: int, seed: int, vocabulary: int, *, common: int = 0
) -> PeerWork:  # fmt: skip
    """Requests of the same length, whose prompts begin with the same `common` tokens."""
    chance = random.Random(seed)
    beginning, *rests = (
        [chance.randrange(FIRST_TOKEN, vocabulary) for _ in range(size)]
        for size in (common, *[prompt - common] * requests)
    )
    return PeerWork([beginning + rest for rest in rests], [output] * requests)


@dataclass(frozen=True)
class PeerJob:
    """A job for a system.

    folder:  where the model is, and what systems make of it
    dtype:   bfloat16 or float32
    threads: how many a system may use
    max_seqs: most requests that run at once
    max_batch_tokens: most tokens in a step
    weights: int8 or int4 if the matrices are quantized, for llama.cpp also a mixture of its own, such as Q4_K_M; empty
             if they are of the dtype
    prefix_cache: whether prompts that begin alike may share what was computed, if a system can do that
    reads_gguf: whether cbatch reads the file that llama.cpp has made
    cache_tokens: for so many tokens there is room in a cache; 0: for those that the work needs
    """

    folder: str
    dtype: str
    threads: int
    max_seqs: int
    max_batch_tokens: int
    work: PeerWork
    weights: str = ""
    prefix_cache: bool = False
    reads_gguf: bool = False
    cache_tokens: int = 0

    @property
    def model(self) -> Path:
        """The folder in transformers' format, weights in bfloat16."""
        return Path(self.folder) / "model"

    @property
    def model_config(self) -> dict[str, Any]:
        config: dict[str, Any] = json.loads((self.model / "config.json").read_text())
        return config

    @property
    def most_tokens(self) -> int:
        """The most tokens that can be in a cache at once."""
        return sum(sorted(self.work.totals)[-self.max_seqs :])

    @property
    def needed_tokens(self) -> int:
        """Tokens that a cache should hold; half of what prompts share, which some systems compute repeatedly."""
        shared = self.work.prompt_tokens - sum(map(len, self.work.distinct_prompts))
        return self.most_tokens - (shared // 2 if self.prefix_cache else 0)

    @property
    def cache_gib(self) -> int:
        """Whole GiB for a cache, half as much again as all tokens need: blocks are not filled to the end."""
        config = self.model_config
        head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
        values: int = 2 * config["num_hidden_layers"] * config["num_key_value_heads"] * head_dim
        itemsize = 2 if self.dtype == "bfloat16" else 4
        return 1 + 3 * itemsize * values * (self.cache_tokens or self.needed_tokens) // 2 // 2**30

    def converted(self, name: str) -> Path:
        """Where a system keeps the model in a format of its own."""
        return Path(self.folder) / f"{name}-{self.weights or self.dtype}"

    @property
    def gguf(self) -> Path:
        """The file that llama.cpp reads."""
        return self.converted("llama.cpp").with_name(f"llama.cpp-{self.weights or self.dtype}.gguf")


def write_jobs(file: Path, jobs: Sequence[PeerJob]) -> None:
    file.write_text(json.dumps([asdict(job) for job in jobs]))


def read_jobs(file: Path) -> list[PeerJob]:
    return [PeerJob(**fields | {"work": PeerWork(**fields["work"])}) for fields in json.loads(file.read_text())]


class PeerResult(NamedTuple):
    """The output tokens of each request, and the number of steps if it is known."""

    outputs: list[list[int]]
    steps: int | None


Session = AbstractContextManager[Callable[[PeerWork], PeerResult]]
"""A system that is loaded for as long as the context lasts, ready to do work."""


@dataclass(frozen=True)
class Peer:
    """A system to compare.

    title:    what tables call it
    packages: what has to be importable, the system itself first
    install:  the command that installs them
    open:     loads it
    prepare:  makes, once, the model in its own format; raises ImportError if a package for that is missing
    """

    title: str
    packages: tuple[str, ...]
    install: str
    open: Callable[[PeerJob], Session]
    prepare: Callable[[PeerJob], None] = lambda job: None


def make_once(target: Path, make: Callable[[Path], None]) -> None:
    """Has a file or folder made unless it is there; one that was cut off half-way is made anew."""
    if target.exists():
        return
    part = target.with_name(target.name + ".part")
    if part.is_dir():
        shutil.rmtree(part)
    part.unlink(missing_ok=True)
    make(part)
    part.rename(target)


_LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "max_position_embeddings": 40960,
    "rope_parameters": {"rope_type": "default", "rope_theta": 100_000.0},
    "tie_word_embeddings": True,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}


def make_model(folder: Path, shape: dict[str, Any]) -> None:
    """Writes a model of that shape, a Llama if it names no type: random weights in bfloat16, no end token.

    What transformers would draw makes a model that says its last token again and again, whatever came before. Larger
    layers make every token of the context count, so that equal outputs mean something.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    torch.manual_seed(0)
    settings = _LLAMA | shape
    if settings["model_type"] != "llama":
        settings.pop("rope_parameters")
    network = AutoModelForCausalLM.from_config(AutoConfig.for_model(settings.pop("model_type"), **settings))
    with torch.no_grad():
        for name, parameter in network.named_parameters():
            if "proj" in name and parameter.dim() > 1 and "bias" not in name:
                parameter.normal_(std=parameter.shape[1] ** -0.5)
    network.to(torch.bfloat16).save_pretrained(folder)
