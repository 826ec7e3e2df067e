"""Answers that an earlier run has begun: their tokens in a journal, and in rows that `max_tokens` has ended."""
