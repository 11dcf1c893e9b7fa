"""Results of a run while it runs: its rows, and the sinks that store or show them (CSV, TensorBoard, terminal,
trackers); no value is computed here.
"""
