"""How long a sequence can get, and how much an engine takes at once."""

from __future__ import annotations

from dataclasses import dataclass

from cbatch.base.errors import ConfigError, RequestError


def too_long_for(context: int, tokens: str) -> RequestError:
    """The error of a prompt that does not fit in a context. `tokens`: how many it has."""
    return RequestError(
        "prompt_too_long",
        f"The prompt has {tokens} tokens; the model's context of {context} leaves no room to answer.",
    )


@dataclass(frozen=True, slots=True)
class SequenceLimits:
    """The longest sequences, in tokens.

    context: of the model
    cache:   of the KV cache when it is empty; the last token of an output takes no place in it
    """

    context: int
    cache: int

    @property
    def cache_is_small(self) -> bool:
        """Whether the cache, not the context, may end an output."""
        return self.cache + 1 < self.context

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence that fits in both context and cache."""
        return min(self.context, self.cache)

    def max_new_tokens(self, num_prompt: int, at_least: int = 1) -> int:
        """Most tokens that can follow a prompt of `num_prompt` tokens.

        at_least: how many must fit; 0 if only the prompt is to be computed

        Raises RequestError (`prompt_too_long`) if they do not fit.
        """
        in_context, in_cache = self.context - num_prompt, self.cache + 1 - num_prompt
        if in_context < at_least:
            raise too_long_for(self.context, str(num_prompt))
        if in_cache < 1:
            raise RequestError(
                "prompt_too_long",
                f"The prompt has {num_prompt} tokens; the KV cache holds {self.cache}. "
                "Give it more memory (--kv-cache-memory).",
            )
        return min(in_context, in_cache)

    def limit_of_cache(self, num_prompt: int, max_tokens: int | None) -> int | None:
        """Tokens after which the cache ends an output (0: at once), or None if the cache does not end it.

        max_tokens: most tokens the request asks for; None for the rest of the context
        """
        in_context, in_cache = self.context - num_prompt, self.cache + 1 - num_prompt
        wanted = in_context if max_tokens is None else min(max_tokens, in_context)
        is_cut_off = in_context > 0 and in_cache < max(wanted, 1)
        return max(in_cache, 0) if is_cut_off else None


@dataclass(frozen=True, slots=True)
class StepLimits:
    """The largest steps of an engine.

    graphs: whether steps are to become CUDA graphs

    Raises ConfigError for numbers below 1.
    """

    max_seqs: int
    max_batch_tokens: int
    graphs: bool = False

    def __post_init__(self) -> None:
        if self.max_seqs < 1 or self.max_batch_tokens < 1:
            raise ConfigError("max_seqs and max_batch_tokens must be at least 1.")

    def __str__(self) -> str:
        return f"A step of {self.max_batch_tokens:,} tokens in up to {self.max_seqs:,} sequences"


@dataclass(frozen=True, slots=True)
class EngineLimits:
    """How much an engine takes at once. The first two are lower for a while after a step ran out of memory.

    max_seqs:           most requests that run at once
    max_batch_tokens:   token budget of one step
    max_model_len:      tokens of the model's context
    block_size:         tokens in one block of the KV cache
    num_blocks:         blocks of the KV cache
    kv_bytes_per_token: bytes of keys and values of one token, over all layers
    state_slots:        slots for recurrent states, of running requests and snapshots; 0 for a model without such states
    state_bytes:        bytes of one slot
    """

    max_seqs: int
    max_batch_tokens: int
    max_model_len: int
    block_size: int
    num_blocks: int
    kv_bytes_per_token: int
    state_slots: int = 0
    state_bytes: int = 0

    @property
    def cache_tokens(self) -> int:
        """Tokens that the KV cache holds."""
        return self.num_blocks * self.block_size

    @property
    def sequence(self) -> SequenceLimits:
        """How long a single sequence can get."""
        return SequenceLimits(self.max_model_len, self.cache_tokens)

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that a sequence of `num_tokens` tokens takes."""
        return -(-num_tokens // self.block_size)
