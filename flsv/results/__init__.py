"""Results of a run: its rows, and what keeps or shows them (CSV, TensorBoard, terminal, trackers)."""
