"""``flsv report``: a run's results as a page to hand out.

    flsv report runs/lightning_logs/version_0
    flsv report runs/lightning_logs/version_0 --budget 10000 --rule zero
    flsv report runs/lightning_logs/version_0 --client 3 --out boston.html

One HTML file that needs no network, and the same as Markdown. The first page says what share each partner has, what
that is of a budget, how certain it is, and what speaks against paying by it; the appendix how it was measured, per
class and over the rounds, suspicious samples, settings, hashes. With --client, the page that this participant may see:
of the others it has nothing but, of five participants or more and at the end of the run, means over all. What flsv pay
has shared out is on the page without being said again; with --budget, --rule or --by the page shows other terms, and
keeps nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from flsv._lightning.durable import check_writable
from flsv.cli.command import check_clients, command_parser, existing, shown
from flsv.cli.terms import add_terms, terms_given


def main(args: Sequence[str], quiet: bool = False) -> None:
    """The command line, without ``report`` itself."""
    parser = command_parser("flsv report", __doc__)
    parser.add_argument("run", metavar="RUN", type=existing, help="the run's folder, also of a killed run")
    parser.add_argument("--client", help="number or name of the client whose page it shall be")
    parser.add_argument("--out", type=Path, help="one file, .html or .md; by default both, in the run's folder")
    parser.add_argument("--valuation", type=existing, metavar="DIR", help="a folder of flsv value, to be added")
    add_terms(parser)
    options = parser.parse_args(list(args))
    check_clients(options.run, [options.client] if options.client else (), "client")
    from flsv.report import write_report  # only now: what is wrong above is said without waiting for torch

    check_writable(Path(options.run) if options.out is None else options.out.parent)
    terms = terms_given(options)
    files = write_report(options.run, options.client, options.out, options.valuation, terms, options.repeated)
    if not quiet:
        print(f"Report: {', '.join(map(shown, files))}")
