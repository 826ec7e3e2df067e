"""What is asked of an engine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from cbatch.engine.base.template_options import DEFAULT_TEMPLATE, TemplateOptions


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestDefaults:
    """What applies to every request that does not say otherwise.

    params:   sampling parameters by their names; they override those of the model
    system:   a system message for conversations without one
    seed:     gives a request without a seed one of its own, by its id or its index
    raw:      continue prompts as plain text, without the chat template
    template: options of the chat template
    """

    params: Mapping[str, Any] = field(default_factory=dict)
    system: str | None = None
    seed: int = 0
    raw: bool = False
    template: TemplateOptions = DEFAULT_TEMPLATE
