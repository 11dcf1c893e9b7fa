"""The command line: ``flsv fit | validate | test | predict``, ``flsv compare``, ``flsv value``, ``flsv bench``."""

from flsv.cli.entry import main

__all__ = ["main"]
