"""ShapFed-WA: client weights in proportion to class-specific Shapley values.

Tastan et al., "Redefining Contributions: Shapley-Driven Federated Learning", IJCAI 2024, equations 6-7 and Algorithm 1.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from flsv.aggregation.base import Aggregator
from flsv.core import Round
from flsv.core.strategy import Contributions
from flsv.functional import participant_weights
from flsv.functional.nan_to_mean import nan_to_mean
from flsv.utilities.declared import Positive


class ShapFedWA(Aggregator):
    """Average of the clients' models, weighted by class-specific Shapley values. The weights gamma~_i are those of
    earlier rounds.

    The order is Algorithm 1's: round t is aggregated with the contributions up to round t-1 (all equal in the first
    round), then the contributions are updated with round t's aggregate.

    Choices that the paper leaves open: a client without a contribution, because it takes part for the first time, gets
    the mean contribution of the round's other clients. The cohort's weights sum to 1.

    A cosine measures the direction of a client's update and not the amount of data behind it, so clients of different
    sizes get nearly the same weight. ``weighting="samples"``, which is not in the paper, multiplies gamma by the
    client's number of samples: FedAvg's weights, corrected by contributions.

    Args:
        metric: the name of a :class:`flsv.metrics.ClassSpecificShapley` among the loop's metrics.
        weighting: factor on gamma: ``"uniform"``: 1, as in the paper. ``"samples"``: the client's number of samples.
        server_lr: the server's learning rate, see :class:`flsv.aggregation.Aggregator`.

    Raises:
        ConfigurationError: the weighting is unknown.

    Example:
        >>> ShapFedWA(weighting="samples")
        ShapFedWA(weighting='samples')
    """

    metric_shape = ("n", "M")

    def __init__(
        self,
        metric: str = "cssv",
        weighting: Literal["uniform", "samples"] = "uniform",
        *,
        server_lr: Positive = 1.0,
    ) -> None:
        super().__init__(server_lr=server_lr)
        self.metric: str = metric
        self.weighting = weighting

    def weights(self, round: Round, contributions: Contributions) -> Tensor:
        scores = self._scores(round, contributions)
        if self.weighting == "samples":
            scores = scores * round.num_samples.to(scores)
        total = scores.sum()
        equal_weight = 1 / len(scores)
        return torch.where(total > 0, scores / total, equal_weight)

    def _scores(self, round: Round, contributions: Contributions) -> Tensor:
        """Return gamma ``[k]``, the contributions of the round's clients by earlier rounds, in [0, 1]."""
        class_values = contributions.get(self.metric)  # [n, M]
        if class_values is None:
            return torch.ones(len(round))
        cohort_values = class_values[round.client_ids.to(class_values.device)]
        scores, _shares = participant_weights(cohort_values.double())
        return nan_to_mean(scores)
