"""flsv report: a run's results as a page to hand out.

    flsv report lightning_logs/version_0
    flsv report lightning_logs/version_0 --budget 10000 --by value
    flsv report lightning_logs/version_0 --client 3 --out boston.html

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
"""

from __future__ import annotations

from collections.abc import Sequence

from flsv.cli.command import command_parser, display_path
from flsv.utilities.atomic_files import check_writable

#: Options that only a page with a budget has.
TERMS = ("by", "rule", "currency", "evaluated_by_partners")


def main(args: Sequence[str], quiet: bool = False) -> None:
    """Run ``flsv report`` with the command-line arguments ``args``."""
    parser = command_parser("flsv report", __doc__)
    options = parser.parse_args(list(args))
    terms_by_name = {}
    for name in TERMS:
        value = getattr(options, name)
        if value:
            terms_by_name[name] = value
    if terms_by_name and options.budget is None:
        names = [f"--{name.replace('_', '-')}" for name in terms_by_name]
        parser.error(f"{' and '.join(names)} needs a budget: add --budget 10000")
    from flsv.payment import Budget, write_report  # imported late: it imports torch
    from flsv.payment.shares import shares_file, shares_of
    from flsv.results import open_run
    from flsv.results.terminal import print_lines

    out_folder = options.run
    if options.out is not None:
        out_folder = options.out.parent
    check_writable(out_folder)

    if options.budget is None:
        page = write_report(options.run, options.client, out=options.out)
        print(f"Report: {display_path(page)}")
        return
    budget = Budget(options.budget, **terms_by_name)
    page = write_report(options.run, options.client, out=options.out, budget=budget)
    files = [display_path(page)]
    if not options.client:
        shares = shares_file(page)
        files.append(display_path(shares))
    print(f"Report: {', '.join(files)}")

    verdict = shares_of(open_run(options.run), budget).verdict
    print_lines(verdict.lines)
