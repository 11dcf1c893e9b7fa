"""The version, which is read before anything is imported."""

__version__ = "3.0.0"
