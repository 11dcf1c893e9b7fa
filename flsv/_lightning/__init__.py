"""What touches Lightning's insides: checkpoints, gradient accumulation, patched attributes, batches on the device."""
