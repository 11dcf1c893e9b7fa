"""Describe the data that metrics need, and check the arguments that a round passes to them."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import Tensor

from flsv.utilities.host_copies import on_host

if TYPE_CHECKING:
    from torchmetrics import Metric


#: What a metric may need, ``{keyword for tables: description}``, in the order of display.
NEEDS = {
    "validation": "the server has validation data",
    "updates": "the server sees every client's own update",
    "head": "the updates' classifier head",
    "classes": "samples have classes",
    "losses": "clients report their training loss",
    "counts": "clients report their numbers of samples of each class",
    "answers": "clients answer questions about their samples",
    "reports": "clients report values that their client algorithm computes",
    "client validation": "every client has validation samples of its own",
}
_UPDATES, _HEADS, _GAMES = ("updates",), ("updates", "head"), ("validation", "updates")
#: ``{argument: needs}``: the keywords of :data:`NEEDS` that an argument of ``update`` implies. Arguments that are
#: missing here imply no need.
OF_A_NAME = {
    **dict.fromkeys(("client_updates", "client_vectors", "matrix"), _UPDATES),
    **dict.fromkeys(
        ("client_heads", "client_head_weights", "server_head", "server_head_weights", "head"),
        _HEADS,
    ),
    **dict.fromkeys(("utility", "play", "games", "gradient_products", "slopes"), _GAMES),
    "coalitions": ("validation",),
    "server_data": ("validation",),
    "validation": ("validation",),
    "losses": ("losses",),
    "clients": ("answers",),
    "all_clients": ("answers",),
    "peer_values": ("client validation",),
}
#: ``BY_CLIENT``: attributes of a :class:`flsv.Round` that have one row per client. ``SHAPES``: the further axes of some
#: of them, for messages.
BY_CLIENT = {
    "num_samples", "losses", "num_steps", "client_updates", "client_vectors", "client_heads", "client_head_weights",
    "start_vectors", "inclusion_probabilities", "aggregation_weights", "uploaded", "downloaded", "uploaded_bytes",
    "downloaded_bytes", "gradient_products",
}  # fmt: skip
SHAPES = {
    "client_updates": ", P",
    "client_vectors": ", P",
    "client_heads": ", M, D",
    "client_head_weights": ", M, D",
}


def needs_of(metric: Metric) -> tuple[str, ...]:
    """Return what the server must have or receive for a metric, as keys of :data:`NEEDS`."""
    names = inspect.signature(type(metric).update).parameters
    needs = {need for name in names for need in OF_A_NAME.get(name, ())}
    if getattr(metric, "evaluates", False):
        # Clients are asked for scores only, and their validation samples replace the server's validation set.
        needs = (needs | {"client validation"}) - {"answers", "validation"}
    declared = {
        "classes": getattr(metric, "needs_classes", False),
        "reports": getattr(metric, "reported_by", None),
        "counts": getattr(metric, "uses_ground_truth", False),
    }
    needs |= {need for need, has in declared.items() if has}
    return tuple(need for need in NEEDS if need in needs)


def needs_in_words(metric: Metric) -> str:
    """Describe the data that a metric needs, in words."""
    needs = [NEEDS[need] for need in needs_of(metric)]
    return f"{'; '.join(needs)}." if needs else "nothing but who takes part."


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


def what_it_is(metric: object) -> str:
    """Return the first paragraph of the metric's docstring, on one line."""
    paragraph = (inspect.getdoc(type(metric)) or "").strip().split("\n\n")[0]
    return " ".join(paragraph.split())


def check_clients(client_ids: Tensor, num_clients: int) -> None:
    """Raise ValueError unless ``client_ids [k]``, at least one, are different numbers in 0 .. ``num_clients`` - 1."""
    if client_ids.numel() == 0:
        raise ValueError("client_ids is empty: a round needs at least one client.")
    ids = on_host(client_ids)
    low, high = int(min(ids)), int(max(ids))
    if low < 0 or high >= num_clients:
        raise ValueError(
            f"client_ids must lie in [0, {num_clients}), num_clients={num_clients}; got {low} to {high}."
        )
    if len(set(ids)) != len(ids):
        raise ValueError(f"a client appears twice in one round: client_ids={client_ids.tolist()}.")


def check_rows(client_ids: Tensor, arguments: Mapping[str, Any]) -> None:
    """Raise ValueError unless each of ``update``'s tensors with one row per client has k = len(client_ids) rows."""
    # Otherwise a single row would be broadcast to all clients.
    for name in BY_CLIENT & arguments.keys():
        value = arguments[name]
        if isinstance(value, Tensor) and value.shape[:1] != client_ids.shape:
            shape = f"k={len(client_ids)}{SHAPES.get(name, '')}"
            raise ValueError(f"expected {name} [{shape}], got {list(value.shape)}.")
