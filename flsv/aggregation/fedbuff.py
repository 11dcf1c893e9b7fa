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
from flsv.core.strategy import Contributions, Federation
from flsv.personalization import Personalizer
from flsv.personalization.base import Starts
from flsv.utilities.declared import NonNegative, Positive
from flsv.utilities.errors import ConfigurationError


class FedBuff(Aggregator):
    """x + 1/K sum_i s(tau_i) d_i over the cohort's updates d_i, with s(tau) = 1 / (1 + tau)^exponent.

    The weights do not sum to 1, as in the paper: what is stale moves the model less. Buffers (BatchNorm's statistics)
    are averaged with weights that do. ``server_lr`` is the paper's server learning rate. It goes with
    :class:`StaleStarts`, which gives the clients their old models: ``configs/fedbuff.yaml``.

    Args:
        exponent: how much staleness counts; the paper's is 0.5, and with 0 it does not.
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

    def begin(self, federation: Federation) -> None:
        self.resume(federation)
        self._versions = {}

    def resume(self, federation: Federation) -> None:
        if not isinstance(federation.strategies.get("personalizer"), StaleStarts):
            raise ConfigurationError(
                f"{self!r}: clients would start from the current model, and not from the one that they downloaded when "
                "they sent their last update. Set personalizer: flsv.aggregation.StaleStarts."
            )

    def staleness(self, round: Round) -> Tensor:
        """int64 ``[k]``: how many steps the server has made since each client downloaded its model."""
        now, ids = round.round_index, round.client_ids.tolist()
        # Who has sent nothing yet started from the current model.
        steps = [now - self._versions.get(client, now) for client in ids]
        return torch.tensor(steps, device=round.client_ids.device)

    def weights(self, round: Round, contributions: Contributions) -> Tensor:
        return (1.0 + self.staleness(round).double()).pow(-self.exponent) / len(round)

    def aggregate(self, round: Round, contributions: Contributions) -> tuple[Tensor, Tensor]:
        weights = self.weights(round, contributions).to(round.client_vectors)
        vector, cut = round.combine(weights), round.space.num_parameters  # its buffers are those of the next model
        vector[:cut] = round.global_vector[:cut] + round.matrix.combine(weights, cut)
        return vector, weights

    def end_round(self, round: Round) -> None:
        self._versions.update(dict.fromkeys(round.client_ids.tolist(), round.round_index + 1))


class StaleStarts(Personalizer):
    """Starts each client from the global model of the round in which its last update arrived.

    The server holds these models, one for every client that has been in a cohort.

    Example:
        >>> StaleStarts()
        StaleStarts()
    """

    def personalize(self, round: Round, contributions: Contributions, models: Starts) -> Starts:
        assert round.server_vector is not None
        return dict.fromkeys(round.client_ids.tolist(), round.server_vector)
