"""From vectors to scores: many models of one structure, evaluated on one set of batches."""
