"""FedBuff: the server steps when K updates have arrived, each trained from a possibly older model.

Nguyen et al., "Federated Learning with Buffered Asynchronous Aggregation", AISTATS 2022, Algorithm 1, with the
staleness weights of its experiments.

Simulated in rounds. A round is a full buffer: its cohort are the K clients whose updates have arrived, drawn by the
sampler. Each of them has trained from the model that it downloaded when its previous update arrived; in between, the
server has made tau steps. The paper draws the durations of training; here the sampler decides: a client that is drawn
rarely is a slow one. Training itself happens in the round of arrival, which changes nothing but the clock; every
client's first update starts from the current model.
"""

from __future__ import annotations

import torch
from torch import Tensor

from flsv.aggregation.base import Aggregator
from flsv.core import Round
from flsv.core.strategy import Contributions, FederationInfo
from flsv.personalization import Personalizer
from flsv.personalization.base import Starts
from flsv.utilities.declared import NonNegative, Positive
from flsv.utilities.errors import ConfigurationError


class FedBuff(Aggregator):
    """Aggregate x + 1/K sum_i s(tau_i) d_i over the cohort's updates d_i, with s(tau) = 1 / (1 + tau)^exponent.

    As in the paper, the weights do not sum to 1: stale updates move the model less. Buffers (BatchNorm's statistics)
    are averaged with weights that sum to 1. ``server_lr`` is the paper's server learning rate. Requires the
    personalizer :class:`StaleStarts`, from which the clients get their old models: ``configs/fedbuff.yaml``.

    Args:
        exponent: effect of staleness; 0.5 in the paper, 0 for none.
        server_lr: see :class:`flsv.aggregation.Aggregator`.

    Raises:
        ConfigurationError: a negative exponent; before training, another personalizer.

    Example:
        >>> FedBuff()
        FedBuff()
    """

    of_clients = True
    saved = ("_versions",)

    def __init__(self, exponent: NonNegative = 0.5, *, server_lr: Positive = 1.0) -> None:
        super().__init__(server_lr=server_lr)
        self.exponent = exponent
        self._versions: dict[int, int] = {}

    def begin(self, federation: FederationInfo) -> None:
        self.resume(federation)
        self._versions = {}

    def resume(self, federation: FederationInfo) -> None:
        if not isinstance(federation.strategies.get("personalizer"), StaleStarts):
            raise ConfigurationError(
                f"{self!r}: clients would start from the current model, and not from the one that they downloaded when "
                "they sent their last update. Set personalizer: flsv.aggregation.StaleStarts."
            )

    def staleness(self, round: Round) -> Tensor:
        """Count the server's steps since each client of the round downloaded its model, int64 ``[k]``."""
        now, ids = round.round_index, round.client_ids.tolist()
        # A client that has not sent anything yet started from the current model.
        steps = [now - self._versions.get(client, now) for client in ids]
        return torch.tensor(steps, device=round.client_ids.device)

    def weights(self, round: Round, contributions: Contributions) -> Tensor:
        return (1.0 + self.staleness(round).double()).pow(-self.exponent) / len(round)

    def aggregate(self, round: Round, contributions: Contributions) -> tuple[Tensor, Tensor]:
        weights = self.weights(round, contributions).to(round.client_vectors)
        vector, cut = round.combine(weights), round.space.num_parameters  # its buffers are the next model's
        vector[:cut] = round.global_vector[:cut] + round.matrix.combine(weights, cut)
        return vector, weights

    def end_round(self, round: Round) -> None:
        self._versions.update(dict.fromkeys(round.client_ids.tolist(), round.round_index + 1))


class StaleStarts(Personalizer):
    """Start points for FedBuff: the global model of the round in which a client's last update arrived.

    The server stores one model for every client that has been in a cohort.

    Example:
        >>> StaleStarts()
        StaleStarts()
    """

    def personalize(self, round: Round, contributions: Contributions, models: Starts) -> Starts:
        assert round.server_vector is not None
        return dict.fromkeys(round.client_ids.tolist(), round.server_vector)
