"""Guide: a contribution metric's values in words."""

from __future__ import annotations

import inspect
from dataclasses import dataclass

from torchmetrics import Metric

from flsv.core.needs import needs_of
from flsv.core.vocabulary import NEEDS


@dataclass(frozen=True)
class Guide:
    """Guide to a metric's values, in short sentences.

    Args:
        unit: the unit of a value, as on an axis.
        sign: the meaning of positive, negative and zero values.
        needs: the data that the server must have or receive.
        cost: the cost of a round.
    """

    unit: str
    sign: str
    needs: str
    cost: str

    def lines(self) -> dict[str, str]:
        """Return the guide as ``{heading: sentence}``."""
        return {"unit": self.unit, "sign": self.sign, "needs": self.needs, "cost": self.cost}


def needs_in_words(metric: Metric) -> str:
    """Describe the data that a metric needs, in words."""
    needs = [NEEDS[need] for need in needs_of(metric)]
    return f"{'; '.join(needs)}." if needs else "nothing but who takes part."


def what_it_is(metric: object) -> str:
    """Return the first paragraph of the metric's docstring, on one line."""
    docstring = inspect.getdoc(type(metric)) or ""
    first_paragraph, _, _ = docstring.strip().partition("\n\n")
    return " ".join(first_paragraph.split())
