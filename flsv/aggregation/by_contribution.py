"""Aggregators whose weights are made of what a metric says of the clients.

ShapFed-WA: weights clients in proportion to their contributions so far.

Tastan et al., "Redefining Contributions: Shapley-Driven Federated Learning", IJCAI 2024, equations 6-7 and Algorithm 1.

CGSV's aggregation: averages the directions of the updates, weighted by reputation.

Xu et al., "Gradient Driven Rewards to Guarantee Fairness in Collaborative Machine Learning", NeurIPS 2021,
Algorithm 1.

FedCE: weights clients by their estimated contributions.

Jiang et al., "Fair Federated Medical Image Segmentation via Client Contribution Estimation", CVPR 2023.

ShapleyWeighted (AFedSV): weights clients by their Shapley values so far.

Sun et al., "ShapleyFL: Robust Federated Learning Based on Shapley Value", KDD 2023, Algorithm 1 and equation 5.

ShapleySoftmax, FedSV as an aggregation: a softmax of the round's Shapley values.

It is the baseline called FedSV in Sun et al., "ShapleyFL: Robust Federated Learning Based on Shapley Value", KDD 2023,
as their code has it (``fedsv.py`` and ``avgSV_baseline``); Wang et al. 2020, who define the value, aggregate nothing
by it.
"""

from __future__ import annotations

from typing import Annotated, Literal

import torch
from annotated_types import Gt, Le
from torch import Tensor

from flsv.aggregation.base import Aggregator
from flsv.core import Round
from flsv.core.strategy import Contributions
from flsv.functional import participant_weights
from flsv.functional.cgsv import EPSILON, cohort_reputation
from flsv.functional.known_or_mean import known_or_mean
from flsv.utilities.declared import Positive


