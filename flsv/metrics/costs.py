"""Metrics of the costs of taking part for a client: numbers sent and received, and privacy.

Wu et al. (pFedSV), IEEE Transactions on Mobile Computing, 2024, section VI-C and figures 8-10, count parameters.
:class:`flsv.privacy.GaussianPrivacy` explains what epsilon bounds.
"""

from __future__ import annotations

from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor

from flsv.data.groups import client_called
from flsv.metrics.base import ContributionMetric
from flsv.uploads.base import PrivateUpload


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
        num_clients: n, the number of clients. None inside a ``FederatedLoop``.
        kwargs: arguments of ``torchmetrics.Metric``.

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
    #: ``{argument of update: attribute of the round}``. ``reached`` includes clients whose updates were dropped.
    round_fields: ClassVar[dict[str, Any]] = {"client_ids": "reached"}
    exchanged: Tensor
    took_part: Tensor
    exchanged_bytes: Tensor

    def init_states(self, num_clients: int, num_classes: int | None) -> None:
        # Integers: the sums exceed float32's exact integers, and not every device has float64.
        nothing = torch.zeros(num_clients, 2, dtype=torch.long)  # sent, received
        for name in ("exchanged", "exchanged_bytes"):
            self.add_state(name, nothing.clone(), dist_reduce_fx="sum")
        self.add_state(
            "took_part",
            torch.zeros(num_clients, dtype=torch.bool),
            dist_reduce_fx=partial(torch.any, dim=0),
        )

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
            client_ids: ``[k]``, the round's clients.
            uploaded: ``[k]``, how many numbers each client sent to the server.
            downloaded: ``[k]``, how many numbers each client received from the server.
            uploaded_bytes: ``[k]``, the bytes of ``uploaded``. None: 4 bytes per number.
            downloaded_bytes: ``[k]``, the bytes of ``downloaded``. None: 4 bytes per number.
        """
        numbers = self._up_and_down(client_ids, uploaded, downloaded, "uploaded and downloaded")
        if uploaded_bytes is None or downloaded_bytes is None:
            num_bytes = numbers.cpu().double() * torch.float32.itemsize
        else:
            num_bytes = self._up_and_down(
                client_ids, uploaded_bytes, downloaded_bytes, "uploaded_bytes and downloaded_bytes"
            )
        self.exchanged[client_ids] += numbers.to(self.exchanged)
        self.exchanged_bytes[client_ids] += num_bytes.ceil().to(self.exchanged_bytes)
        self.took_part[client_ids] = True

    @staticmethod
    def _up_and_down(client_ids: Tensor, up: Tensor, down: Tensor, names: str) -> Tensor:
        """Check two counts of k clients, ``up`` and ``down``, and stack them to ``[k, 2]``."""
        if up.shape != client_ids.shape or down.shape != client_ids.shape:
            raise ValueError(
                f"expected {names} of the shape [{len(client_ids)}], got {list(up.shape)} and {list(down.shape)}."
            )
        return torch.stack([up, down], dim=1)  # [k, 2]

    def compute(self) -> Tensor:
        """Compute the numbers sent and received, float64 ``[num_clients, 2]``, NaN for clients that never took part."""
        never_took_part = ~self.took_part[:, None]
        return self.exchanged.double().masked_fill(never_took_part, torch.nan)

    def per_client(self, value: Tensor) -> Tensor:
        """Return the sum of the numbers sent and received by each client, ``[num_clients]``."""
        return value.sum(-1)

    def diagnostics(self) -> dict[str, Tensor]:
        """Return the numbers of parameters and bytes that all clients together sent and received so far."""
        parameters_up, parameters_down = self.exchanged.sum(0).cpu().double()
        bytes_up, bytes_down = self.exchanged_bytes.sum(0).cpu().double()
        return {
            "parameters_up": parameters_up,
            "parameters_down": parameters_down,
            "bytes_up": bytes_up,
            "bytes_down": bytes_down,
        }

    def columns(self) -> list[str]:
        return ["up", "down"]


class PrivacyLoss(ContributionMetric):
    r"""The epsilon that each client has spent so far.

    .. math::
        \epsilon_i = \epsilon\bigl(T_i; \text{clip}, \text{noise}, \delta\bigr)

    with :math:`T_i` the number of rounds in which client *i* took part.

    ``compute`` gives ``[num_clients]``, infinite if no noise is added, NaN for clients that never took part.
    ``diagnostics`` returns :math:`T_i` and, if the mechanism has a ``max_epsilon``, the number of rounds that each
    client can still afford, both ``[num_clients]``. A ``FederatedLoop`` with ``privacy`` adds this metric under the
    name ``"epsilon"``.

    When not to use it:
        As a contribution, or to compare runs with different deltas: it bounds the information in updates, and does not
        measure the success of an attack.

    Args:
        privacy: the mechanism that the clients apply to their updates.
        num_clients: n, the number of clients. None inside a ``FederatedLoop``.
        kwargs: arguments of ``torchmetrics.Metric``.

    Raises:
        ValueError: client ids are unknown or repeated.

    Example:
        >>> from flsv.privacy import GaussianPrivacy
        >>> metric = PrivacyLoss(GaussianPrivacy(clip=1.0, noise_multiplier=2.0, max_epsilon=3.0), num_clients=3)
        >>> metric.update(torch.tensor([0, 1]))
        >>> metric.update(torch.tensor([0]))
        >>> metric.compute()
        tensor([2.9432, 1.9931,    nan])
        >>> metric.diagnostics()["affordable"]
        tensor([0., 1., 2.])
    """

    unit = "epsilon spent"
    sign = "less is more private; it only grows."
    cost = "none."
    higher_is_better = False
    per_class = False
    plot_lower_bound = 0.0

    #: ``{argument of update: attribute of the round}``. ``senders`` includes clients whose updates the server dropped.
    round_fields: ClassVar[dict[str, Any]] = {"client_ids": "senders"}
    participations: Tensor

    def __init__(
        self, privacy: PrivateUpload, num_clients: int | None = None, **kwargs: Any
    ) -> None:
        self.privacy = privacy
        super().__init__(num_clients, num_classes=None, **kwargs)

    def init_states(self, num_clients: int, num_classes: int | None) -> None:
        self.add_state(
            "participations", torch.zeros(num_clients, dtype=torch.int64), dist_reduce_fx="sum"
        )

    def update(self, client_ids: Tensor) -> None:
        """Count a round. ``client_ids [k]`` are the ids of the k clients that have sent an update in it."""
        self.participations = self.participations.index_add(
            0, client_ids, torch.ones_like(client_ids)
        )

    def compute(self) -> Tensor:
        """Compute the epsilon that each client has spent, ``[num_clients]``. NaN for clients that never took part."""
        epsilons = [
            self.privacy.epsilon(rounds) if rounds else torch.nan
            for rounds in self.participations.tolist()
        ]
        return torch.tensor(epsilons, device=self.participations.device)

    def diagnostics(self) -> dict[str, Tensor]:
        """Return each client's numbers of rounds, ``[num_clients]``. ``rounds`` counts those in which it took part. If
        the mechanism has a ``max_epsilon``, ``affordable`` counts those that remain.
        """
        rounds = self.participations.float()
        affordable = self.privacy.affordable_rounds()
        if affordable is None:
            return {"rounds": rounds}
        return {"rounds": rounds, "affordable": affordable - rounds}

    def spent(self) -> str | None:
        """Return a message if the client with the most rounds would exceed ``max_epsilon`` in another round. None if
        all clients can afford another round.

        All clients are examined, since the clients of the next round are not drawn yet.
        """
        affordable = self.privacy.affordable_rounds()
        if affordable is None or int(self.participations.max()) < affordable:
            return None
        client = int(self.participations.argmax())
        client_name = client_called(client, self.client_names or ())
        num_rounds = int(self.participations[client])
        epsilon = self.privacy.epsilon(num_rounds)
        next_epsilon = self.privacy.epsilon(num_rounds + 1)
        return (
            f"{client_name} has spent epsilon = {epsilon:.4g} in {num_rounds} rounds, and one more would make it "
            f"{next_epsilon:.4g}, above max_epsilon={self.privacy.max_epsilon:g} (delta={self.privacy.delta:g})"
        )
