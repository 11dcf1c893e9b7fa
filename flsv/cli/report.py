"""``flsv report``: a run's results as a page to hand out.

    flsv report lightning_logs/version_0
    flsv report lightning_logs/version_0 --budget 10000 --by value
    flsv report lightning_logs/version_0 --client 3 --out boston.html

Writes one HTML file that needs no network. Its first page says how much each partner has contributed and what speaks
against relying on it; the appendix shows how this was measured, the values per class and over the rounds, suspicious
samples, settings of the federation and hashes of samples. With --client, the page is for this participant: about the
others it contains only means over all participants, and these only if there are five or more and the run has ended.
With --budget, the page says whether the values are suitable for payment, and shows each partner's share and its amount
in whole cents, with intervals. shares.csv beside the page has the same numbers. Copies and outliers that the run has
found are named beside the amounts, but no amount is held back for them.
"""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from pathlib import Path

from flsv.cli.command import display_path, done_waiting, importing, waiting
from flsv.cli.parsers import budget_of, report_parser
from flsv.utilities.atomic_files import check_writable


def main(args: Sequence[str], quiet: bool = False) -> None:
    """Run ``flsv report`` with the command-line arguments ``args``."""
    parser = report_parser()
    options = parser.parse_args(list(args))
    budget = budget_of(parser, options)
    with importing():
        from flsv.report import open_run, write_report  # imported late: it imports torch
        from flsv.report.basis import basis_of
        from flsv.report.front import fitness
        from flsv.report.shares import shares_file
        from flsv.results.terminal import width

    waiting("flsv report: reading the run and drawing the page", quiet)
    check_writable(Path(options.run) if options.out is None else options.out.parent)
    page = write_report(options.run, options.client, options.out, budget)
    files = [page] if budget is None or options.client else [page, shares_file(page)]
    done_waiting()
    print(f"Report: {', '.join(map(display_path, files))}")
    if budget is not None:
        run = open_run(options.run)
        print(textwrap.fill(fitness(run, basis_of(run, budget.by)), width() or 10_000))