class ShapFedWA(Aggregator):
    """w = sum_i gamma~_i w_i, with the gamma~ that the class-specific Shapley values of the rounds before give.

    The order is Algorithm 1's: round t is aggregated with the contributions up to round t-1 (all equal in the first
    round), then the contributions are updated with round t's aggregate.

    Where the paper is silent: a client whose contribution was never measured (it joins for the first time under partial
    participation) counts as the mean of the measured clients of its cohort. The cohort's weights sum to 1.

    A cosine says where a client pulls and not how much data stands behind it, so clients of different sizes are weighed
    nearly alike. ``weighting="samples"``, which is not the paper's, multiplies gamma by the client's samples: FedAvg's
    own weights, corrected by what the clients contribute.

    Args:
        metric: the name of a :class:`flsv.metrics.ClassSpecificShapley` among the loop's metrics.
        weighting: what gamma is multiplied by: ``"uniform"``, nothing, as in the paper; or ``"samples"``.
        server_lr: see :class:`flsv.aggregation.Aggregator`.

    Raises:
        ConfigurationError: another weighting.

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
        gamma = self._gamma(round, contributions)
        if self.weighting == "samples":
            gamma = gamma * round.num_samples.to(gamma)
        total = gamma.sum()
        return gamma / total if total > 0 else torch.full_like(gamma, 1 / len(gamma))

    def _gamma(self, round: Round, contributions: Contributions) -> Tensor:
        """``[k]``, not normalized."""
        cssv = contributions.get(self.metric)
        if cssv is None:
            return torch.ones(len(round))
        gamma, _ = participant_weights(cssv[round.client_ids.to(cssv.device)].double())
        return known_or_mean(gamma)


class CGSV(Aggregator):
    """x + u_N with u_N = sum_i r_i u_i and u_i = scale d_i / |d_i|.

    The reputations r are those of the rounds before, data shares in the first round. Whatever the clients' updates are
    long, the global model moves by at most ``scale``. With :class:`flsv.personalization.SparsifiedReward` the algorithm
    is complete: ``configs/cgsv.yaml``. Buffers (BatchNorm's statistics) have no gradient: they are averaged with
    weights r.

    Where the paper, with full participation, is silent: the cohort's reputations are made to sum to 1; a client without
    one counts as the mean of the others.

    Args:
        metric: the name of a :class:`flsv.metrics.CosineGradientShapley` among the loop's metrics.
        scale: length of a normalized update, the paper's Gamma. It is the step size of the whole federation: it should
            be near the length of the clients' updates.
        server_lr: see :class:`flsv.aggregation.Aggregator`.

    Raises:
        ConfigurationError: scale not above 0.

    Example:
        >>> CGSV(scale=0.5)
        CGSV(scale=0.5)
    """

    metric_shape = ("n",)

    def __init__(self, metric: str = "cgsv", scale: Positive = 1.0, *, server_lr: Positive = 1.0) -> None:
        super().__init__(server_lr=server_lr)
        self.metric: str = metric
        self.scale = scale

    def weights(self, round: Round, contributions: Contributions) -> Tensor:
        before = cohort_reputation(contributions.get(self.metric), round.client_ids, round.num_samples)
        return before / before.sum()

    def aggregate(self, round: Round, contributions: Contributions) -> tuple[Tensor, Tensor]:
        weights = self.weights(round, contributions).to(round.client_vectors)
        cut = round.space.num_parameters
        vector = round.combine(weights)  # for the buffers
        factors = self.scale * weights.double() / (round.matrix.norms(cut) + EPSILON)
        vector[:cut] = round.global_vector[:cut] + round.matrix.combine(factors, cut)
        return vector, weights


class FedCE(Aggregator):
    """x + sum_i c_i d_i with c_i the estimates of the rounds before; equal weights in the first round.

    UploadContext: the authors' code counts the directions of the current round in its weights, and here they count from
    the next one on, as the errors do in both. Where the paper, with full participation, is silent: the cohort's weights
    are made to sum to 1, and a client without an estimate counts as the mean of the others.

    Args:
        metric: the name of a :class:`flsv.metrics.ContributionEstimation` among the loop's metrics.
        server_lr: see :class:`flsv.aggregation.Aggregator`.

    Example:
        >>> FedCE()
        FedCE()
    """

    metric_shape = ("n",)

    def __init__(self, metric: str = "fedce", *, server_lr: Positive = 1.0) -> None:
        super().__init__(server_lr=server_lr)
        self.metric: str = metric

    def weights(self, round: Round, contributions: Contributions) -> Tensor:
        values = contributions.get(self.metric)
        if values is None:
            return torch.full((len(round),), 1 / len(round), dtype=torch.float64, device=round.client_ids.device)
        cohort = known_or_mean(values)[round.client_ids].double()
        return cohort / cohort.sum()


class ShapleyWeighted(Aggregator):
    """x + sum over the cohort of (w_i / p_i) d_i, with w_i = value_i / (sum over *all* clients).

    Dividing by the inclusion probabilities p_i makes the sum over the cohort an unbiased estimate of the sum over all
    clients (Horvitz and Thompson), as in the paper. Its total weight then changes with the cohort; ``normalize=True``
    makes it 1 (the self-normalized estimate: a little biased, less variance).

    Args:
        metric: the name of a metric ``[n]``, such as :class:`flsv.metrics.SurrogateFederatedShapley`. Negative values
            count as 0. A client never seen counts as the metric's ``prior`` or, without one, as the mean of the others.
        normalize: make the cohort's weights sum to 1.
        server_lr: see :class:`flsv.aggregation.Aggregator`.

    Example:
        >>> ShapleyWeighted("value")
        ShapleyWeighted(metric='value')
    """

    metric_shape = ("n",)

    def __init__(self, metric: str = "ssv", normalize: bool = False, *, server_lr: Positive = 1.0) -> None:
        super().__init__(server_lr=server_lr)
        self.metric: str = metric
        self.normalize = normalize

    def weights(self, round: Round, contributions: Contributions) -> Tensor:
        values = contributions.get(self.metric)
        if values is None:
            raise RuntimeError(f"{self!r}: the metric {self.metric!r} has no value before the first aggregation.")
        values = known_or_mean(values).clamp_min(0).double()
        if values.sum() == 0:
            values = torch.ones_like(values)
        weights = values[round.client_ids] / values.sum()
        if round.inclusion_probabilities is not None:
            weights = weights / round.inclusion_probabilities.to(weights)
        if self.normalize:
            total = weights.sum()
            weights = weights / total if total > 0 else torch.full_like(weights, 1 / len(weights))
        return weights


class ShapleySoftmax(Aggregator):
    """(1 - step) x + step sum_i s_i x_i = x + step sum_i s_i d_i with s = softmax(value / temperature) over the cohort.

    ShapleyFL's code takes half of the weighted average and half of the model x that the round started from: step = 0.5.
    Buffers (BatchNorm's statistics), which its networks do not have, are averaged with the weights s.

    The values are the round's own, those of a :class:`flsv.metrics.PartialFederatedShapley` without momentum. Of an
    accuracy they are a few hundredths: at temperature 1 the weights are nearly equal.

    Args:
        metric: the name of a metric ``[n]``. A client never seen counts as the metric's ``prior`` or, without one, as
            the mean of the others.
        step: in (0, 1], what the clients weigh together; the rest is x.
        temperature: what the values are divided by, above 0.
        server_lr: see :class:`flsv.aggregation.Aggregator`.

    Raises:
        ConfigurationError: a step outside (0, 1], a temperature not above 0; before training, a metric that is updated
            after aggregation.

    Example:
        >>> ShapleySoftmax(step=1.0)
        ShapleySoftmax(step=1.0)
    """

    metric_shape = ("n",)
    metric_of_round = True

    def __init__(
        self,
        metric: str = "sv",
        step: Annotated[float, Gt(0), Le(1)] = 0.5,
        temperature: Positive = 1.0,
        *,
        server_lr: Positive = 1.0,
    ) -> None:
        super().__init__(server_lr=server_lr)
        self.metric: str = metric
        self.step = step
        self.temperature = temperature

    def weights(self, round: Round, contributions: Contributions) -> Tensor:
        values = contributions.get(self.metric)
        if values is None:
            raise RuntimeError(f"{self!r}: the metric {self.metric!r} has no value before the first aggregation.")
        values = known_or_mean(values)[round.client_ids].double()
        return self.step * (values / self.temperature).softmax(0)
