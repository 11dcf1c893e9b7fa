"""How to read a metric's values.

What a metric needs is read off what its ``update`` names and what it declares, so that it cannot say anything else.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torchmetrics import Metric

#: By the words that tables have, in the order in which they are shown.
NEEDS = {
    "validation": "the server has validation data",
    "updates": "the server sees every client's own update",
    "head": "the updates' classifier head",
    "classes": "samples have classes",
    "losses": "clients tell their training loss",
    "counts": "clients tell their numbers of samples of each class",
    "answers": "clients answer questions about their samples",
    "reports": "clients report what a client algorithm of theirs has worked out",
    "client validation": "every client has validation samples of its own",
    "samples": "all samples lie in one place",
}
_UPDATES, _HEADS, _GAMES = ("updates",), ("updates", "head"), ("validation", "updates")
#: What a name in ``update`` asks for, beyond who took part and how many samples they say that they have.
OF_A_NAME = {
    **dict.fromkeys(("client_updates", "client_vectors", "matrix"), _UPDATES),
    **dict.fromkeys(("client_heads", "client_head_weights", "server_head", "server_head_weights", "head"), _HEADS),
    **dict.fromkeys(("utility", "play", "games", "gradient_products", "hessian_products", "slopes"), _GAMES),
    "coalitions": ("validation",),
    "server_data": ("validation",),
    "losses": ("losses",),
    "clients": ("answers",),
    "peer_values": ("client validation",),
}
#: What of a :class:`flsv.Round` has a row for each client of the cohort, and the shape of a row that is no number.
BY_CLIENT = {
    "num_samples", "losses", "num_steps", "client_updates", "client_vectors", "client_heads", "client_head_weights",
    "start_vectors", "inclusion_probabilities", "aggregation_weights", "uploaded", "downloaded", "uploaded_bytes",
    "downloaded_bytes", "gradient_products", "hessian_products",
}  # fmt: skip
SHAPES = {"client_updates": ", P", "client_vectors": ", P", "client_heads": ", M, D", "client_head_weights": ", M, D"}


def needs_of(metric: Metric) -> tuple[str, ...]:
    """Names in :data:`NEEDS` of what a metric needs: what its ``update`` names of a :class:`flsv.Round`, and what its
    class declares.

    Args:
        metric: of flsv, one's own, or another torchmetrics metric.

    Example:
        >>> from flsv.metrics import ClassSpecificShapley, CommunicationCost, CumulativeShapley
        >>> needs_of(ClassSpecificShapley()), needs_of(CumulativeShapley()), needs_of(CommunicationCost())
        (('updates', 'head', 'classes'), ('validation', 'updates'), ())
    """
    names = inspect.signature(type(metric).update).parameters
    found = {need for name in names for need in OF_A_NAME.get(name, ())}
    if getattr(metric, "evaluates", False):
        # Which is all that it asks clients for; and in the place of the server's.
        found = (found | {"client validation"}) - {"answers", "validation"}
    declared = {
        "classes": getattr(metric, "needs_classes", False),
        "reports": getattr(metric, "reported_by", None),
        "counts": getattr(metric, "uses_ground_truth", False),
    }
    found |= {need for need, has in declared.items() if has}
    return tuple(need for need in NEEDS if need in found)


def needs_in_words(metric: Metric) -> str:
    """The same in a sentence.

    Example:
        >>> from flsv.metrics import CosineGradientShapley
        >>> needs_in_words(CosineGradientShapley())
        "the server sees every client's own update."
    """
    found = [NEEDS[need] for need in needs_of(metric)]
    return f"{'; '.join(found)}." if found else "nothing but who takes part."


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
