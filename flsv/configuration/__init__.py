"""What a federation is told before it starts, and which fit it is."""
