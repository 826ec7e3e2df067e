"""The options of `cbatch run`, as the command and `/run` under a chat read them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import date as Day
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any, Literal

from cbatch.base.chat_template_options import FIXED_DATE, TemplateOptions
from cbatch.base.config import EngineConfig
from cbatch.base.errors import ConfigError
from cbatch.base.option import option
from cbatch.base.params import SamplingParams
from cbatch.base.request import RequestDefaults
from cbatch.batch.answer_cache import DEFAULT_CACHE_SIZE, AnswerCache, CacheConfig
from cbatch.batch.forms import (
    INPUT_FORMS,
    OUTPUT_FORMS,
    TABLES,
    InputForm,
    OutputForm,
    begins_with_object,
    input_form,
    output_form,
    split_table,
    unit_of,
)
from cbatch.batch.lines import RowOptions
from cbatch.batch.token_journal import DEFAULT_INTERVAL_S, TokenJournalConfig, is_token_journal
from cbatch.cli.common.options import SamplingOptions, template_kwargs_option, tools_option
from cbatch.cli.common.replica_options import ReplicaOptions
from cbatch.extras import require_package
from cbatch.requests.columns import COLUMNS
from cbatch.requests.param_names import own_params
from cbatch.tools.tool import MAX_TOOL_ROUNDS, load_tools
from cbatch.validation.validation import CHECK_TIMEOUT_S, Validation

STREAMED = (None, "jsonl", "csv", "tsv")
"""Forms of outputs that are no files."""


def parse_day(text: str) -> Day:
    """A day as YYYY-MM-DD. Raises ValueError with a sentence."""
    try:
        return datetime.strptime(text, "%Y-%m-%d").date()
    except ValueError:
        raise ValueError(f"{text!r} does not match the format '%Y-%m-%d'.") from None


_input, _rows, _output, _resuming, _answers, _report = (
    partial(option, group=group)
    for group in ("Input", "Prompts and tools", "Output", "Resuming", "Validated and cached answers", "Reports")
)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOptions:
    input: str = "-"
    format: InputForm | None = _input(
        None,
        "Form of the input; text: one prompt per line.",
        choices=INPUT_FORMS,
        shown="by the ending of INPUT, else jsonl",
    )
    template: str | None = _input(
        None, "Make prompts of the rows' columns, such as 'Summarise: {text}', or by a file.", metavar="TEXT|@FILE"
    )
    constant_template: bool = _input(False, "Allow a --template without columns: the same prompt for every row.")
    media_root: str | None = _input(
        None, "Folder below which images of rows must lie.", metavar="DIR", is_file=True, shown="that of INPUT"
    )
    allow_remote_media: bool = _input(False, "Fetch images of rows from http: and https: URLs.")
    shard: str | None = _input(None, "Run only the K-th of N parts of the rows, such as 2/8.", metavar="K/N")
    check: bool = _input(False, "Only check the input: report bad rows, lengths and KV cache need as JSON.")
    estimate: bool = _input(False, "With --check: try rows for 10 s, and tell what a run would take.")

    output: str = _output(
        "-", "File to write; - is stdout.", names=("-o", "--output"), metavar="OUT", is_file=True, shown=""
    )
    overwrite: bool = _output(False, "Replace the output file if it is not empty.")
    output_format: OutputForm | None = _output(
        None, "Form of the output.", choices=OUTPUT_FORMS, shown="by the ending of OUT, else jsonl"
    )
    expand: bool | None = _output(
        None, "In a table, make the properties of JSON answers columns.", shown="on with a JSON schema"
    )
    order: Literal["input", "completion"] = _output("input", "Order of the output rows.")
    token_ids: bool = _output(False, "Add the output's token ids to each row.")
    echo_prompt: bool = _output(False, "Add the prompt as the model got it, after the chat template, to each row.")
    timings: bool = _output(False, "Add times and cached tokens to each row.")
    window: int | None = _output(None, "Most rows read but not yet written.", low=1, shown="16 x --max-seqs")
    max_errors: int | None = _output(None, "Stop at the Nth error row.", low=1, metavar="N")
    max_truncated: int | None = _output(None, "Stop at the Nth row that was cut off.", low=1, metavar="N")

    resume: bool = _resuming(False, "Continue where an earlier run with this output file ended.")
    retry_errors: bool = _resuming(False, "With --resume: run error rows again.")
    recompute_changed: bool = _resuming(False, "With --resume: run rows again whose input or options have changed.")
    continue_truncated: bool = _resuming(
        False, "With --resume and a larger --max-tokens: go on with answers that a lower limit has ended."
    )
    journal_tokens: bool = _resuming(
        False, "Keep the tokens of unfinished answers in OUT.tokens, so that --resume goes on in the middle of them."
    )
    journal_interval: float = _resuming(
        DEFAULT_INTERVAL_S, "With --journal-tokens: time between two writes.", low=0, above=True, metavar="SECONDS"
    )

    raw: bool = _rows(False, "Continue prompts as plain text, without the chat template.")
    score: bool = _rows(
        False, "Tell how likely the `completion`, each of the `choices`, or the text of a row is, and generate nothing."
    )
    embed: bool = _rows(False, "Embed the text of each row, and generate nothing.")
    date: Day | None = _rows(None, "Date given to the chat template.", metavar="YYYY-MM-DD", parse=parse_day)
    template_kwargs: dict[str, Any] = template_kwargs_option()
    tools: tuple[str, ...] = tools_option()
    max_tool_rounds: int = _rows(
        MAX_TOOL_ROUNDS,
        "Rounds of calls in a row, after which the model has to answer without tools.",
        low=1,
        metavar="N",
    )
    allow_unknown: bool = _rows(False, "Carry misspelt and unavailable parameters along instead of refusing their row.")

    validate: tuple[str, ...] = _answers(
        (),
        "What makes an answer good: json-schema=FILE (or the schema itself), regex=PATTERN, or command=WORDS, which "
        "get it on stdin and exit with 0 (repeatable).",
        metavar="CHECK",
    )
    tries: int = _answers(
        1, "Most answers for a row, with another seed each, until --validate finds one good.", low=1, metavar="N"
    )
    tell_error: bool = _answers(False, "With --tries: show the model its answer and what was wrong with it.")
    validate_timeout: float = _answers(
        CHECK_TIMEOUT_S, "Most time that a check of an answer may take.", low=0, above=True, metavar="SECONDS"
    )
    cache: str | None = _answers(
        None,
        "Keep answers in DIR, and take those that are there instead of computing them.",
        metavar="DIR",
        is_file=True,
    )
    cache_size: str = _answers(
        DEFAULT_CACHE_SIZE, "Most that the cache may take; what was used longest ago leaves first.", metavar="SIZE"
    )

    stats: str | None = _report(
        None, "Write statistics of this run as JSON, however it ends; - is stdout.", metavar="FILE", is_file=True
    )
    quiet: bool = _report(False, "Print only errors on stderr.", names=("-q", "--quiet"))
    verbose: bool = _report(False, "Print more about the engine, and each error row.", names=("-v", "--verbose"))

    sampling: SamplingOptions = field(default_factory=SamplingOptions)
    engine: EngineConfig = field(default_factory=EngineConfig)
    replicas: ReplicaOptions = field(default_factory=ReplicaOptions)

    @property
    def input_form(self) -> InputForm:
        """The form by --format or, without it, by the ending of the input's name, and of `.txt` by the first line."""
        form = input_form(self.input)
        return self.format or ("jsonl" if form == "text" and begins_with_object(Path(self.input)) else form)

    @property
    def output_form(self) -> OutputForm:
        """The form by --output-format or, without it, by the ending of the output's name."""
        return self.output_format or output_form(self.output)

    @property
    def _media_root(self) -> Path:
        """The folder of images: without --media-root that of the input, and without a file the working folder."""
        path = Path(split_table(self.input)[0])
        return Path(self.media_root) if self.media_root is not None else path.parent if path.is_file() else Path()

    @property
    def expanded(self) -> Sequence[str] | None:
        """The properties of answers that become columns; see `TableLayout`."""
        form = SamplingParams().merged(own_params(self.sampling.params)[0]).constraint
        schema = json.loads(form.source) if form is not None and form.kind == "json_schema" else None
        names = list(schema.get("properties", ())) if isinstance(schema, dict) else []
        return names if self.expand or (self.expand is None and names) else None

    def check_usage(self) -> None:
        """Raises ConfigError for options that would make every row an error row."""
        self.sampling.check()
        self.replicas.check(self.engine)
        load_tools(self.tools)  # before a model is loaded for them
        self._validation()
        if not self._media_root.is_dir():
            raise ConfigError(f"--media-root {self.media_root}: there is no such folder.")
        if self.allow_remote_media:
            require_package("fsspec")
        if (cache := self._cache()) is not None:
            if self.replicas.ray is not None:
                raise ConfigError("--cache is a folder of this machine, and --ray computes on others.")
            AnswerCache(cache).close()
        if self.estimate and not self.check:
            raise ConfigError("--estimate needs --check, of which it is a part.")
        if self.estimate and self.replicas.are_given:
            raise ConfigError("--estimate tries rows on one engine; leave out --replicas and --ray.")
        for name in ("retry_errors", "recompute_changed", "continue_truncated"):
            if getattr(self, name) and not self.resume:
                raise ConfigError(f"--{name.replace('_', '-')} needs --resume.")
        if self.resume and self.overwrite:
            raise ConfigError("--resume keeps the rows of the output file, --overwrite drops them; give one of them.")
        if self.continue_truncated and self.param("max_tokens") is None:
            raise ConfigError("--continue-truncated needs --max-tokens, the limit up to which answers are to go on.")
        if self.continue_truncated and self.param("truncate_prompt") is not None:
            raise ConfigError("--continue-truncated does not go with --truncate-prompt: another limit cuts otherwise.")
        if self.embed and (self.score or self.validate):
            raise ConfigError(
                f"--embed generates nothing, so that --{'score' if self.score else 'validate'} cannot be."
            )
        if self.journal_tokens and self.replicas.are_given:
            raise ConfigError("--journal-tokens is for one engine; it does not go with --replicas and --ray.")
        if self.output == "-" and self.output_format not in STREAMED:
            raise ConfigError(f"--output-format {self.output_format} needs an output file (-o FILE).")

    def _validation(self) -> Validation | None:
        """The checks of answers. Raises ConfigError, in the words of the options."""
        if not self.validate and (self.tries > 1 or self.tell_error):
            raise ConfigError("--tries and --tell-error need --validate, which says which answers are good.")
        if self.tell_error and self.tries == 1:
            raise ConfigError("--tell-error needs --tries: the model is told what was wrong before its next try.")
        return Validation.of(
            self.validate, tries=self.tries, tells_error=self.tell_error, timeout_s=self.validate_timeout
        )

    def _cache(self) -> CacheConfig | None:
        return CacheConfig(self.cache, self.cache_size) if self.cache is not None else None

    def param(self, name: str) -> Any:
        """The value of a sampling parameter of all rows, under whatever name it was given; None if it was not."""
        return own_params(self.sampling.params)[0].get(name)

    def token_journal(self, path: Path) -> TokenJournalConfig | None:
        """Where tokens of unfinished answers are written, and taken from when a run is resumed."""
        interval_s = self.journal_interval if self.journal_tokens else None
        if interval_s is None and not (self.resume and is_token_journal(path)):
            return None
        return TokenJournalConfig(str(path), self.resume, interval_s)

    def row_options(self) -> RowOptions:
        defaults = RequestDefaults(
            params=self.sampling.params,
            system=self.sampling.system,
            seed=self.sampling.seed,
            raw=self.raw,
            template=TemplateOptions(kwargs=self.template_kwargs, today=self.date or FIXED_DATE),
            columns=tuple(name for name in COLUMNS if getattr(self, name)),
            media_root=str(self._media_root.resolve()),
            allow_remote_media=self.allow_remote_media,
        )
        return RowOptions(
            defaults,
            is_text=self.input_form == "text" and self.template is None,
            has_columns=self.input_form in TABLES or self.template is not None,
            unit=unit_of(self.input_form),
            scores=self.score,
            embeds=self.embed,
            allow_unknown=self.allow_unknown,
            tools=tuple(load_tools(self.tools)),
            max_tool_rounds=self.max_tool_rounds,
            validation=self._validation(),
            cache=self._cache(),
        )
