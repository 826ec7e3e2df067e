"""`cbatch perplexity`: the command and its options."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from itertools import islice
from typing import TYPE_CHECKING, Any, Literal

import click

from cbatch.base.config import FLOAT_TYPES, EngineConfig
from cbatch.base.errors import ConfigError, RequestError, os_errors_as
from cbatch.base.option import option, options_of
from cbatch.base.units import format_count
from cbatch.cli.common.configured_command import ConfiguredCommand
from cbatch.cli.common.console import emit, notice, safe, show_progress
from cbatch.cli.common.loading import open_engine
from cbatch.cli.common.options import engine_config, engine_options, record_options

if TYPE_CHECKING:
    from cbatch.api import Engine

DEFAULT_CONTEXT = 512

MAIN = "context stride limit format against as_json model device dtype quantize activations kv_dtype".split()


@dataclass(frozen=True, slots=True)
class PerplexityOptions:
    context: int | None = option(None, "Tokens in a window.", metavar="N", low=4, shown="512, at most the model's")
    stride: int | None = option(
        None, "Begin a window every N tokens, and score what is new, as transformers does.", metavar="N", low=1
    )
    limit: int | None = option(None, "Score only the first N windows.", metavar="N", low=1)
    format: Literal["text", "jsonl"] | None = option(
        None, "Form of TEXT: one text, or rows, each for itself.", shown="jsonl if the name ends so, else text"
    )
    against: str | None = option(
        None, "Compare with the model in this dtype, unquantized, or another one in float32.", metavar="DTYPE|MODEL"
    )
    as_json: bool = option(False, "Print one JSON object instead of lines.", names=("--json",))
    quiet: bool = option(False, "Print nothing on stderr but errors.", names=("-q", "--quiet"))

    def engines(self, tested: EngineConfig) -> list[EngineConfig]:
        """The tested model and, with `against`, the base; then their caches hold one window."""
        if self.against is None:
            return [tested]
        if tested.kv_blocks is None and tested.kv_cache_memory is None:
            tested = replace(tested, kv_blocks=(self.context or DEFAULT_CONTEXT) // tested.block_size + 1)
        base = replace(tested, quantize=None, kv_dtype="auto", state_dtype="auto", dtype="float32")
        is_dtype = self.against in FLOAT_TYPES
        return [tested, replace(base, dtype=self.against) if is_dtype else replace(base, model=self.against)]


@click.command("perplexity", cls=ConfiguredCommand, main=MAIN)
@click.argument("text", default="-", metavar="[TEXT]")
@record_options(PerplexityOptions)
@engine_options()
def perplexity(text: str, **values: Any) -> Literal[0, 1]:
    """Measure how well a model predicts TEXT, a file of text or of rows (JSON Lines); - is stdin.

    The figures compare with those of llama.cpp, and with --stride with those of transformers. A row has "text" or
    "prompt" (plain text), "messages" or "prompt_token_ids". --against says how far quantized weights, another dtype or
    a KV cache of bytes change the model's probabilities.
    """
    options = PerplexityOptions(**{name: values[name] for name in options_of(PerplexityOptions)})
    quiet, configs = options.quiet, options.engines(engine_config(values))
    is_rows = (options.format or text.rpartition(".")[2]) in ("jsonl", "ndjson")
    with os_errors_as(ConfigError, f"Cannot read {text}"), click.open_file(text, "rb") as stream:
        data = stream.read()
    with ExitStack() as opened:
        tested, *bases = [opened.enter_context(open_engine(config, quiet=quiet)) for config in configs]
        import torch

        from cbatch.cli.perplexity.measure import Window, compare, figures, row_windows, score, text_windows

        most = min(engine.limits.max_model_len for engine in (tested, *bases))
        context = options.context or min(DEFAULT_CONTEXT, most)
        if not (options.stride or 1) <= context <= most:
            raise ConfigError(f"--context {context:,} is less than --stride, or more than the model's {most:,} tokens.")

        def windows_of(engine: Engine, errors: list[RequestError]) -> list[Window]:
            if is_rows:
                made = row_windows(engine, data, context, options.stride or context // 2, errors)
            else:
                made = text_windows(engine, data, context, options.stride)
            return list(islice(made, options.limit))

        errors: list[RequestError] = []
        windows = windows_of(tested, errors)
        if not windows:
            raise errors[0] if errors else ConfigError("The text is shorter than a window, or there are no rows.")
        if bases and windows != windows_of(bases[0], []):
            raise ConfigError("The models cannot be compared: their tokens of this text differ.")
        at_once = 1 if bases else max(4 * tested.limits.max_batch_tokens // context, 1)
        columns, start, tokens = list[torch.Tensor](), time.perf_counter(), sum(len(one.ids) for one in windows)
        state = lambda: (min(len(columns) * at_once, len(windows)), f"of {context:,} tokens")  # noqa: E731
        with show_progress(len(windows), state, quiet=quiet, unit="window") as tick:
            for at in range(0, len(windows), at_once):
                group = windows[at : at + at_once]
                columns.append(compare(tested, bases[0], group[0]) if bases else score(tested, group))
                tick()
        speed = {"against": _about(bases[0])} if bases else {"tokens_per_s": tokens / (time.perf_counter() - start)}
        counts = {"windows": len(windows), "tokens": tokens, "row_errors": len(errors)}
        shown = _about(tested) | {"context": context, "stride": options.stride, **figures(torch.cat(columns, 1))}
        shown |= counts | speed
    if errors:
        notice(f"{format_count(len(errors), 'row')} cannot be scored; the first: {errors[0]}.")
    emit(json.dumps(shown, ensure_ascii=False) if options.as_json else "\n".join(_lines(shown)))
    return 1 if errors else 0


def _about(engine: Engine) -> dict[str, Any]:
    return {
        "model": engine.loaded.name,
        "dtype": engine.core.fingerprint_parts["dtype"],
        "kv_dtype": str(engine.core.runner.kv_dtype).removeprefix("torch."),
        "bits_per_weight": 8 * engine.model.weight_bytes / engine.model.num_parameters,
    }


def _lines(shown: Mapping[str, Any]) -> Iterator[str]:
    """The figures by their names, with their standard errors."""
    for name, value in shown.items():
        if isinstance(value, Mapping):
            yield from _lines({f"{name} {key}": each for key, each in value.items()})
        elif value is not None and not name.endswith("_error"):
            error = shown.get(f"{name}_error")
            text = f"{value:.6g}" if isinstance(value, float) else safe(str(value))
            yield f"{name:<26} {text}{'' if error is None else f' ± {error:.2g}'}"
