"""Ground-truth values of clients, from trainings of all or some coalitions with several seeds."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from scipy import stats
from torch import Tensor

from flsv.benchmark.circles import values_by_circles
from flsv.benchmark.scores import spearman
from flsv.functional.shapley.exact import shapley_of_table
from flsv.functional.shapley.game import MemoizedGame

Members = tuple[int, ...]


class Truth(ABC):
    """The Shapley values of each seed, and their mean, ceiling and intervals.

    Args:
        seeds: of the trainings, s of them.
    """

    seeds: tuple[int, ...]

    @property
    @abstractmethod
    def values(self) -> Tensor:
        """Float64 ``[s, n]``, every seed's own Shapley values."""

    @property
    @abstractmethod
    def trained(self) -> int:
        """Coalitions that every seed has trained."""

    @property
    def num_clients(self) -> int:
        """n."""
        return self.values.shape[1]

    @property
    def mean(self) -> Tensor:
        """Float64 ``[n]``, the mean over the seeds."""
        return self.values.mean(0)

    def interval(self, level: float = 0.9) -> Tensor:
        """Float64 ``[n]``, half the width of the mean's interval at this level, by Student's t over the seeds; NaN of
        one seed. Seeds that have drawn orders of their own spread by that, too, so it is in the interval."""
        count = len(self.seeds)
        if count < 2:
            return torch.full((self.num_clients,), float("nan"), dtype=torch.float64)
        quantile = float(stats.t.ppf((1 + level) / 2, count - 1))
        return quantile * self.values.std(0) / count**0.5

    @property
    def ceiling(self) -> float:
        """Mean rank correlation of one seed's values with the mean of the others': what no metric can be expected to
        exceed, which sees one run. NaN of one seed. Where coalitions are sampled it is too low by what one seed's
        sampling disturbs."""
        values = self.values
        others = [torch.cat([values[:s], values[s + 1 :]]).mean(0) for s in range(len(values))]
        return (
            float(np.mean([spearman(mine, rest) for mine, rest in zip(values, others)]))
            if len(values) > 1
            else float("nan")
        )


@dataclass(frozen=True, eq=False)
class ExactTruth(Truth):
    """The utilities of all coalitions of a federation.

    Args:
        seeds: of the trainings, s of them.
        utilities: float64 ``[s, 2^n]``, the federation's performance; bit i of a coalition's number is client i.
        losses: float64 ``[s, 2^n]``, mean cross-entropy in nats.

    Example:
        >>> from flsv.benchmark import federation, truth_table
        >>> truth = truth_table(federation("digits_sizes"))
        >>> truth.utilities.shape, truth.mean.shape, truth.ceiling > 0.8
        (torch.Size([5, 64]), torch.Size([6]), True)
    """

    seeds: tuple[int, ...]
    utilities: Tensor
    losses: Tensor

    @property
    def values(self) -> Tensor:
        """Float64 ``[s, n]``."""
        return shapley_of_table(self.utilities.T.contiguous()).T

    @property
    def trained(self) -> int:
        """2^n."""
        return self.utilities.shape[1]


@dataclass(frozen=True, eq=False)
class SampledTruth(Truth):
    """Utilities along random circles of the clients; each seed has its own circles and training.

    Args:
        seeds: of the trainings and of the circles, s of them.
        circle_values: float64 ``[s, circles, n]``, each circle's estimate.
        coalitions: trained for each seed, at most.

    Example:
        >>> from flsv.benchmark import federation, truth_table
        >>> truth = truth_table(federation("digits_20_clients"))
        >>> truth.circle_values.shape, truth.mean.shape, truth.trained < 2**20
        (torch.Size([5, 3, 20]), torch.Size([20]), True)
    """

    seeds: tuple[int, ...]
    circle_values: Tensor
    coalitions: int

    @property
    def values(self) -> Tensor:
        """Float64 ``[s, n]``, the means over the circles."""
        return self.circle_values.mean(1)

    @property
    def trained(self) -> int:
        """Some circles x n (n - 1)."""
        return self.coalitions


def sampled_truth(utilities: Mapping[int, Mapping[Members, float]], num_clients: int, circles: int) -> SampledTruth:
    """From the utilities of the coalitions on the circles, by seed and members."""
    found = []
    for seed, of_seed in utilities.items():

        def utility(masks: Tensor, known: Mapping[Members, float] = of_seed) -> Tensor:
            members = (tuple(mask.nonzero().flatten().tolist()) for mask in masks)
            return torch.tensor([known[each] for each in members], dtype=torch.float64)

        found.append(values_by_circles(MemoizedGame(utility, num_clients), num_clients, seed, circles))
    return SampledTruth(tuple(utilities), torch.stack(found), max(map(len, utilities.values())))
