"""The ingredients of the keys of a run, which it keeps (see `run_record`) so that a later one can say why keys differ.

Nothing but messages depends on them: without them, messages name all that may have changed.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from cbatch.base.request import RequestDefaults
from cbatch.batch.lines import RowOptions
from cbatch.requests.columns import KEYED
from cbatch.requests.row_keys import NONE, Origin
from cbatch.schedule.limits import SequenceLimits

MAX_SHOWN = 40
"""Characters of the longest value that is kept as it is; of others, a hash."""


def origin_of(model: Mapping[str, str], limits: SequenceLimits, options: RowOptions, template: str | None) -> Origin:
    """The ingredients of the keys of a run.

    model:    the parts of the model's fingerprint, by what they are
    template: what makes prompts of columns, if anything does
    """
    defaults: RequestDefaults = options.defaults
    validation = options.validation.identity if options.validation is not None else None
    params = defaults.params if isinstance(defaults.params, Mapping) else {}
    sampling: dict[str, Any] = {f"--{name.replace('_', '-')}": value for name, value in params.items()}
    sampling |= {f"--{name.replace('_', '-')}": name in defaults.columns for name in KEYED}
    sampling |= {"--seed": defaults.seed, "--validate, --tries or --tell-error": validation}
    sampling |= {"size of the KV cache": limits.cache if limits.cache_is_small else None}
    row: dict[str, Any] = {"--system": defaults.system, "--template": _template_text(template), "--raw": defaults.raw}
    row |= {
        "--format": "text" if options.is_text else options.unit,
        "--score": options.scores,
        "--embed": options.embeds,
    }
    row |= {"--template-kwargs": defaults.template.kwargs, "--allow-unknown": options.allow_unknown}
    row |= {"--tools": [tool.schema for tool in options.tools], "--max-tool-rounds": options.max_tool_rounds}
    parts = {"model": {**model, "--date": str(defaults.template.today)}, "sampling": sampling, "input": row}
    return {part: {name: _shown(value) for name, value in values.items()} for part, values in parts.items()}


def _template_text(template: str | None) -> str | None:
    """A template itself, also of one that stands in a file."""
    with suppress(OSError, ValueError):
        return Path(template.removeprefix("@")).read_text() if template is not None else None
    return template


def _shown(value: Any) -> str:
    if value is None:
        return NONE
    text = value if isinstance(value, str) else json.dumps(value, default=str, sort_keys=True)
    return text if len(text) <= MAX_SHOWN else f"#{hashlib.blake2b(text.encode(), digest_size=8).hexdigest()}"
