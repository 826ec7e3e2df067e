"""What holds for every request of a run or a call that does not say something else itself."""

from __future__ import annotations

import operator
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from cbatch.base.errors import RequestError
from cbatch.base.params import SamplingParams
from cbatch.base.template_options import TemplateOptions

ParamsLike = SamplingParams | Mapping[str, Any]
"""Sampling parameters. Those of a mapping come on top of the model's own defaults; an object replaces these."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestDefaults:
    """What holds for every request of a run or a call that does not say something else itself.

    params:   sampling parameters: by name, on top of the model's own defaults, or an object instead of these
    system:   system message of conversations that have none
    seed:     seed from which requests without a seed of their own get theirs
    raw:      take every prompt as plain text to continue
    template: options of the chat template
    columns:  columns of rows of output that are asked for (see `requests/columns.py`)
    """

    params: ParamsLike = field(default_factory=dict)
    system: str | None = None
    seed: int = 0
    raw: bool = False
    template: TemplateOptions = field(default_factory=TemplateOptions)
    columns: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        """Raises RequestError for a seed or a system message of a wrong type."""
        if isinstance(self.seed, bool) or not hasattr(self.seed, "__index__"):
            raise RequestError("invalid_row", f"seed must be a whole number or None, not {self.seed!r}.")
        object.__setattr__(self, "seed", operator.index(self.seed))  # numpy has whole numbers of its own
        if not isinstance(self.system, str | None):
            raise RequestError("invalid_row", f"system must be a text or None, not {type(self.system).__name__}.")
