"""CommunicationCost: the numbers sent between clients and server.

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
    """Count the numbers, or bytes, that crossed one way for each client that was reached, ``[r]``."""
    assert round.channel is not None
    count = round.channel.bytes if bytes else round.channel.numbers
    return count(round.reached.tolist(), way).to(round.reached.device)


class CommunicationCost(ContributionMetric):
    r"""Parameters that every client has sent and received so far.

    .. math::
        c_i = \Bigl(\sum_{t : i \in C_t} \text{sent}_i^t,\ \sum_{t : i \in C_t} \text{received}_i^t\Bigr)

    As input to ``update``: ``client_ids [k]``, ``uploaded [k]`` and ``downloaded [k]``, numbers of parameters (entries
    of a model's vector, BatchNorm's statistics included, and of everything else that crosses), and, where they are
    known, ``uploaded_bytes [k]`` and ``downloaded_bytes [k]`` (else 4 bytes a number, for float32). A ``FederatedLoop``
    counts both, after compression, for the shared part of the model; the rest is assumed to be at the clients before
    the first round. ``compute`` gives float64 ``[num_clients, 2]``, numbers sent and received, whole ones; NaN for
    clients never seen. ``diagnostics`` gives all clients' totals in parameters and bytes, and those of the last round.

    When not to use it:
        As a contribution: it measures traffic, not usefulness.

    Args:
        num_clients: n, the number of clients. None inside a ``FederatedLoop``, which takes it from the data.
        kwargs: see ``torchmetrics.Metric``.

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
    #: Where a ``FederatedLoop`` finds the arguments of ``update``; clients whose updates were dropped are included.
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
    last: Tensor
    last_bytes: Tensor

    def init_states(self, num_clients: int, num_classes: int | None) -> None:
        # Integers: the sums exceed float32's exact integers, and not every device has float64.
        for name in ("exchanged", "exchanged_bytes"):
            self.add_state(name, torch.zeros(num_clients, 2, dtype=torch.long), dist_reduce_fx="sum")
        self.add_state("seen", torch.zeros(num_clients, dtype=torch.bool), dist_reduce_fx=_any)
        # The reduction takes the later stretch of rounds; -1 marks one without rounds.
        for name in ("last", "last_bytes"):
            self.add_state(name, torch.full((2,), -1), dist_reduce_fx=_later)

    def update(
        self,
        client_ids: Tensor,
        uploaded: Tensor,
        downloaded: Tensor,
        uploaded_bytes: Tensor | None = None,
        downloaded_bytes: Tensor | None = None,
    ) -> None:
        """Add a round.

        Args:
            client_ids: ``[k]``, the ids of the round's k clients.
            uploaded: ``[k]``, numbers sent to the server.
            downloaded: ``[k]``, numbers received from it.
            uploaded_bytes: ``[k]``; None: 4 bytes a number.
            downloaded_bytes: ``[k]``; likewise.
        """
        numbers = self._pair("uploaded", uploaded, downloaded, client_ids)
        if uploaded_bytes is None or downloaded_bytes is None:
            bytes = numbers.cpu().double() * 4
        else:
            bytes = self._pair("uploaded_bytes", uploaded_bytes, downloaded_bytes, client_ids)
        for name, now in (("exchanged", numbers), ("exchanged_bytes", bytes.ceil())):
            total = getattr(self, name)
            now = now.to(total)
            total[client_ids] += now
            setattr(self, name.replace("exchanged", "last"), now.sum(0))
        self.seen[client_ids] = True

    @staticmethod
    def _pair(name: str, up: Tensor, down: Tensor, client_ids: Tensor) -> Tensor:
        """Check and stack both ways' counts, ``[k, 2]``."""
        if up.shape != client_ids.shape or down.shape != client_ids.shape:
            raise ValueError(
                f"expected {name} and {name.replace('up', 'down')} [{len(client_ids)}], got {list(up.shape)} and "
                f"{list(down.shape)}."
            )
        return torch.stack([up, down], dim=1)

    def compute(self) -> Tensor:
        """Compute the numbers sent and received, float64 ``[num_clients, 2]``, NaN for clients never seen."""
        return self.exchanged.double().masked_fill(~self.seen[:, None], float("nan"))

    def per_client(self, value: Tensor) -> Tensor:
        """Sum up the numbers sent and received, ``[num_clients]``."""
        return value.sum(-1)

    def diagnostics(self) -> dict[str, Tensor]:
        """Return parameters and bytes, up and down, of all clients: so far, and in the last round."""
        result: dict[str, Tensor] = {}
        for when, numbers, bytes in (
            ("", self.exchanged.sum(0), self.exchanged_bytes.sum(0)),
            ("round_", self.last.clamp_min(0), self.last_bytes.clamp_min(0)),
        ):
            for kind, counts in (("parameters", numbers), ("bytes", bytes)):
                result |= {f"{when}{kind}_{way}": count for way, count in zip(("up", "down"), counts.cpu().double())}
        return result

    def columns(self) -> list[str]:
        return ["up", "down"]


def _any(stretches: Tensor) -> Tensor:
    return stretches.any(0)


def _later(stretches: Tensor) -> Tensor:
    """Return the last of ``[W, 2]`` that has rounds."""
    having = stretches[(stretches >= 0).all(1)]
    return having[-1] if len(having) else stretches[-1]
