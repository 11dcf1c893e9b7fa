"""Decide whether one may pay by the values that a page shows, on which its other sentences depend."""

from __future__ import annotations

import math

from flsv.report.basis import RETRAINED, Basis
from flsv.report.reading import Run
from flsv.results.text import WORDS, percent, small_gain

#: Fraction of the validation set in one class from which on accuracy says little about each client's contribution.
MOSTLY = 0.7
#: Verdicts on values that may become a basis for payment.
PAYABLE = ("unfinished", "metric", "one_class", "one_seed", "judged", "seeds")


def verdict(run: Run, basis: Basis) -> str:
    """Return the name of the sentence on whether the values of ``basis`` are suitable for payment: of the first thing
    that speaks against it, or ``"judged"`` or ``"seeds"`` if nothing does."""
    reasons = {
        "rounds": "of_rounds" in run.record,
        "unsuitable": not basis.to_pay_by,
        "ranking": basis.ranks_only,
        "unfinished": not run.ended and basis.key != RETRAINED,
        "metric": not basis.trained,
        "one_class": basis.majority >= MOSTLY,
        "one_seed": basis.seeds == 1,
        "judged": basis.judged,
    }
    return next((name for name, here in reasons.items() if here), "seeds")


def fitness(run: Run, basis: Basis) -> str:
    """Return a sentence on whether the values of ``basis`` are suitable as a basis for payment, and one on a small
    gain."""
    name = verdict(run, basis)
    facts = {
        "rounds": run.record.get("of_rounds"),
        "unsuitable": basis.key,
        "one_class": percent(basis.majority),
    }
    return " ".join([WORDS["fitness"][name].format(facts.get(name, basis.seeds)), *small_gain_of(basis)])


def small_gain_of(basis: Basis) -> list[str]:
    """Return the sentence of :func:`flsv.results.text.small_gain` if the values come from trained coalitions."""
    return small_gain(basis.by, math.fsum(x for x in basis.values if x == x)) if basis.trained else []
