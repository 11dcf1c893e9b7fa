"""FedBary's metrics: the distance of each client's data from the server's, and its share of unsuspicious samples.

Li et al., "Data Valuation and Detections in Federated Learning" (FedBary), CVPR 2024, section 4.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

import torch
from annotated_types import Ge
from torch import Tensor

from flsv.core import Client, LocalData
from flsv.functional import contribution_shares
from flsv.metrics.base import Claims, ContributionMetric, latest
from flsv.valuation import FedBary, Valuation
from flsv.valuation.features import Features


class WassersteinContribution(ContributionMetric):
    r"""FedBary's contribution shares: how close each client's data are to the validation data.

    .. math::
        \phi_i = \frac{1 / W(P_i, Q)}{\sum_j 1 / W(P_j, Q)}

    with W the Wasserstein distance between client *i*'s training samples and the server's validation set or, if there
    is none, the barycenter of the round's clients. Server and clients compute it together, and send only interpolated
    points and distances. No coalition is evaluated, and the cost is linear in the number of clients.

    ``compute`` gives ``[num_clients]``, shares that sum to 1 over the clients seen. NaN for clients that never took
    part or have no samples. ``diagnostics`` returns the distances, in units of the features. A client that does not
    take part in a round keeps its last distance. Features of the model change their scale from round to round, so
    compare only distances of the same round.

    When not to use it:
        To value the effect of data on training: it compares samples, not models. With images and no good features.
        Where clients may send made-up summaries, which nothing checks.

    Args:
        num_clients: n, the number of clients. None inside a ``FederatedLoop``.
        features: ``"penultimate"``, ``"pixels"``, ``"pca"`` or a :class:`flsv.valuation.features.Features`.
        support: the number of points that clients and server exchange. None: 100, or as many as the client with the
            fewest samples can send without revealing them, see :class:`flsv.valuation.FedBary`.
        iterations: the number of exchanges between the server and each client.
        label_weight: the weight of the label term in the distance. 0: no label term.
        covariance: covariance of a class in the label term: ``"diag"``, ``"none"`` or ``"full"``.
        every: compute distances every ``every`` rounds. 0: once for every client, which is enough for features that
            need no model.
        allow_reconstruction: whether to allow a support from which the server can reconstruct samples.
        options: further arguments of :class:`flsv.valuation.FedBary`.
        kwargs: arguments of ``torchmetrics.Metric``.

    Raises:
        ConfigurationError: an argument is out of range, or clients have too few samples for the support, or at an
            update: clients have different features.

    Example:
        >>> from flsv.valuation import clients_of, server_of
        >>> y = torch.tensor([0, 0, 1, 1])
        >>> clients = clients_of([(torch.eye(4), y), (torch.eye(4) + 3, y), (torch.eye(4), y)])
        >>> metric = WassersteinContribution(num_clients=3, features="pixels", support=1)
        >>> metric.update(torch.tensor([0, 1]), clients[:2], server_of(torch.eye(4) + 1, y))
        >>> metric.compute().round(decimals=1)
        tensor([0.6000, 0.4000,    nan])
    """

    unit = "contribution share"
    sign = "from 0 to 1, shares that sum to 1 over the clients seen; more is closer to the validation data."
    cost = "linear in the number of clients; no coalition."
    claims: Claims = ("value", "weight")
    to_pay_by = True
    per_class = False
    needs_classes = True  # the distance is between samples with classes
    plot_lower_bound = 0.0
    values_samples = False

    distances: Tensor

    def __init__(
        self,
        num_clients: int | None = None,
        features: str | Features = "penultimate",
        support: int | None = None,
        iterations: int = 10,
        label_weight: float = 1.0,
        covariance: str = "diag",
        every: Annotated[int, Ge(0)] = 1,
        allow_reconstruction: bool = False,
        options: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        self.valuer = FedBary(
            features,
            support,
            iterations,
            label_weight=label_weight,
            covariance=covariance,  # type: ignore[arg-type]  # FedBary checks the name
            allow_reconstruction=allow_reconstruction,
            **(options or {}),
        )
        self._sizes: dict[int, int] = {}
        self.every = every
        super().__init__(num_clients, num_classes=None, **kwargs)

    needs: Sequence[str] | None = ("generator",)

    @property
    def round_fields(self) -> dict[str, Any]:
        """Functions ``{argument: f(round)}`` with which a ``FederatedLoop`` computes arguments of ``update``."""
        return {"generator": lambda round: round.generator(type(self).__name__)}

    def check(self, num_samples: Tensor) -> None:
        """Store the clients' numbers of samples, and check that the support suits the client with the fewest.

        Raises:
            ConfigurationError: this client has too few samples.
        """
        self._sizes = dict(enumerate(num_samples.tolist()))
        self.valuer.support_for(self._sizes)

    def init_states(self, num_clients: int, num_classes: int | None) -> None:
        self.add_state("distances", torch.full((num_clients,), torch.nan), dist_reduce_fx=latest)

    def update(
        self,
        client_ids: Tensor,
        clients: Sequence[Client],
        server_data: LocalData | None = None,
        global_vector: Tensor | None = None,
        round_index: int = 0,
        generator: torch.Generator | None = None,
    ) -> None:
        """Compute the distances of a round's clients, in the rounds that ``every`` selects.

        Args:
            client_ids: ``[k]``, the round's clients.
            clients: these clients, in the same order.
            server_data: the server's data. None: the target is the clients' barycenter.
            global_vector: ``[P]``, the global model, for features that need it.
            round_index: the round's index, from 0.
            generator: the random generator of the start points. None: torch's default.
        """
        self._check_asked(client_ids, clients)
        valued_clients = self._clients_to_value(clients, round_index)
        if valued_clients:
            valuation = self.valuer.value(
                valued_clients,
                server_data,
                generator,
                global_vector,
                values_samples=self.values_samples,
                others=self._sizes,
            )
            self._store_distances(valuation)

    def _clients_to_value(self, clients: Sequence[Client], round_index: int) -> list[Client]:
        if self.every == 0:
            has_no_distance = self.distances.isnan()
            return [client for client in clients if has_no_distance[client.id]]
        if round_index % self.every == 0:
            return list(clients)
        return []

    def _store_distances(self, valuation: Valuation) -> None:
        """Store a valuation's distances in the states."""
        self.distances = self.distances.clone()
        self.distances[list(valuation.clients)] = valuation.distances.to(self.distances)

    def compute(self) -> Tensor:
        """Compute the contribution shares ``[num_clients]``, NaN for clients that never took part."""
        return contribution_shares(self.distances)

    def diagnostics(self) -> dict[str, Tensor]:
        """Return ``distance``, each client's last distance from the validation set or the barycenter,
        ``[num_clients]``."""
        return {"distance": self.distances.clone()}


