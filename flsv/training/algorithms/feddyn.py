"""FedDyn: adds a term to each client's loss that moves the loss's minimum to the minimum of the federation's loss.

Acar et al., "Federated Learning Based on Dynamic Regularization", ICLR 2021, Algorithm 1. FedDyn needs both
:class:`FedDyn` at the clients and :class:`FedDynServer` at the server, see ``configs/feddyn.yaml``.

Departures:

- The local problem is not solved exactly: clients take ``local_epochs`` with the module's own optimizer, as in the
  authors' code.
- A client's stored gradient g_i and the server's h are computed from the model that the client *sends*. If uploads
  (attacks, noise, compression) change the model, h is still the mean of the clients' g_i.
- The global model is the paper's theta^t. The authors' code also tests the plain mean of the clients' models.
"""

from __future__ import annotations

import torch
from torch import Tensor

from flsv.aggregation.base import Aggregator
from flsv.core import Round
from flsv.core.strategy import Contributions, FederationInfo
from flsv.training.algorithms.base import ClientAlgorithm, ClientContext
from flsv.utilities.declared import Positive
from flsv.utilities.errors import ConfigurationError

CLIENT_GRADIENT = "feddyn_gradient"


class FedDyn(ClientAlgorithm):
    """Client algorithm of FedDyn, which regularizes each client's loss. From x client i trains a model w_i with the
    loss L_i(w) - <g_i, w> + alpha/2 |w - x|^2, and then sets g_i <- g_i - alpha (w_i - x).

    L_i is the client's loss and x the global model of the round. g_i is 0 at first and converges to the gradient of L_i
    at the federation's final model. It is kept in the client's state. Clients send only w_i.

    Args:
        alpha: how strongly clients are pulled toward x, above 0. The paper tries 0.001 to 0.1. Fewer local steps need a
            larger alpha.

    Raises:
        ConfigurationError: ``alpha`` is not above 0. Before training: the aggregator is not :class:`FedDynServer`.

    Example:
        >>> FedDyn(alpha=0.1)
        FedDyn(alpha=0.1)
    """

    def __init__(self, alpha: Positive = 0.01) -> None:
        self.alpha = alpha

    def set_up(self, federation: FederationInfo) -> None:
        check_sides(federation)

    def begin_client(self, context: ClientContext) -> None:
        if CLIENT_GRADIENT not in context.state:
            parameters = context.start[: context.num_parameters]
            context.state[CLIENT_GRADIENT] = torch.zeros_like(parameters)

    @torch.no_grad()
    def gradients(
        self,
        context: ClientContext,
        parameters: list[Tensor],
        gradients: list[Tensor],
    ) -> None:
        initial_parameters = context.unflatten(context.start, parameters)
        drift = torch._foreach_sub(parameters, initial_parameters)
        torch._foreach_add_(gradients, drift, alpha=self.alpha)
        stored_gradients = context.unflatten(context.state[CLIENT_GRADIENT], parameters)
        torch._foreach_sub_(gradients, stored_gradients)

    def end_client(self, context: ClientContext) -> dict[str, Tensor]:
        assert context.sent is not None
        num_parameters = context.num_parameters
        update = context.sent[:num_parameters] - context.start[:num_parameters]
        context.state[CLIENT_GRADIENT] = context.state[CLIENT_GRADIENT] - self.alpha * update
        return {}


class FedDynServer(Aggregator):
    """Aggregator of FedDyn. The next global model x is the mean of the cohort's models w_i minus h / alpha,

        h <- h - alpha 1/n sum_{i in cohort} (w_i - x);   x <- 1/k sum_{i in cohort} w_i - h / alpha.

    The first equation divides by the number n of all clients, so that h is the mean of all clients' g_i (see
    :class:`FedDyn`). The second divides by the number k of clients in the cohort. The server stores h / alpha, so only
    the clients need to know alpha. Buffers (BatchNorm's statistics) are averaged. Leave ``server_lr`` at 1.

    Raises:
        ConfigurationError: before training: the client algorithm is not :class:`FedDyn`.

    Example:
        >>> FedDynServer()
        FedDynServer()
    """

    saved = ("_shift",)
    of_clients = True

    def begin(self, federation: FederationInfo) -> None:
        self._shift = federation.global_vector.new_zeros(federation.space.num_parameters)

    def set_up(self, federation: FederationInfo) -> None:
        check_sides(federation)
        self._num_clients = federation.num_clients

    def weights(self, round: Round, contributions: Contributions) -> Tensor:
        cohort_size = len(round)
        return torch.full((cohort_size,), 1 / cohort_size, dtype=torch.float64)

    def aggregate(self, round: Round, contributions: Contributions) -> tuple[Tensor, Tensor]:
        vector, weights = super().aggregate(round, contributions)  # the mean of the cohort's models
        num_parameters = round.space.num_parameters
        cohort_update = round.matrix.first_columns(num_parameters).combine(weights)
        # The mean over all n clients. Those outside the cohort have updates of zero.
        mean_update = cohort_update * (len(round) / self._num_clients)

        # The shift [P] is h / alpha, so the class's first equation is divided by alpha.
        self._next_shift = self._shift.to(mean_update) - mean_update
        vector[:num_parameters] -= self._next_shift
        return vector, weights

    def end_round(self, round: Round) -> None:
        self._shift = self._next_shift


def check_sides(federation: FederationInfo) -> None:
    """Check that both :class:`FedDyn` and :class:`FedDynServer` are set."""
    algorithm = federation.strategies.get("client_algorithm")
    aggregator = federation.strategies.get("aggregator")
    if not isinstance(algorithm, FedDyn) or not isinstance(aggregator, FedDynServer):
        raise ConfigurationError(
            f"FedDyn needs a client algorithm and an aggregator, but got client_algorithm={algorithm!r} with "
            f"aggregator={aggregator!r}. Set FederatedLoop(aggregator=FedDynServer(), client_algorithm=FedDyn(alpha))."
        )
