"""Engines: where the clients of a federation run."""
