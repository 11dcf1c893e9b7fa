"""FedBuff: the server updates the model when K updates have arrived, each trained from a possibly older model.

Nguyen et al., "Federated Learning with Buffered Asynchronous Aggregation", AISTATS 2022, Algorithm 1, with the
staleness weights of its experiments.

flsv simulates FedBuff in rounds. A round stands for a full buffer: the sampler draws the K clients whose updates have
arrived. Each of them has trained from the model that it downloaded when its previous update arrived; since then the
server has made tau steps. The paper draws the durations of training; here the sampler determines them: a client that is
rarely drawn is slow. The training itself is computed in the round in which the update arrives, which changes no
result. Every client's first update starts from the current model.
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
from flsv.utilities.host_copies import on_host


class FedBuff(Aggregator):
    """Aggregator with the result x + 1/K sum_i s(tau_i) d_i, where x is the global model, d_i the update of client i of
    the round's K clients, tau_i the number of the server's steps since client i downloaded its model, and
    s(tau) = 1 / (1 + tau)^exponent.

    As in the paper, the weights do not sum to 1: stale updates move the model less. Buffers (BatchNorm's statistics)
    are averaged with weights that sum to 1. ``server_lr`` is the paper's server learning rate. Requires the
    personalizer :class:`StaleStarts`, which lets clients start from their old models: ``configs/fedbuff.yaml``.

    Args:
        exponent: exponent of the staleness weight; 0.5 in the paper; with 0 staleness has no effect.
        server_lr: the server's learning rate, see :class:`flsv.aggregation.Aggregator`.

    Raises:
        ConfigurationError: the exponent is negative; before training: the personalizer is not :class:`StaleStarts`.

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
        """Return how many steps the server has made since each of the round's k clients downloaded its model, int64
        ``[k]``."""
        now, ids = round.round_index, on_host(round.client_ids)
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
        self._versions.update(dict.fromkeys(on_host(round.client_ids), round.round_index + 1))


class StaleStarts(Personalizer):
    """Personalizer of FedBuff: each client trains from the global model that its own last update was aggregated into.

    The server stores one model for every client that has taken part.

    Example:
        >>> StaleStarts()
        StaleStarts()
    """

    def personalize(self, round: Round, contributions: Contributions, models: Starts) -> Starts:
        assert round.server_vector is not None
        return dict.fromkeys(on_host(round.client_ids), round.server_vector)
