"""Everything that touches Lightning's internals: checkpoints, gradient accumulation, patched attributes."""
