"""What follows on an answer that is not the end of its row: results of tools, and further tries."""