class CalibratedOTGradient(WassersteinContribution):
    r"""The share of a client's samples that are not suspicious.

    The calibrated gradient g_l of a client's sample l is the rate at which the Wasserstein distance between the
    client's and the server's data grows if the sample gets more weight: *positive means harmful*.

    .. math::
        g_l = f_l - \frac{1}{m - 1} \sum_{j \ne l} f_j

    with m the number of the client's samples, and f_l the dual potential of sample l in the optimal transport to the
    points that the server has sent. A client's gradients sum to 0, so their mean carries no information. The client's
    contribution is therefore 1 minus the share of its flagged samples, so that more is better. The gradients stay at
    the client, which reads them by ``client.request(flsv.valuation.sample_values)``. The client sends only the number
    of flagged samples.

    The inputs of ``update``, and all arguments that are not listed here, are those of :class:`WassersteinContribution`.
    ``compute`` returns ``[num_clients]`` in [0, 1], NaN for clients that never took part. ``diagnostics`` returns the
    distances and the shares of flagged samples.

    When not to use it:
        For payment: it counts samples that look unlike the server's samples, among them rare correct samples. With few
        samples per client, where it flags nearly as many correct as wrong samples.

    Args:
        rule: the rule by which samples are flagged, see :func:`flsv.valuation.flag_samples`. ``"positive"`` is the
            paper's rule, which flags about half of a clean client's samples.

    Example:
        >>> from flsv.valuation import clients_of, sample_values, server_of
        >>> x = torch.randn(300, 8, generator=torch.Generator().manual_seed(0))
        >>> y = torch.zeros(100, dtype=torch.long)
        >>> bad = x[100:200].clone()
        >>> bad[:20] += 9
        >>> clients = clients_of([(x[:100], y), (bad, y)])
        >>> metric = CalibratedOTGradient(num_clients=2, features="pixels")
        >>> metric.update(torch.arange(2), clients, server_of(x[200:], y))
        >>> metric.compute()[1]
        tensor(0.8000)
        >>> clients[1].request(sample_values).flagged.nonzero().max()
        tensor(19)
    """

    unit = "share of samples not flagged"
    sign = "from 0 to 1, more is better: 1 where no sample is suspicious."
    claims = ("value",)
    to_pay_by = False
    plot_upper_bound = 1.0
    values_samples = True

    flagged: Tensor

    def __init__(
        self,
        num_clients: int | None = None,
        rule: str = "outlier",
        options: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        all_options = dict(rule=rule, **(options or {}))
        super().__init__(num_clients, options=all_options, **kwargs)

    def init_states(self, num_clients: int, num_classes: int | None) -> None:
        super().init_states(num_clients, num_classes)
        self.add_state("flagged", torch.full((num_clients,), torch.nan), dist_reduce_fx=latest)

    def _store_distances(self, valuation: Valuation) -> None:
        super()._store_distances(valuation)
        self.flagged = self.flagged.clone()
        self.flagged[list(valuation.clients)] = valuation.flagged_shares.to(self.flagged)

    def compute(self) -> Tensor:
        """Compute 1 minus each client's share of flagged samples, ``[num_clients]``. NaN for clients that never took
        part."""
        return 1 - self.flagged

    def diagnostics(self) -> dict[str, Tensor]:
        """Return each client's ``distance``, its last Wasserstein distance as in :class:`WassersteinContribution`, and
        ``flagged``, its share of flagged samples, both ``[num_clients]``."""
        return {**super().diagnostics(), "flagged": self.flagged.clone()}
