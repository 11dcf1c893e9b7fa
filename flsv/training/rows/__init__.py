"""Rows of the kernel: many clients or coalitions trained as one batched computation."""
