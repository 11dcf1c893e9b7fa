"""One game for a whole run, on models rebuilt from all rounds' updates.

Song, Tong, Wei, "Profit Allocation for Federated Learning", IEEE Big Data 2019, Algorithm 1 (OneRoundShapley). The
baseline OR of Guo et al., "A Fair Contribution Measurement Method for Federated Learning", Sensors 24(15), 2024.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from flsv.core import Round
from flsv.functional import ShapleyEstimate
from flsv.functional.shapley.game import Utility
from flsv.games import CoalitionUtility, Renormalized, Weighting
from flsv.metrics.coalitions.folds import Fold
from flsv.metrics.coalitions.presets import CoalitionWeights, weighting_of
from flsv.metrics.coalitions.value import CoalitionValue
from flsv.utilities.declared import Count

Game = Callable[[Tensor, Tensor, Weighting], Utility]
"""A function that makes the coalition game from the initial model ``[P]``, the clients' updates ``[n, P]`` and the
updates' weights ``[n]``.
"""


@dataclass(frozen=True)
class _AtTheEnd(Fold):
    """Fold that stores the values of a single game, which is evaluated after ``rounds`` rounds."""

    rounds: int

    def init_states(self, metric: Any, num_clients: int, width: int) -> None:
        # The vectors' length is set in the first round.
        metric.add_state("start", torch.zeros(1), dist_reduce_fx=None)
        metric.add_state("updates", torch.zeros(num_clients, 1), dist_reduce_fx=None)
        metric.add_state("weight", torch.zeros(num_clients), dist_reduce_fx=None)
        metric.add_state("seen", torch.zeros(num_clients, dtype=torch.long), dist_reduce_fx=None)
        metric.add_state(
            "values", torch.full((num_clients, width), float("nan")), dist_reduce_fx=None
        )

    def update(
        self, metric: Any, client_ids: Tensor, estimate: ShapleyEstimate, factor: float
    ) -> None:
        values = estimate.values.to(metric.values).reshape(metric.values.shape)
        metric.values = values.masked_fill(metric.seen[:, None] == 0, float("nan"))

    def compute(self, metric: Any) -> Tensor:
        return metric.values


class OneRoundShapley(CoalitionValue, chosen=("num_classes", "fold", "weighting", "per_class")):
    r"""Shapley values of one coalition game for the whole run. It takes 2^n models at the end instead of 2^n a round.

    .. math::
        U(S) = u\Bigl(x_0 + \sum_t \sum_{i \in S} w_i^t d_i^t\Bigr)

    The model of coalition S is the initial model :math:`x_0` plus the updates :math:`d_i^t` of its members from all
    rounds t, with weights :math:`w_i^t`. The updates come from the run with all clients. Buffers (BatchNorm's
    statistics) are the global model's buffers. Until the game is evaluated all values are NaN. The metric stores n + 1
    vectors of the model's size, in checkpoints too. The game needs all rounds in one place: merging parts of a run, or
    a sync between processes, raises an error.

    The paper stores every client's update of every round. This metric stores each client's weighted sum over the
    rounds. With ``coalition_weights="renormalized"`` the two are equal only if a client's weight is the same in all
    rounds. Otherwise (partial participation, adaptive weights) this metric renormalizes with each client's mean weight
    over the rounds, the paper with the weights of each round.

    ``compute`` returns ``[num_clients]``, in the performance's unit. Use ``update``, not ``forward``, since a single
    round has no game of its own.

    When not to use it:
        With many rounds of large steps: the coalitions' models are sums of updates that were never trained. Above ten
        clients: the game has 2^n models. With personalization, or if an attack changes the aggregate.

    Args:
        rounds: the number of rounds after which the game is evaluated, usually the run's ``max_epochs``. A longer run
            evaluates the game of all rounds so far again after each multiple of this number. A shorter run has no
            values. A warning before training says so.
        num_clients: n, the number of clients. None inside a ``FederatedLoop``, which takes it from the data.
        estimator: the estimator of Shapley values, as for :class:`flsv.metrics.PartialFederatedShapley`.
        estimator_args: keywords for the estimator, such as ``{"budget": 200}``.
        performance: the performance measure of a coalition's model, see :mod:`flsv.games.performance`.
        coalition_weights: as for :class:`flsv.metrics.DecayedShapley`. ``"fixed"`` equals the paper's game even if the
            weights change between rounds.
        mode: whether less (``"min"``) or more (``"max"``) of a logged value is better.
        kwargs: further arguments of ``torchmetrics.Metric``.

    Raises:
        ConfigurationError: ``rounds`` is below 1, or the estimator or the kind of weights is unknown.
        ValueError: the first round was not round 0, or metrics are merged.

    Example:
        >>> metric = OneRoundShapley(2, num_clients=2, coalition_weights="fixed")
        >>> def game(start, updates, weights):  # whose worth is the model's only parameter
        ...     return lambda masks: (start + masks.float() @ (weights[:, None] * updates)).squeeze(-1)
        >>> half = torch.tensor([0.5, 0.5])
        >>> for index, updates in enumerate([[2.0, 4.0], [0.0, 8.0]]):
        ...     updates = torch.tensor(updates)[:, None]
        ...     metric.update(torch.arange(2), index, torch.zeros(1), updates, half, game)
        >>> metric.compute()
        tensor([1., 6.])
    """

    cost = "a validation of every coalition's model once, at the end; n + 1 models in memory."
    full_state_update = True
    mergeable = False

    fold: _AtTheEnd
    start: Tensor
    updates: Tensor
    weight: Tensor
    seen: Tensor

    def __init__(
        self,
        rounds: Count,
        num_clients: int | None = None,
        *,
        coalition_weights: CoalitionWeights = "renormalized",
        **kwargs: Any,
    ) -> None:
        fold, weighting = _AtTheEnd(rounds), weighting_of(coalition_weights)
        super().__init__(
            num_clients, None, fold=fold, weighting=weighting, per_class=False, **kwargs
        )

    @property
    def round_fields(self) -> dict[str, Any]:
        """Functions ``{argument: f(round)}`` with which a ``FederatedLoop`` computes arguments of ``update``."""
        return {
            **super().round_fields,
            "utility": lambda round: partial(game_of_run, round, self.measured_by),
        }

    def check_rounds(self, rounds: int) -> None:
        if rounds < self.fold.rounds:  # no error: the run may be resumed with more rounds
            warnings.warn(
                f"{type(self).__name__}(rounds={self.fold.rounds}) plays its game after {self.fold.rounds} rounds, and "
                f"the run has max_epochs={rounds}: nobody will have a value. Say rounds={rounds}, or resume the run "
                "with more.",
                stacklevel=3,
            )

    def update(  # type: ignore[override]  # torchmetrics' update takes anything
        self,
        client_ids: Tensor,
        round_index: int,
        global_vector: Tensor,
        client_updates: Tensor,
        aggregation_weights: Tensor,
        utility: Game,
        generator: torch.Generator | None = None,
    ) -> None:
        """Add a round's updates to the sums. After the last of ``rounds`` rounds, evaluate the game.

        Args:
            client_ids: ``[k]``, the ids of the round's k clients.
            round_index: the round's index, from 0.
            global_vector: ``[P]``, the model before the round.
            client_updates: ``[k, P]``, the clients' updates.
            aggregation_weights: ``[k]``, the clients' weights in the round's aggregation.
            utility: a function from the initial model ``[P]``, the updates ``[n, P]`` and their weights to the game.
            generator: the estimator's generator of random numbers.
        """
        if round_index == 0:
            self.start = global_vector.clone()
        if len(self.start) != len(global_vector):
            raise ValueError(
                f"{type(self).__name__} has not seen round 0, so it does not know the initial model."
            )
        if self.updates.shape[1] != len(global_vector):
            self.updates = self.updates.new_zeros(
                len(self.updates), len(global_vector), dtype=global_vector.dtype
            )
        self.updates[client_ids] += aggregation_weights.to(client_updates)[:, None] * client_updates
        self.weight[client_ids] += aggregation_weights.to(self.weight)
        self.seen[client_ids] += 1
        if (round_index + 1) % self.fold.rounds:
            return
        weight = self.weight / (self.rounds + 1)  # the present round is counted later
        # A weight of 0 belongs to a client without any update.
        mean = (
            self.updates
            / weight.to(self.updates).where(weight > 0, torch.ones_like(weight))[:, None]
        )
        game = utility(
            self.start,
            mean,
            weight if self.weighting == "aggregation-fixed" else Renormalized(weight),
        )
        super().update(
            torch.arange(len(weight), device=client_ids.device), game, generator, round_index
        )


def game_of_run(
    round: Round, performance: Any, start: Tensor, updates: Tensor, weighting: Weighting
) -> CoalitionUtility:
    """Make the coalition game of a whole run. It is that of one round in which n clients send ``updates [n, P]`` from
    ``start [P]``.
    """
    assert round.games is not None
    models, cut = start + updates, round.space.num_parameters
    models[:, cut:] = round.global_vector[
        cut:
    ]  # a sum of changes of a running variance may be negative
    whole = Round(
        round.round_index,
        torch.arange(len(updates), device=updates.device),
        torch.ones(len(updates), dtype=torch.long, device=updates.device),
        start,
        models,
        round.space,
    )
    evaluator, rate = round.games.evaluator_of(performance), round.games.server_lr
    table = round.games.table_of(whole, performance)
    return CoalitionUtility(
        whole, evaluator, metric=performance, weighting=weighting, server_lr=rate, table=table
    )
