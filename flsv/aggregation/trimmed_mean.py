"""TrimmedMean: the coordinate-wise mean without the largest and smallest values.

Yin, Chen, Ramchandran and Bartlett, "Byzantine-Robust Distributed Learning: Towards Optimal Statistical Rates", ICML
2018, Definition 2.
"""

from __future__ import annotations

import math
import warnings
from typing import Annotated

import torch
from annotated_types import Ge, Lt
from torch import Tensor

from flsv.aggregation.base import Aggregator
from flsv.core import Round
from flsv.core.strategy import Contributions, FederationInfo
from flsv.utilities.arguments import rounded_up
from flsv.utilities.declared import Positive
from flsv.utilities.errors import ConfigurationError


class TrimmedMean(Aggregator):
    """Coordinate-wise mean without the b = floor(trim * k) largest and the b smallest of k clients' values.

    All clients count equally, whatever their numbers of samples, as in the paper. A client's weight is its share of the
    averaged values of all coordinates. Buffers (BatchNorm's statistics) are averaged with these weights. If b
    = 0 for a cohort although ``trim`` is above 0, its plain mean is computed, with a warning.

    Args:
        trim: the paper's beta in [0, 0.5): the share of the cohort's values that is trimmed at either end. It should be
            at least the share of bad clients.
        server_lr: the server's learning rate, see :class:`flsv.aggregation.Aggregator`.

    Raises:
        ConfigurationError: an argument is out of range, or before training: ``trim`` is above 0 but trims no value.

    Example:
        >>> TrimmedMean(trim=0.3)
        TrimmedMean(trim=0.3)
    """

    robust = True

    def __init__(
        self, trim: Annotated[float, Ge(0), Lt(0.5)] = 0.2, *, server_lr: Positive = 1.0
    ) -> None:
        super().__init__(server_lr=server_lr)
        self.trim = trim

    def set_up(self, federation: FederationInfo) -> None:
        num_clients = federation.num_clients
        if self.trim > 0 and self._num_trimmed(num_clients) == 0:
            if num_clients > 2:
                advice = f"Set trim to at least {rounded_up(1 / num_clients)}"
            else:
                advice = "Use at least 3 clients"
            raise ConfigurationError(
                f"{self!r} trims no values with {num_clients} clients. {advice}, or set trim=0 for the plain mean."
            )

    def _num_trimmed(self, num_clients: int) -> int:
        return int(self.trim * num_clients + 1e-9)  # 0.3 * 10 is 2.9999...

    def weights(self, round: Round, contributions: Contributions) -> Tensor:
        _, weights = self._trimmed_mean(round)
        return weights

    def aggregate(self, round: Round, contributions: Contributions) -> tuple[Tensor, Tensor]:
        trimmed, weights = self._trimmed_mean(round)
        vector = round.combine(weights.to(round.client_vectors))
        vector[: round.space.num_parameters] = trimmed
        return vector, weights

    def _trimmed_mean(self, round: Round) -> tuple[Tensor, Tensor]:
        """Return the trimmed mean, and each client's share of the averaged values, ``[k]``."""
        num_clients = len(round)
        num_trimmed = self._num_trimmed(num_clients)  # on each side
        if self.trim > 0 and num_trimmed == 0:
            self._warn_of_plain_mean(round)
        rows = round.client_vectors
        num_parameters = round.space.num_parameters
        trimmed = rows.new_empty(num_parameters)
        counts = rows.new_zeros(num_clients, dtype=torch.float64)
        middle_ranks = slice(num_trimmed, num_clients - num_trimmed)
        for columns in round.matrix.blocks(num_parameters):
            sorted_values, order = rows[:, columns].sort(dim=0, stable=True)
            trimmed[columns] = sorted_values[middle_ranks].mean(0)
            averaged_clients = order[middle_ranks].flatten()
            counts += torch.bincount(averaged_clients, minlength=num_clients)
        # A client's weight is its share of the averaged values.
        return trimmed, counts / counts.sum()

    def _warn_of_plain_mean(self, round: Round) -> None:
        warnings.warn(
            f"in round {round.round_index + 1} {self!r} is the plain mean, since it trims no values with "
            f"{len(round)} clients. Draw at least {math.ceil(1 / self.trim)} clients a round.",
            stacklevel=3,
        )
