"""The command line: ``flsv fit``, ``validate``, ``test``, ``predict`` and flsv's own subcommands, such as ``flsv
compare``; nothing that a program could not do without it.
"""

from flsv.cli.entry import main

__all__ = ["main"]
