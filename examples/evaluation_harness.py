"""Evaluates a model on tasks of EleutherAI's harness, with its own prompts and measures. Needs `pip install lm_eval`.

python examples/evaluation_harness.py [MODEL TASK[,TASK...] [FOLDER_OF_TASKS]]

Without a task, it asks for a capital.
"""

import json
import sys
from typing import Any

from datasets import Dataset, DatasetDict
from lm_eval import simple_evaluate
from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.models.utils import normalize_gen_kwargs
from lm_eval.tasks import TaskManager
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from cbatch import Engine, TemplateOptions


class EngineLM(TemplateLM):  # type: ignore[misc]
    """A model of the harness that an engine computes: all requests of a task together."""

    def __init__(self, engine: Engine, max_length: int | None = None) -> None:
        """max_length: most tokens before a scored one"""
        super().__init__()
        if engine.tokenizer is None or engine.tokenizer.first_id is None:
            raise ValueError("The harness needs a tokenizer that has a token to begin or to end a text.")
        self.engine, self.tokenizer = engine, engine.tokenizer
        self.max_length = max_length or engine.limits.max_model_len
        self.first_id = engine.tokenizer.first_id

    @property
    def tokenizer_name(self) -> str:
        return self.engine.loaded.name

    @property
    def eot_token_id(self) -> int:
        return self.first_id  # for the harness it comes before a text without a context

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
        ids = self.engine.tokenize(string)  # with BOS if the tokenizer adds it, and never twice
        if add_special_tokens is False:
            before = self.engine.tokenize("")
            if before and not string.startswith(self.engine.detokenize(before)):
                return ids[len(before) :]
        return ids

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        template = TemplateOptions(continue_final_message=not add_generation_prompt)
        return self.engine.detokenize(self.engine.encode({"messages": chat_history}, template=template))

    def _loglikelihood_tokens(self, requests: list[Any], **_: Any) -> list[tuple[float, bool]]:
        groups = dict[tuple[int, ...], list[tuple[int, list[int]]]]()  # what answers share is computed once
        for number, (_, context, answer) in enumerate(requests):
            both = (context + answer)[-self.max_length - 1 :]
            groups.setdefault(tuple(both[: -len(answer)]), []).append((number, answer))
        found: dict[int, tuple[float, bool]] = {}
        scores = self.engine.score(list(groups), [[answer for _, answer in group] for group in groups.values()])
        for group, of_group in zip(groups.values(), scores, strict=True):
            for (number, _answer), score in zip(group, of_group, strict=True):
                if score.error is not None:
                    raise score.error
                found[number] = score.logprob, score.is_greedy
        return [found[number] for number in range(len(requests))]

    def loglikelihood_rolling(self, requests: list[Instance], **_: Any) -> list[float]:
        texts = [self.tok_encode(request.args[0]) for request in requests]
        groups = [
            list(map(make_disjoint_window, get_rolling_token_windows(ids, self.prefix_token_id, self.max_length, 1)))
            for ids in texts
        ]
        found = iter(self._loglikelihood_tokens([("", *window) for group in groups for window in group]))
        return [sum(next(found)[0] for _ in group) for group in groups]

    def generate_until(self, requests: list[Instance], **_: Any) -> list[str]:
        asked = [dict(normalize_gen_kwargs(request.args[1])) for request in requests]
        prompts, params = [], []
        for request, options in zip(requests, asked, strict=True):
            options["stop"], options["max_tokens"] = options.pop("until"), options.pop("max_gen_toks")
            if not options.pop("do_sample"):
                options["temperature"] = 0.0
            prompts.append(self.tok_encode(request.args[0])[options["max_tokens"] - self.max_length :])
            params.append(options)
        return [done.text for done in self.engine.generate(prompts, params).raise_for_errors()]


def capitals(**_: Any) -> DatasetDict:
    """Documents of the task below."""
    return DatasetDict(test=Dataset.from_list([{"question": "What is the capital of France?", "answer": "Paris"}]))


CAPITALS = {
    "task": "capitals",
    "custom_dataset": capitals,
    "test_split": "test",
    "output_type": "generate_until",
    "doc_to_text": "{{question}}",
    "doc_to_target": "{{answer}}",
    "generation_kwargs": {"max_gen_toks": 10},
    "metric_list": [{"metric": "exact_match"}],
}

if __name__ == "__main__":
    model, tasks, *folders = [*sys.argv[1:], None, None][: max(len(sys.argv) - 1, 2)]
    with Engine(model) as shared_engine:
        results = simple_evaluate(
            EngineLM(shared_engine),
            tasks=tasks.split(",") if tasks else [CAPITALS],
            task_manager=TaskManager(include_path=folders[0] if folders else None),
            apply_chat_template=not tasks,
            log_samples=True,
        )
    for name, figures in results["results"].items():
        print(name, json.dumps(figures, default=str))
        print("for example:", results["samples"][name][0]["resps"])
