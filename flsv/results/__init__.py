"""Results of a run: the rows of its table, and the sinks that store or show them while it runs."""
