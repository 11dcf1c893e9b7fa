"""``flsv board``: runs in a browser on this machine, while they train.

    flsv board runs/lightning_logs/version_0
    flsv board runs/lightning_logs --port 6007

Each partner's share with its interval, contributions over the rounds and by class, who was warned of, and several runs
side by side. The page renews itself until the runs have ended. It is served to this machine only, has no scripts and
asks for nothing else. Ctrl-C ends it.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress

from flsv.cli.command import command_parser, existing, positive


def main(args: Sequence[str], quiet: bool = False) -> None:
    """The command line, without ``board`` itself."""
    parser = command_parser("flsv board", __doc__)
    parser.add_argument("run", metavar="RUN", nargs="+", type=existing, help="a run's folder, or one of several runs")
    parser.add_argument("--port", type=int, default=6007, help="of the page; 0: a free one")
    parser.add_argument("--every", type=positive, default=5, metavar="SECONDS", help="between two looks")
    options = parser.parse_args(list(args))
    from flsv.report.board import Board  # only now: what is wrong above is said without waiting for torch

    with Board(options.run, options.port, options.every) as board:
        if not quiet:
            print(f"Board: {board.url} (Ctrl-C ends it)", flush=True)
        with suppress(KeyboardInterrupt):
            board.serve_forever()
