"""flsv report: a run's results as a page to hand out.

    flsv report lightning_logs/version_0
    flsv report lightning_logs/version_0 --budget 10000 --by value
    flsv report lightning_logs/version_0 --client 3 --out boston.html
    flsv report lightning_logs/version_0 lightning_logs/version_1

Writes one HTML file that needs no network. Its first page says how much each
partner has contributed, and gives reasons against relying on it. The appendix
shows how this was measured, the values per class and over the rounds, settings
of the federation and hashes of samples.

With --client, the page is for this participant. About the others it contains
only means over all participants, and only if there are five or more and the
run has ended.

With --budget, the page says whether to pay by the values, with which
reservations, and it shows each partner's share and its amount in whole cents,
with intervals, unless it advises against a payment. shares.csv beside the page
has the same numbers and the verdict. Samples of several partners and outliers
among updates are named beside the amounts, but reduce no amount.

Several runs, or folders of flsv repeat, are compared: final scores, values and
shares as differences from the first run, paired by seed, with intervals. The
page and the table are compare.html and compare.csv in the first run's folder.
"""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flsv.cli.command import command_parser, display_path
from flsv.utilities.atomic_files import check_writable

if TYPE_CHECKING:
    from flsv.payment import Budget

#: Options that only a page with a budget has.
TERMS = ("by", "rule", "currency", "evaluated_by_partners")


def main(args: Sequence[str], quiet: bool = False) -> None:
    """Run ``flsv report`` with the command-line arguments ``args``."""
    parser = command_parser("flsv report", __doc__)
    options = parser.parse_args(list(args))
    terms_by_name = _given_terms(options, parser)
    from flsv.payment import Budget, write_report  # imported late: it imports torch

    run = options.run[0]
    out_folder = run
    if options.out is not None:
        out_folder = options.out.parent
    check_writable(out_folder)

    if len(options.run) > 1:
        if options.client or options.budget is not None:
            parser.error("--client and --budget are for the report of one run")
        _compare(options.run, options.out or run / "compare.html")
        return
    if options.budget is None:
        page = write_report(run, options.client, out=options.out)
        print(f"Report: {display_path(page)}")
        return
    _report_with_budget(options, run, Budget(options.budget, **terms_by_name))


def _given_terms(options: Namespace, parser: ArgumentParser) -> dict[str, Any]:
    terms_by_name = {}
    for name in TERMS:
        value = getattr(options, name)
        if value:
            terms_by_name[name] = value
    if terms_by_name and options.budget is None:
        names = [f"--{name.replace('_', '-')}" for name in terms_by_name]
        parser.error(f"{' and '.join(names)} needs a budget: add --budget 10000")
    return terms_by_name


def _report_with_budget(options: Namespace, run: Path, budget: Budget) -> None:
    from flsv.payment import write_report
    from flsv.payment.shares import shares_file, shares_of
    from flsv.results import open_run
    from flsv.results.terminal import print_lines

    page = write_report(run, options.client, out=options.out, budget=budget)
    files = [display_path(page)]
    if not options.client:
        shares = shares_file(page)
        files.append(display_path(shares))
    print(f"Report: {', '.join(files)}")

    verdict = shares_of(open_run(run), budget).verdict
    print_lines(verdict.lines)


def _compare(runs: Sequence[Path], page: Path) -> None:
    from flsv.payment.compare import cells, compare_runs, note_on_designs, write_comparison
    from flsv.results.terminal import print_lines, print_table

    comparison = compare_runs(runs)
    write_comparison(comparison, page)
    print_table("Runs side by side", comparison["what"], cells(comparison), corner="")
    note = note_on_designs(comparison)
    if note:
        print_lines([note])
    print(f"Report: {display_path(page)}, {display_path(page.with_suffix('.csv'))}")
