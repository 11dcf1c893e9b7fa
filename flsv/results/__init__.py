"""Results of a run while it runs: the rows of its table, and the sinks that store or show them (CSV, TensorBoard,
terminal, trackers). No value is computed in this package."""
