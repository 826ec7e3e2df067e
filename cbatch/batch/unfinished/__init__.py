"""What a run goes on with: rows that it keeps, tokens of unfinished answers, answers that `max_tokens` has ended."""
