"""The command line: ``flsv fit``, ``validate``, ``test``, ``predict`` and flsv's own subcommands, such as ``flsv
compare``. Programs can do the same through the Python interface.
"""

from flsv.cli.entry import main

__all__ = ["main"]
