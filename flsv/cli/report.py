"""``flsv report``: a run's results as a page to hand out.

    flsv report runs/lightning_logs/version_0
    flsv report runs/lightning_logs/version_0 --client 3 --out boston.html
    flsv report runs/lightning_logs/version_0 --pay Boston Lyon

One HTML file that needs no network, and the same as Markdown: who took part, what each contributed and how certain that
is, per class and over the rounds, what it gave compared with training alone, suspicious samples, settings, hashes. With
--client, the page that this participant may see: of the others it has nothing but, of five participants or more and at
the end of the run, means over all. With --pay, somebody has looked at clients whose payment is held back, for sending
one another's updates: these are to be paid. It is kept in the run's folder, also for flsv retrain and flsv repeat.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from flsv._lightning.durable import check_writable
from flsv.cli.command import command_parser, shown


def main(args: Sequence[str], quiet: bool = False) -> None:
    """The command line, without ``report`` itself."""
    parser = command_parser("flsv report", __doc__)
    parser.add_argument("run", metavar="RUN", help="the run's folder, also of a killed run")
    parser.add_argument("--client", help="number or name of the client whose page it shall be")
    parser.add_argument("--out", type=Path, help="one file, .html or .md; by default both, in the run's folder")
    parser.add_argument("--valuation", type=Path, metavar="DIR", help="a folder of flsv value, to be added")
    parser.add_argument(
        "--pay", nargs="+", metavar="CLIENT", help="numbers or names of clients who are held, to be paid"
    )
    options = parser.parse_args(list(args))
    from flsv.report import pay, write_report  # only now: --help waits for neither torch nor pandas

    if options.pay:
        pay(options.run, options.pay)
    check_writable(Path(options.run) if options.out is None else options.out.parent)
    files = write_report(options.run, options.client, options.out, options.valuation)
    if not quiet:
        print(f"Report: {', '.join(map(shown, files))}")
