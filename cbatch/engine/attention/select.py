"""Which attention backend serves a device."""

from __future__ import annotations

from cbatch.engine.attention.interface import AttentionBackend
from cbatch.engine.attention.reference import ReferenceAttention
from cbatch.engine.errors import ConfigError

BACKENDS: dict[str, type[AttentionBackend]] = {"reference": ReferenceAttention}


def select_attention(name: str) -> AttentionBackend:
    """The backend of that name; `auto` takes the best there is. Raises ConfigError for an unknown name."""
    if name == "auto":
        name = "reference"
    if name not in BACKENDS:
        raise ConfigError(f"There is no attention backend {name!r}; choose auto or one of: {', '.join(BACKENDS)}.")
    return BACKENDS[name]()
