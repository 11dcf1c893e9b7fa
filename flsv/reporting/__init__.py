"""How a run tells what happened: TensorBoard and other loggers, a tidy CSV, a table at the end, the progress bar."""
