"""Engines, which train and ask the clients of a federation."""
