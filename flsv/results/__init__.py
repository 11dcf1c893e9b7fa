"""Results of a run: its rows, and the sinks that store or show them (CSV, TensorBoard, terminal, trackers)."""
