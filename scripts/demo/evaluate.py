"""Scores the demo model on its held-out set with cbatch's own engine; prints a Markdown table."""

import argparse
import json
import math
import sys
from collections import defaultdict
from pathlib import Path

from tqdm import tqdm

from cbatch import Completion, Engine, EngineConfig, SamplingParams
from scripts.demo.data import Case, held_out, own_wording

ROOT = Path(__file__).parents[2]
BATCH = 128


def prompt_cases(path: Path) -> list[Case]:
    """The rows of a prompt file that say what they expect."""
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    return [
        Case(path.name, row.get("messages") or [{"role": "user", "content": row["prompt"]}], row["expected"])
        for row in rows
        if "expected" in row
    ]


def is_right(case: Case, output: Completion) -> bool:
    """Whether the answer is exact. A story is right if it names hero and place, is long enough and ends by itself."""
    if not case.words:
        return output.text == case.answer
    named = all(word in output.text for word in case.words)
    return named and output.finish_reason == "stop" and output.text.endswith((".", "!")) and len(output.token_ids) > 40


def complete(engine: Engine, cases: list[Case]) -> list[Completion]:
    """The model's answers, greedy."""
    outputs: list[Completion] = []
    for at in tqdm(range(0, len(cases), BATCH), unit="batch"):
        prompts = [{"messages": case.messages} for case in cases[at : at + BATCH]]
        outputs += engine.generate(prompts, SamplingParams(max_tokens=300))
    return outputs


def perplexity(model: str, dtype: str, quantize: str | None, activations: str, cases: list[Case]) -> float:
    """Perplexity of the right answers, by token, of the model in this dtype."""
    total, count = 0.0, 0
    with Engine(EngineConfig(model=model, dtype=dtype, quantize=quantize, activations=activations)) as engine:
        for at in range(0, len(cases), BATCH):
            prompts, lengths = [], []
            for case in cases[at : at + BATCH]:
                conversation = {"messages": case.messages}
                prompts.append(engine.encode(conversation, answer=case.answer))
                lengths.append(len(prompts[-1]) - len(engine.encode(conversation)))
            scored = engine.generate(prompts, SamplingParams(max_tokens=0, prompt_logprobs=0))
            for output, length in zip(scored, lengths, strict=True):
                if output.error is not None or output.prompt_logprobs is None:
                    raise output.error or ValueError("A prompt was not scored.")
                total += sum(one.logprob for one in output.prompt_logprobs[-length:] if one.logprob is not None)
                count += length
    return math.exp(-total / count)


def print_perplexities(model: str, cases: list[Case]) -> None:
    print("| computed in | perplexity of the right answers |\n| --- | ---: |")
    for title, dtype, quantize, activations in (
        ("float32", "float32", None, "int8"),
        ("bfloat16", "bfloat16", None, "int8"),
        ("int8 weights and activations", "bfloat16", "int8", "int8"),
        ("int8 weights, bf16 activations", "bfloat16", "int8", "bf16"),
        ("int4 weights, int8 activations", "bfloat16", "int4", "int8"),
        ("int4 weights, bf16 activations", "bfloat16", "int4", "bf16"),
    ):
        print(f"| {title} | {perplexity(model, dtype, quantize, activations, cases):.4f} |")


def main() -> None:
    """Scores the model, and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default=str(ROOT / "cbatch" / "demo"))
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--per-skill", type=int, default=120)
    parser.add_argument(
        "--perplexity",
        action="store_true",
        help="print the perplexity of the right answers in several dtypes, instead of the scores",
    )
    parser.add_argument("--show-wrong", action="store_true", help="print the wrong answers to standard error")
    args = parser.parse_args()
    cases = held_out(args.per_skill) + own_wording() + prompt_cases(ROOT / "scripts" / "prompts.jsonl")
    if args.perplexity:
        print_perplexities(args.model, [case for case in cases if not case.words])
        return
    with Engine(EngineConfig(model=args.model, dtype=args.dtype)) as engine:
        outputs = complete(engine, cases)
    scores: dict[str, list[bool]] = defaultdict(list)
    for case, output in zip(cases, outputs, strict=True):
        right = is_right(case, output)
        scores[case.skill].append(right)
        if args.show_wrong and not right:
            asked = " / ".join(message["content"] for message in case.messages)
            print(f"{case.skill}: {asked}\n    {output.text!r}, not {case.answer!r}", file=sys.stderr)
    print("| skill | cases | exact |\n| --- | ---: | ---: |")
    for skill, rights in scores.items():
        print(f"| {skill} | {len(rights)} | {sum(rights) / len(rights):.1%} |")


if __name__ == "__main__":
    main()
