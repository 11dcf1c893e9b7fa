"""How to read a metric's values."""

from __future__ import annotations

import inspect
from dataclasses import dataclass


@dataclass(frozen=True)
class Guide:
    """What readers of a metric's values have to know, in short sentences.

    Args:
        unit: of a value, as on an axis.
        sign: what more, less and 0 mean.
        needs: what the server has to have or to be told.
        cost: of a round.
    """

    unit: str
    sign: str
    needs: str
    cost: str

    def lines(self) -> dict[str, str]:
        """By the words that people look for."""
        return {"unit": self.unit, "sign": self.sign, "needs": self.needs, "cost": self.cost}


def what_it_is(metric: object) -> str:
    """The first paragraph of the metric's docstring, on one line.

    Example:
        >>> what_it_is(Guide("", "", "", ""))
        "What readers of a metric's values have to know, in short sentences."
    """
    paragraph = (inspect.getdoc(type(metric)) or "").strip().split("\n\n")[0]
    return " ".join(paragraph.split())
