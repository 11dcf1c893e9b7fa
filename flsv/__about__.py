"""The version, which is read before anything is imported."""

__version__ = "2.1.0"
