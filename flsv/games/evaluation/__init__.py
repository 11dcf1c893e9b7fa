"""From vectors to scores: evaluates many models of one structure on the same batches."""
