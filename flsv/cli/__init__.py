"""The command line: ``flsv fit``, ``validate``, ``test``, ``predict`` and flsv's own subcommands.

Tier: provisional.
"""

from flsv.cli.entry import main

__all__ = ["main"]
