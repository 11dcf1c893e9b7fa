"""``flsv pay``: a budget, shared out by what each partner of a run has contributed.

    flsv pay runs/lightning_logs/version_0 --budget 10000 --rule zero
    flsv pay runs/lightning_logs/version_0 --budget 10000 --by retrained
    flsv pay runs/lightning_logs/version_0 --release Boston Lyon

Amounts sum to the budget, to the last cent: what rounding leaves goes to the largest remainders. They are written to
payment.csv in the run's folder, with what each would be at either end of the value's interval, and flsv report shows
them from then on. What speaks against paying by these values is said first. With --release, somebody has looked at
clients whose payment is held back, for sending one another's updates: these are to be paid. It is kept in the run's
folder, also for flsv retrain and flsv repeat.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from flsv.cli.command import check_clients, command_parser, existing, shown
from flsv.cli.terms import add_terms, terms_given

if TYPE_CHECKING:
    from flsv.report import Payment, Run


def main(args: Sequence[str], quiet: bool = False) -> None:
    """The command line, without ``pay`` itself."""
    parser = command_parser("flsv pay", __doc__)
    parser.add_argument("run", metavar="RUN", type=existing, help="the run's folder")
    add_terms(parser)
    parser.add_argument(
        "--release", nargs="+", metavar="CLIENT", help="numbers or names of clients who are held, to be paid"
    )
    options = parser.parse_args(list(args))
    if options.budget is None and not options.release:
        parser.error("say what is to be shared out: --budget 10000 (or --release CLIENT)")
    check_clients(options.run, options.release or (), "client")
    from flsv.report import pay, release  # only now: what is wrong above is said without waiting for torch

    if options.release:
        release(options.run, options.release)
    if options.budget is None:
        return
    terms = terms_given(options)
    assert terms is not None
    run, payment = pay(options.run, terms, options.repeated)
    if not quiet:
        _show(run, payment, options.repeated)
    print(f"Payment: {shown(run.folder / 'payment.csv')}")


def _show(run: Run, payment: Payment, repeated: Path | None) -> None:
    from flsv.report.front import red_lines
    from flsv.report.payment import RULES
    from flsv.report.repeated import repeated_runs
    from flsv.report.terminal import make_console, print_table
    from flsv.report.verdict import bases, order_in_words

    for line in red_lines(run, bases(run, repeated_runs(run, repeated))):
        print(f"Before you pay: {line}")
    terms, rows = payment.terms, payment.rows(run)
    columns = {
        "share": [f"{100 * row['share']:.1f} %" for row in rows],
        "amount": [
            "held back" if row["client"] in run.held else terms.text(row["amount"]).removesuffix(f" {terms.currency}")
            for row in rows
        ],
    }
    if any(row["amount_low"] == row["amount_low"] for row in rows):
        columns["90 % interval"] = [
            f"{row['amount_low']:,.0f} to {row['amount_high']:,.0f}" if row["amount_low"] == row["amount_low"] else ""
            for row in rows
        ]
    title = f"{terms.text(terms.budget or 0.0)}, by {payment.basis.title}"
    print_table(make_console(), title, run.client_names, columns, corner="partner")
    print(f"{RULES[terms.rule]}.")
    print(order_in_words(run, payment.basis))
