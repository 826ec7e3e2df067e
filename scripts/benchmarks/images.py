"""Rows with images, beside transformers' generate for one row after the other: of other pictures, and of one picture.

    python -m scripts.benchmarks images --model FOLDER --rows 64 --tokens 32

Each round draws new pictures, so that nothing is cached, and takes both ways by turns in float32; of transformers' rows
only some are run, since each takes as long as the next. Loading is not counted; processing, vision tower and text are.
"""

from __future__ import annotations

import argparse
import io
import time
from collections.abc import Callable
from statistics import median
from typing import Any

import numpy as np
import torch

from cbatch import Engine, SamplingParams
from cbatch.model.hf.vision import processor_class
from scripts.benchmarks.harness import Report, at_least_one


class Rows:
    """Conversations about drawn pictures, and the two ways to answer them.

    shared: all ask about the same picture
    """

    def __init__(self, count: int, size: int, seed: int, *, shared: bool) -> None:
        from PIL import Image

        draw, names = np.random.default_rng(seed), ("red", "large", "old", "far")
        self.pictures, self.files = [], []
        for number in range(1 if shared else count):
            coarse = draw.integers(0, 256, (8, 8, 3), np.uint8)
            self.pictures.append(Image.fromarray(coarse).resize((size, size)))
            self.files.append(io.BytesIO())
            self.pictures[number].save(self.files[number], "PNG")
        self.questions = [f"Question {number}: which part is {names[number % 4]}?" for number in range(count)]

    def picture(self, row: int) -> int:
        return row % len(self.pictures)

    def by_engine(self, engine: Engine, params: SamplingParams) -> float:
        """Seconds of a row, of all at once."""
        rows = [
            {
                "messages": [
                    {"role": "user", "content": [{"type": "image", "image": file}, {"type": "text", "text": text}]}
                ]
            }
            for text, file in (
                (text, self.files[self.picture(row)].getvalue()) for row, text in enumerate(self.questions)
            )
        ]
        begun = time.perf_counter()
        answers = engine.generate(rows, params)
        elapsed = time.perf_counter() - begun
        assert all(one.error is None and one.usage.completion_tokens == params.max_tokens for one in answers), answers
        return elapsed / len(rows)

    def by_transformers(self, network: Any, processor: Any, tokens: int, most: int) -> float:
        """Seconds of a row, of the first `most`, one after the other."""
        begun = time.perf_counter()
        for row, text in enumerate(self.questions[:most]):
            content = [{"type": "image"}, {"type": "text", "text": text}]
            prompt = processor.apply_chat_template([{"role": "user", "content": content}], add_generation_prompt=True)
            given = processor(text=[prompt], images=[self.pictures[self.picture(row)]], return_tensors="pt")
            network.generate(**given, max_new_tokens=tokens, min_new_tokens=tokens, do_sample=False)
        return (time.perf_counter() - begun) / min(most, len(self.questions))


def add_options(parser: argparse.ArgumentParser) -> None:
    model = "HuggingFaceTB/SmolVLM-256M-Instruct"
    parser.add_argument("--model", default=model, help=f"folder or hub id of a model that takes images ({model})")
    parser.add_argument("--rows", type=at_least_one, default=64)
    parser.add_argument("--tokens", type=at_least_one, default=32, help="of each answer")
    parser.add_argument("--size", type=at_least_one, default=512, help="pixels of a picture's sides")
    parser.add_argument("--rounds", type=at_least_one, default=3)
    parser.add_argument("--one-by-one", type=at_least_one, default=8, help="rows that transformers answers in a round")


@torch.inference_mode()
def run(options: argparse.Namespace, report: Report) -> int:
    from transformers import AutoModelForImageTextToText

    network = AutoModelForImageTextToText.from_pretrained(options.model, dtype=torch.float32).eval()
    processor = processor_class(network.config.model_type).from_pretrained(options.model)
    params = SamplingParams(max_tokens=options.tokens, min_tokens=options.tokens, temperature=0.0)
    figures: dict[str, Any] = {}
    with Engine(options.model, dtype="float32", device="cpu", max_seqs=options.rows) as engine:
        ways: dict[str, Callable[[Rows], float]] = {
            "cbatch": lambda rows: rows.by_engine(engine, params),
            "transformers": lambda rows: rows.by_transformers(network, processor, options.tokens, options.one_by_one),
        }
        ways["cbatch"](Rows(2, options.size, 0, shared=False))  # loads the tower
        for shared in (False, True):
            seconds: dict[str, list[float]] = {name: [] for name in ways}
            for number in range(options.rounds):
                rows = Rows(options.rows, options.size, 1 + 2 * number + shared, shared=shared)
                for name in list(ways)[:: 1 if number % 2 == 0 else -1]:
                    seconds[name].append(ways[name](rows))
            ratio = median(b / a for a, b in zip(seconds["cbatch"], seconds["transformers"], strict=True))
            what = "one picture" if shared else "a picture each"
            times = ", ".join(f"{name} {median(one):.2f} s a row" for name, one in seconds.items())
            report.line(f"{options.rows} questions on {what}: {times}; {ratio:.1f} times")
            figures[what] = {"seconds": seconds, "ratio": ratio}
    report.figures |= figures
    return 0
