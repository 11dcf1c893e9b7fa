"""CommunicationCost: how many numbers each client has sent to the server and received from it.

Wu et al., "Rethinking Personalized Client Collaboration in Federated Learning", IEEE Transactions on Mobile Computing,
2024, section VI-C and figures 8-10, which count parameters.
"""

from __future__ import annotations

from functools import partial
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from flsv.core import Round
from flsv.metrics.base import ContributionMetric


def _crossed(round: Round, way: Literal["up", "down"], bytes: bool = False) -> Tensor:
    """Count the numbers or bytes that each of the r reached clients sent or received, ``[r]``."""
    assert round.channel is not None
    count = round.channel.bytes if bytes else round.channel.numbers
    return count(round.reached.tolist(), way).to(round.reached.device)


class CommunicationCost(ContributionMetric):
    r"""The numbers of parameters that each client has sent and received so far.

    .. math::
        c_i = \Bigl(\sum_{t : i \in C_t} \text{sent}_i^t,\ \sum_{t : i \in C_t} \text{received}_i^t\Bigr)

    A ``FederatedLoop`` counts numbers and bytes, after compression, for the shared part of the model, with BatchNorm's
    statistics. The rest is assumed to be at the clients before the first round. ``compute`` returns float64
    ``[num_clients, 2]``, the numbers sent and received. NaN for clients that never took part. ``diagnostics`` returns
    the totals over all clients in parameters and bytes.

    When not to use it:
        As a contribution: it measures traffic, not usefulness.

    Args:
        num_clients: n, the number of clients. None inside a ``FederatedLoop``, which takes it from the data.
        kwargs: further arguments of ``torchmetrics.Metric``.

    Raises:
        ValueError: shapes do not fit, or client ids are unknown or repeated.

    Example:
        >>> cost = CommunicationCost(num_clients=3)
        >>> cost.update(torch.tensor([0, 2]), torch.tensor([10, 10]), torch.tensor([50, 20]))
        >>> cost.compute().tolist()
        [[10.0, 50.0], [nan, nan], [10.0, 20.0]]
        >>> cost.diagnostics()["bytes_down"].item()
        280.0
    """

    unit = "parameters"
    sign = "less is cheaper; it only grows."
    cost = "none."
    higher_is_better = False
    per_class = False
    plot_lower_bound = 0.0
    #: Arguments of ``update``, and the round's attributes or functions of it that give them; clients whose updates were
    #: dropped are included.
    round_fields: ClassVar[dict[str, Any]] = {
        "client_ids": "reached",
        "uploaded": partial(_crossed, way="up"),
        "downloaded": partial(_crossed, way="down"),
        "uploaded_bytes": partial(_crossed, way="up", bytes=True),
        "downloaded_bytes": partial(_crossed, way="down", bytes=True),
    }
    exchanged: Tensor
    seen: Tensor
    exchanged_bytes: Tensor

    def init_states(self, num_clients: int, num_classes: int | None) -> None:
        # Integers: the sums exceed float32's exact integers, and not every device has float64.
        for name in ("exchanged", "exchanged_bytes"):
            self.add_state(name, torch.zeros(num_clients, 2, dtype=torch.long), dist_reduce_fx="sum")
        self.add_state("seen", torch.zeros(num_clients, dtype=torch.bool), dist_reduce_fx=_any)

    def update(
        self,
        client_ids: Tensor,
        uploaded: Tensor,
        downloaded: Tensor,
        uploaded_bytes: Tensor | None = None,
        downloaded_bytes: Tensor | None = None,
    ) -> None:
        """Add the numbers and bytes that clients have sent and received in a round.

        Args:
            client_ids: ``[k]``, the ids of the round's k clients.
            uploaded: ``[k]``, how many numbers each client sent to the server.
            downloaded: ``[k]``, how many numbers each client received from the server.
            uploaded_bytes: ``[k]``, the bytes of ``uploaded``. None: 4 bytes per number.
            downloaded_bytes: ``[k]``, the bytes of ``downloaded``. None: 4 bytes per number.
        """
        numbers = self._pair("uploaded", uploaded, downloaded, client_ids)
        if uploaded_bytes is None or downloaded_bytes is None:
            bytes = numbers.cpu().double() * 4
        else:
            bytes = self._pair("uploaded_bytes", uploaded_bytes, downloaded_bytes, client_ids)
        for name, now in (("exchanged", numbers), ("exchanged_bytes", bytes.ceil())):
            total = getattr(self, name)
            total[client_ids] += now.to(total)
        self.seen[client_ids] = True

    @staticmethod
    def _pair(name: str, up: Tensor, down: Tensor, client_ids: Tensor) -> Tensor:
        """Check and stack two counts to ``[k, 2]``."""
        if up.shape != client_ids.shape or down.shape != client_ids.shape:
            raise ValueError(
                f"expected {name} and {name.replace('up', 'down')} [{len(client_ids)}], got {list(up.shape)} and "
                f"{list(down.shape)}."
            )
        return torch.stack([up, down], dim=1)

    def compute(self) -> Tensor:
        """Compute the numbers sent and received, float64 ``[num_clients, 2]``, NaN for clients that never took part."""
        return self.exchanged.double().masked_fill(~self.seen[:, None], float("nan"))

    def per_client(self, value: Tensor) -> Tensor:
        """Return the sum of the numbers sent and received by each client, ``[num_clients]``."""
        return value.sum(-1)

    def diagnostics(self) -> dict[str, Tensor]:
        """Return the numbers of parameters and bytes that all clients together sent and received so far."""
        sums = {"parameters": self.exchanged.sum(0), "bytes": self.exchanged_bytes.sum(0)}
        return {
            f"{kind}_{way}": count
            for kind, counts in sums.items()
            for way, count in zip(("up", "down"), counts.cpu().double())
        }

    def columns(self) -> list[str]:
        return ["up", "down"]


def _any(stretches: Tensor) -> Tensor:
    return stretches.any(0)
