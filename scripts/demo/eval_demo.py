"""Scores the demo model on its held-out set with cbatch's own engine; prints a Markdown table."""

import argparse
import json
import sys
from collections import defaultdict
from pathlib import Path

from demo_data import Case, held_out, own_wording
from tqdm import tqdm

from cbatch import Completion, Engine, EngineConfig, SamplingParams

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
    """Exact for all but stories: those name the hero and the place, have a fair length and end by themselves."""
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


def main() -> None:
    """Score and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default=str(ROOT / "cbatch" / "demo"))
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--per-skill", type=int, default=120)
    parser.add_argument("--show-wrong", action="store_true", help="print the wrong answers to standard error")
    args = parser.parse_args()
    cases = held_out(args.per_skill) + own_wording() + prompt_cases(ROOT / "scripts" / "prompts.jsonl")
    engine = Engine(EngineConfig(model=args.model, dtype=args.dtype))
    scores: dict[str, list[bool]] = defaultdict(list)
    for case, output in zip(cases, complete(engine, cases), strict=True):
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
