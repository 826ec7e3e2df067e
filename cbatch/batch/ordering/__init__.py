"""Which of the rows that were read the engine gets next, and what is still ahead."""
