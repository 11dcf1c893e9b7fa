"""SCAFFOLD: control variates that correct the clients' gradients for client drift.

Karimireddy et al., "SCAFFOLD: Stochastic Controlled Averaging for Federated Learning", ICML 2020, Algorithm 1 with
option II. The server's average is ``FedAvg(weighting="uniform")``, and the paper's eta_g is
``FedAvg(server_lr=...)``: ``configs/scaffold.yaml``.

Departures:

- The paper's K eta_l, by which option II divides, is the sum of the learning rates of the client's steps.
- The paper's y_i in option II is the model that the client *sends*. If uploads (attacks, compression) change the model,
  the server's variate is still the mean of the clients' variates.
- The server computes c_i+ - c_i itself, from the client's K eta_l and y_i after the filters. A robust aggregator
  replaces their mean.
- With gradient clipping, corrected gradients are clipped. With weight decay, the variates include the decay.
"""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import Tensor

from flsv.core import FederationState, Round
from flsv.core.strategy import FederationInfo
from flsv.data.groups import client_called
from flsv.functional.distances import distances
from flsv.functional.outliers import large_updates
from flsv.training.algorithms.base import ClientAlgorithm, ClientContext, is_plain_sgd
from flsv.utilities.errors import ConfigurationError
from flsv.utilities.host_copies import on_host

VARIATE = "control_variate"
LEARNING_RATE_SUM = "learning_rate_sum"


class SCAFFOLD(ClientAlgorithm):
    """Client algorithm that corrects gradients by control variates against client drift. The variates are c at the
    server and c_i at client i, all 0 at first.

    In a round that starts from the global model x, client i takes K steps of its model y_i, along its gradients g_i,

        y_i <- y_i - lr (g_i(y_i) - c_i + c),  K times from y_i = x;   c_i+ = c_i - c + (x - y_i) / (K lr);
        c <- c + 1/n sum_{i in cohort} (c_i+ - c_i),

    where n is the number of all clients, and c_i+ replaces c_i. Only parameters have variates. Buffers (BatchNorm's
    statistics) are averaged as in FedAvg. The server sends c beside the model, and each client reports K lr, from which
    the server computes the change of c_i. It excludes a change that is far larger than the cohort's, with a warning
    that names the client.

    Raises:
        ConfigurationError: before training: the optimizer is not a single ``torch.optim.SGD`` with one learning rate
            and no momentum. With momentum, (x - y_i) / (K lr) is many times a gradient, and the variates would grow
            without bound.

    Example:
        >>> SCAFFOLD()
        SCAFFOLD()
    """

    sends = (VARIATE,)
    reports = (LEARNING_RATE_SUM,)
    saved = ("_variate",)

    def begin(self, federation: FederationInfo) -> None:
        self._variate = federation.global_vector.new_zeros(federation.space.num_parameters)

    def set_up(self, federation: FederationInfo) -> None:
        self._num_clients = federation.num_clients
        self._names = federation.client_names
        self._aggregator: Any = federation.strategies["aggregator"]
        if not is_plain_sgd(federation.optimizers):
            raise ConfigurationError(
                f"{self!r} computes the clients' mean gradients from their updates. This needs one torch.optim.SGD "
                "with momentum=0 and a single learning rate, but the module configures "
                f"{list(federation.optimizers)}."
            )

    def send(self, client: int, start: Tensor | None, state: FederationState) -> dict[str, Tensor]:
        return {VARIATE: self._variate.to(state.model())}

    def begin_client(self, context: ClientContext) -> None:
        if VARIATE not in context.state:
            context.state[VARIATE] = torch.zeros_like(context.received(VARIATE))

    @torch.no_grad()
    def gradients(
        self, context: ClientContext, parameters: list[Tensor], gradients: list[Tensor]
    ) -> None:
        server_variate = context.unflatten(context.received(VARIATE), parameters)
        torch._foreach_add_(gradients, server_variate)
        client_variate = context.unflatten(context.state[VARIATE], parameters)
        torch._foreach_sub_(gradients, client_variate)

    def end_client(self, context: ClientContext) -> dict[str, float]:
        assert context.sent is not None
        num_parameters = context.num_parameters
        # All learning rates may be 0, as at the start of a warm-up. Then the model has not changed.
        if context.lr_sum != 0:
            # The variate c_i <- c_i - c + (x - y_i) / (K lr), with c the server's variate, x the model that the client
            # started from, y_i the one that it sends, and K lr the sum of its learning rates.
            descent = context.start[:num_parameters] - context.sent[:num_parameters]
            mean_gradient = descent / context.lr_sum
            sum_of_terms = context.state[VARIATE] + mean_gradient
            context.state[VARIATE] = sum_of_terms - context.received(VARIATE)
        return {LEARNING_RATE_SUM: context.lr_sum}

    def end_round(self, round: Round) -> None:
        variate = self._variate.to(round.client_updates)  # [P]
        mean_gradients = _mean_gradients(round, variate)
        origin = variate.new_zeros(1)
        norms = distances(mean_gradients, origin)  # [k], in float64 without a copy of the matrix
        is_excluded = large_updates(norms)
        self._warn_of(round.client_ids[is_excluded])
        mean_gradients[is_excluded] = variate

        if self._aggregator.robust:
            # A robust aggregator averages the gradients as if they were models.
            round_of_gradients = round.with_models(mean_gradients, torch.zeros_like(variate))
            mean, _ = self._aggregator.aggregate(round_of_gradients, {})
        else:
            mean = mean_gradients.mean(0)
        share_of_clients = len(round) / self._num_clients
        self._variate = variate + share_of_clients * (mean - variate)

    def _warn_of(self, clients: Tensor) -> None:
        for client in on_host(clients):
            warnings.warn(
                f"{client_called(client, self._names)} reports learning rates that do not fit its update. The "
                "server's control variate excludes this client in this round.",
                stacklevel=3,
            )


def _mean_gradients(round: Round, variate: Tensor) -> Tensor:
    """Compute each client's mean gradient over its steps, ``[k, P]``: ``variate`` for a client that has not moved."""
    updates = round.client_updates  # [k, P]
    lr_sums = round.reports[LEARNING_RATE_SUM].to(updates)[:, None]  # [k, 1]
    # An update is impossible with a sum of 0 or less. The gradient becomes infinite, and is excluded.
    non_negative_sums = lr_sums.clamp_min(0)
    gradients_of_movers = updates / -non_negative_sums
    # A client whose learning rates were all 0 has no update, and keeps its variate.
    has_not_moved = (lr_sums == 0) & (updates == 0)
    return torch.where(has_not_moved, variate, gradients_of_movers)
