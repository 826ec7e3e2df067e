"""Runs every causal architecture of the installed transformers in all scenarios, and writes docs/models.md.

python -m scripts.pictures.table_models [MODEL_TYPE ...]     with names it prints their lines and writes nothing
"""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path
from typing import Any

import torch
import transformers

from cbatch.engine.engine import Engine
from tests.support.architectures import CLASSES, NOT_BUILT_HERE
from tests.support.model_verdicts import EQUAL, NOT_BUILT, REFUSED, Verdict, judge, scenarios, table_row, unseen_faults

DOCUMENT = Path(__file__).parents[2] / "docs" / "models.md"
INTRODUCTION = """# Models

Which causal language models of `transformers` run here. Written by `python -m scripts.pictures.table_models` with
transformers {version}, torch {torch}: {counts}.

For each model type a tiny random model is built, in which every window, chunk and threshold is shorter than the
prompts, and whose weights are such that the first token of a prompt decides the output. The verdicts:

- **equal**: in float32 on a CPU its greedy output is that of `generate`, token for token: with whole prompts, in
  chunks of 7 tokens, preempted, with shared prefixes, and while other rows come and go.
  Faults planted in the engine (positions shifted by one, a block of a neighbour, a window one token too wide) are
  seen in every one of them.
- **refused**: loading it ends with this sentence. Nothing is served that may be wrong.
- **not built**: no tiny model of it could be made here.

Models of text and pictures or sound are run on text. Encoders (`bert` and its kin) are built as decoders; with
`is_decoder` false they are refused.

The test suite checks every line of this table, with one run that is all of these at once. Beyond the table, each model
that is loaded is checked with its own weights: what its attention layers store and see, a ragged batch in two chunks,
and a row beside another at the end of the context, each against the model's own forward.

Two settings shorten the context instead: a model with `longrope` runs up to `original_max_position_embeddings`, where
its encoding of all positions changes, and one with chunked attention up to the end of its first chunk.

| model type | class | verdict | reason |
|---|---|---|---|
"""


def scenarios_and_faults(network: Any, engine: Engine) -> list[str]:
    return scenarios(network, engine) + unseen_faults(network, engine)


def main() -> int:
    transformers.utils.logging.set_verbosity_error()
    torch.set_num_threads(1)
    verdicts: dict[str, Verdict] = {}
    for model_type in sys.argv[1:] or CLASSES:
        verdict = verdicts[model_type] = judge(model_type, scenarios_and_faults)
        if verdict.word == NOT_BUILT and model_type not in NOT_BUILT_HERE:
            verdict = verdicts[model_type] = Verdict("unknown", verdict.reason)
        print(f"{verdict.word:11} {model_type} {verdict.reason}", flush=True)
    if sys.argv[1:]:
        return 0
    counts = Counter(verdict.word for verdict in verdicts.values())
    faulty = counts.keys() - {EQUAL, REFUSED, NOT_BUILT}
    if faulty:
        print(f"Not written: some are {', '.join(sorted(faulty))}.", file=sys.stderr)
        return 1
    told = ", ".join(f"{counts[word]} {word}" for word in (EQUAL, REFUSED, NOT_BUILT))
    head = INTRODUCTION.format(version=transformers.__version__, torch=torch.__version__, counts=told)
    rows = "".join(table_row(model_type, verdict) + "\n" for model_type, verdict in sorted(verdicts.items()))
    DOCUMENT.write_text(head + rows, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
