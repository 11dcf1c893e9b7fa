"""Describe the data that metrics need, and check the arguments that a round passes to them."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import Tensor

from flsv.core.needs import needs_of
from flsv.core.vocabulary import NEEDS, VOCABULARY
from flsv.utilities.host_copies import on_host

if TYPE_CHECKING:
    from torchmetrics import Metric


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
    lowest = int(min(ids))
    highest = int(max(ids))
    if lowest < 0 or highest >= num_clients:
        raise ValueError(
            f"client_ids must lie in [0, {num_clients}), num_clients={num_clients}; got {lowest} to {highest}."
        )
    if len(set(ids)) != len(ids):
        raise ValueError(f"a client appears twice in one round: client_ids={client_ids.tolist()}.")


def check_rows(
    client_ids: Tensor, arguments: Mapping[str, Any], more_names: Sequence[str] = ()
) -> None:
    """Raise ValueError unless each of ``update``'s tensors with a row per client has k = len(client_ids) rows.

    They are those that are so in every round, and those in ``more_names``.
    """
    # Otherwise a single row would be broadcast to all clients.
    for name, value in arguments.items():
        row = VOCABULARY.get(name)
        is_per_client = name in more_names or (row is not None and row.per_client)
        if not is_per_client or not isinstance(value, Tensor):
            continue
        if value.shape[:1] != client_ids.shape:
            shape = "[k]" if row is None else row.shape
            shape = shape.replace("[k", f"[k={len(client_ids)}")
            raise ValueError(f"expected {name} {shape}, got {list(value.shape)}.")
