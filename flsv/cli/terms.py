"""The options of a payment, which ``flsv pay`` and ``flsv report`` have in common."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from flsv.cli.command import existing

if TYPE_CHECKING:
    from flsv.report import Terms

RULES = ("zero", "shift", "softmax", "refuse")


def amount(text: str) -> float:
    """A number above 0, for ``add_argument(type=...)``; ``10,000`` is ten thousand.

    Raises:
        argparse.ArgumentTypeError: it is none.

    Example:
        >>> amount("10,000.50")
        10000.5
    """
    try:
        number = float(text.replace(",", ""))
    except ValueError:
        number = 0.0
    if not 0 < number < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r}: expected a number above 0")
    return number


def add_terms(parser: argparse.ArgumentParser) -> None:
    """Add them."""
    terms = parser.add_argument_group("payment")
    terms.add_argument("--budget", type=amount, help="what there is to share out, such as 10000")
    terms.add_argument(
        "--rule",
        choices=RULES,
        help="what becomes of values below 0. zero (default): nothing for them. shift: all are counted from the "
        "lowest. softmax: everybody gets something. refuse: an error",
    )
    terms.add_argument(
        "--by",
        metavar="METRIC",
        help="by which values: a metric of the run, or retrained. Default: retrained after flsv retrain, else the "
        "run's first metric",
    )
    terms.add_argument("--unit", type=amount, help="the smallest amount; default 0.01")
    terms.add_argument("--currency", help="of the budget, such as EUR")
    terms.add_argument(
        "--repeated",
        type=existing,
        metavar="DIR",
        help="a folder of flsv repeat on the same data: its means stand beside the run's values, and in their place "
        "where the payment is by a metric. Default: the one that the run is in",
    )


def terms_given(options: argparse.Namespace) -> Terms | None:
    """What was said of them; None: nothing."""
    from flsv.report import Terms

    names = ("budget", "rule", "by", "unit", "currency")
    said = {name: getattr(options, name) for name in names if getattr(options, name) is not None}
    return Terms(**said) if said else None
