"""The version, which is read before anything is imported."""

__version__ = "1.2.0"
