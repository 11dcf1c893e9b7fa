"""The code that uses Lightning's internals: checkpoints, batch hooks, validation, patched attributes."""
