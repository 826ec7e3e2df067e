"""Kinds of attention with which every backend is tested."""

from __future__ import annotations

from dataclasses import dataclass

from cbatch.runtime.kv_cache import LayerShape


@dataclass(frozen=True)
class AttentionCase:
    layer: LayerShape
    group: int = 1
    block_size: int = 16
    window: int | None = None
    chunk: int | None = None
    softcap: float | None = None
    sinks: bool = False

    @property
    def options(self) -> dict[str, object]:
        """Arguments of `attend`, except for the sinks."""
        return {"scale": 0.3, "window": self.window, "chunk": self.chunk, "softcap": self.softcap}
