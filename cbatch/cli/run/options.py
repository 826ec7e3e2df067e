"""The options of `cbatch run`, as the command and `/run` under a chat read them."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from cbatch.base.config import EngineConfig
from cbatch.base.errors import ConfigError
from cbatch.base.request_defaults import RequestDefaults
from cbatch.base.template_options import FIXED_DATE, TemplateOptions
from cbatch.batch.cache.answer_cache import DEFAULT_CACHE_SIZE, AnswerCache, CacheConfig
from cbatch.batch.forms import TABLES, InputForm, OutputForm, input_form, output_form, unit_of
from cbatch.batch.row_options import RowOptions
from cbatch.batch.token_journal import DEFAULT_INTERVAL_S, TokenJournalConfig, is_token_journal
from cbatch.cli.common.options import SamplingOptions
from cbatch.cli.common.replica_options import ReplicaOptions
from cbatch.requests.param_names import own_params
from cbatch.tools.loader import load_tools
from cbatch.tools.tool import MAX_TOOL_ROUNDS
from cbatch.validation.validation import CHECK_TIMEOUT_S, Validation

if TYPE_CHECKING:
    from cbatch.batch.templates import ColumnTemplate

TEMPLATE_ENDINGS = (".jinja", ".jinja2", ".j2")
"""A template with such an ending is the name of a file."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOptions:
    """One field for each option of `cbatch run`; the help of the command describes them."""

    input: str = "-"
    output: str = "-"
    resume: bool = False
    retry_errors: bool = False
    recompute_changed: bool = False
    continue_truncated: bool = False
    overwrite: bool = False
    format: InputForm | None = None
    output_format: OutputForm | None = None
    template: str | None = None
    shard: str | None = None
    order: Literal["input", "completion"] = "input"
    window: int | None = None
    journal_tokens: bool = False
    journal_interval: float = DEFAULT_INTERVAL_S
    max_errors: int | None = None
    check: bool = False
    estimate: bool = False
    date: datetime | None = None
    raw: bool = False
    template_kwargs: dict[str, Any] = field(default_factory=dict)
    token_ids: bool = False
    timings: bool = False
    validate: tuple[str, ...] = ()
    tries: int = 1
    tell_error: bool = False
    validate_timeout: float = CHECK_TIMEOUT_S
    cache: str | None = None
    cache_size: str = DEFAULT_CACHE_SIZE
    tools: tuple[str, ...] = ()
    max_tool_rounds: int = MAX_TOOL_ROUNDS
    allow_unknown: bool = False
    stats: str | None = None
    trace: str | None = None
    quiet: bool = False
    verbose: bool = False
    sampling: SamplingOptions = field(default_factory=SamplingOptions)
    engine: EngineConfig = field(default_factory=EngineConfig)
    replicas: ReplicaOptions = field(default_factory=ReplicaOptions)

    @property
    def input_form(self) -> InputForm:
        """What --format says or, without it, the ending of the input's name."""
        return self.format or input_form(self.input)

    @property
    def output_form(self) -> OutputForm:
        """What --output-format says or, without it, the ending of the output's name."""
        return self.output_format or output_form(self.output)

    def row_template(self) -> ColumnTemplate | None:
        """What makes the prompts. Raises ConfigError if it cannot be read."""
        if self.template is None:
            return None
        from cbatch.batch.templates import PromptTemplate, read_template

        is_file = self.template.endswith(TEMPLATE_ENDINGS)
        return read_template(Path(self.template)) if is_file else PromptTemplate(self.template)

    def check_usage(self) -> None:
        """Raises ConfigError for options that would make every row an error row."""
        self.sampling.check()
        self.replicas.check(self.engine, self.trace)
        load_tools(map(Path, self.tools))  # before a model is loaded for them
        self._validation()
        self._check_cache()
        if self.estimate and not self.check:
            raise ConfigError("--estimate needs --check, of which it is a part.")
        if self.estimate and self.replicas.are_given:
            raise ConfigError("--estimate tries rows on one engine; leave out --replicas and --ray.")
        self._check_resuming()
        if self.output == "-" and self.output_format not in (None, "jsonl"):
            raise ConfigError(f"--output-format {self.output_format} needs an output file (-o FILE).")

    def _check_resuming(self) -> None:
        """Raises ConfigError for options about earlier and later runs that do not go together."""
        for name in ("retry_errors", "recompute_changed", "continue_truncated"):
            if getattr(self, name) and not self.resume:
                raise ConfigError(f"--{name.replace('_', '-')} needs --resume.")
        if self.resume and self.overwrite:
            raise ConfigError("--resume keeps the rows of the output file, --overwrite drops them; give one of them.")
        if self.continue_truncated and self.max_tokens is None:
            raise ConfigError("--continue-truncated needs --max-tokens, the limit up to which answers are to go on.")
        if self.journal_tokens and self.replicas.are_given:
            raise ConfigError("--journal-tokens is for one engine; it does not go with --replicas and --ray.")

    def _check_cache(self) -> None:
        """Raises ConfigError for a cache that cannot be used."""
        if (cache := self._cache()) is None:
            return
        if self.replicas.ray is not None:
            raise ConfigError("--cache is a folder of this machine, and --ray computes on others.")
        AnswerCache(cache).close()

    def _validation(self) -> Validation | None:
        """What makes an answer good. Raises ConfigError, in the words of the options."""
        if not self.validate and (self.tries > 1 or self.tell_error):
            raise ConfigError("--tries and --tell-error need --validate, which says which answers are good.")
        if self.tell_error and self.tries == 1:
            raise ConfigError("--tell-error needs --tries: the model is told what was wrong before its next try.")
        return Validation.of(
            self.validate, tries=self.tries, tells_error=self.tell_error, timeout_s=self.validate_timeout
        )

    def _cache(self) -> CacheConfig | None:
        return CacheConfig(self.cache, self.cache_size) if self.cache is not None else None

    @property
    def max_tokens(self) -> int | None:
        """What --max-tokens says, by whatever name; None if nothing does."""
        limit: int | None = own_params(self.sampling.params)[0].get("max_tokens")
        return limit

    def token_journal(self, path: Path) -> TokenJournalConfig | None:
        """Where tokens of unfinished answers are written, and taken from when a run is resumed."""
        interval_s = self.journal_interval if self.journal_tokens else None
        if interval_s is None and not (self.resume and is_token_journal(path)):
            return None
        return TokenJournalConfig(str(path), self.resume, interval_s)

    def row_options(self) -> RowOptions:
        """What holds for every row."""
        defaults = RequestDefaults(
            params=self.sampling.params,
            system=self.sampling.system,
            seed=self.sampling.seed,
            raw=self.raw,
            template=TemplateOptions(kwargs=self.template_kwargs, today=self.date.date() if self.date else FIXED_DATE),
            with_token_ids=self.token_ids,
        )
        return RowOptions(
            defaults,
            is_text=self.input_form == "text" and self.template is None,
            has_columns=self.input_form in TABLES or self.template is not None,
            unit=unit_of(self.input_form),
            allow_unknown=self.allow_unknown,
            timings=self.timings,
            tools=tuple(load_tools(map(Path, self.tools))),
            max_tool_rounds=self.max_tool_rounds,
            validation=self._validation(),
            cache=self._cache(),
        )
