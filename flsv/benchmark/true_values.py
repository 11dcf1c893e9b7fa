"""Ground-truth values of clients, from trainings of all or some coalitions with several seeds.

Of many clients, coalitions are trained along orders. The Shapley value is the mean over all orders of what a client
adds to those before it. Orders drawn alone leave it to chance who comes early, where a client adds most. So the clients
are put on a circle, in random order, and all 2 n orders are walked that begin anywhere on it and go either way: each
client has each place twice. Their prefixes are the arcs of the circle, n (n - 1) coalitions beside the empty one and
that of all, since an order and its reverse use the same. An order that begins anywhere is as random as one that is
drawn, so the mean is unbiased; a circle is one sample.

For as many trained coalitions the variance is a small part of that of orders and their reverses that are drawn alone
(Castro et al. 2009): below a fifth on the shipped tables of six clients, ``tests/benchmark/test_true_values.py``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from flsv.benchmark.scores import NAN, half_width, mean, spearman
from flsv.functional.shapley.exact import shapley_of_table
from flsv.functional.shapley.game import MemoizedGame
from flsv.functional.shapley.permutation import marginals_along
from flsv.functional.shapley.sampling import prefixes, random_permutations
from flsv.seeding import generator_for

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
        return half_width(self.values.std(0, correction=min(1, len(self.seeds) - 1)), len(self.seeds), level)

    @property
    def ceiling(self) -> float:
        """Mean rank correlation of one seed's values with the mean of the others': what no metric can be expected to
        exceed, which sees one run. NaN of one seed. Where coalitions are sampled it is too low by what one seed's
        sampling disturbs."""
        values = self.values
        others = [torch.cat([values[:s], values[s + 1 :]]).mean(0) for s in range(len(values))]
        return mean(spearman(mine, rest) for mine, rest in zip(values, others)) if len(values) > 1 else NAN


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


def circular_orders(num_clients: int, seed: int, circle: int) -> Tensor:
    """The orders that begin anywhere on a random circle and go either way, int ``[2 n, n]``.

    Args:
        num_clients: n.
        seed: of the drawing; other seeds have other circles.
        circle: which of a seed's.

    Example:
        >>> orders = circular_orders(4, seed=100, circle=0)
        >>> orders.shape, [orders[:, place].bincount().tolist() for place in range(2)]
        (torch.Size([8, 4]), [[2, 2, 2, 2], [2, 2, 2, 2]])
    """
    (order,) = random_permutations(1, num_clients, generator_for(seed, "circle", circle))
    onwards = torch.stack([order.roll(-start) for start in range(num_clients)])
    return torch.cat([onwards, onwards.flip(1)])


def arcs(num_clients: int, seed: int, circles: int) -> Tensor:
    """The distinct coalitions of so many circles, bool ``[K, n]``, the empty one and that of all first.

    Example:
        >>> arcs(20, seed=100, circles=2).shape
        torch.Size([718, 20])
    """
    both = torch.tensor([[False], [True]]).expand(2, num_clients)
    met = [prefixes(circular_orders(num_clients, seed, circle)).flatten(0, 1) for circle in range(circles)]
    found = dict.fromkeys(tuple(mask) for mask in torch.cat([both, *met]).tolist())
    return torch.tensor(list(found))


def values_by_circles(game: MemoizedGame, num_clients: int, seed: int, circles: int) -> Tensor:
    """Each circle's estimate of the Shapley values, float64 ``[circles, n]``; every one is unbiased and their sum over
    the clients is the gain of all.

    Args:
        game: the utility of coalitions, which is asked for the arcs only.
        num_clients: n.
        seed: of the drawing.
        circles: how many.
    """
    each = [marginals_along(game, circular_orders(num_clients, seed, circle)) for circle in range(circles)]
    return torch.stack([marginals.mean(0).squeeze(-1).double() for marginals in each])
