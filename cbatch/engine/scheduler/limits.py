"""How much room the context and the cache leave to a request."""

from __future__ import annotations

from dataclasses import dataclass

from cbatch.engine.base.errors import RequestError


@dataclass(frozen=True, slots=True)
class SequenceLimits:
    """Longest sequences, in tokens: of the model's context, and of the KV cache when it is empty.

    The last token of an output needs no place in the cache.
    """

    context: int
    cache: int

    @property
    def cache_is_small(self) -> bool:
        """Whether the cache, not the context, may be what ends an output."""
        return self.cache + 1 < self.context

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence that context and cache hold."""
        return min(self.context, self.cache)

    def after(self, num_prompt: int, at_least: int = 1) -> int:
        """Most tokens that can follow a prompt of this length.

        at_least: how many must be able to follow; 0 where the prompt itself is all that is wanted

        Raises RequestError (`prompt_too_long`) where there is no room for those.
        """
        in_context, in_cache = self.context - num_prompt, self.cache + 1 - num_prompt
        if in_context < at_least:
            raise RequestError(
                "prompt_too_long",
                f"The prompt has {num_prompt} tokens; the model's context of {self.context} leaves no room to answer.",
            )
        if in_cache < 1:
            raise RequestError(
                "prompt_too_long",
                f"The prompt has {num_prompt} tokens; the KV cache holds {self.cache}. "
                "Give it more memory (--kv-cache-memory).",
            )
        return min(in_context, in_cache)

    def limit_of_cache(self, num_prompt: int, max_tokens: int | None) -> int | None:
        """Most tokens that the cache leaves to a request, 0 for none; None where the context or it asks for no more."""
        in_context, in_cache = self.context - num_prompt, self.cache + 1 - num_prompt
        wanted = in_context if max_tokens is None else min(max_tokens, in_context)
        is_cut_off = in_context > 0 and in_cache < max(wanted, 1)
        return max(in_cache, 0) if is_cut_off else None
