"""OneRoundShapley: the values of one game for a whole run, with models that are rebuilt from all rounds' updates.

Song, Tong, Wei, "Profit Allocation for Federated Learning", IEEE Big Data 2019, Algorithm 1 (OneRoundShapley). The
baseline OR of Guo et al., "A Fair Contribution Measurement Method for Federated Learning", Sensors 24(15), 2024.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from flsv.core import Round
from flsv.core.parameter_space import ParameterSpace
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
        # `start` and `updates` get the model's length in the first round. `weight` and `updates` are sums over rounds,
        # `participations` is each client's number of rounds.
        metric.add_state("start", torch.zeros(1), dist_reduce_fx=None)
        metric.add_state("updates", torch.zeros(num_clients, 1), dist_reduce_fx=None)
        metric.add_state("weight", torch.zeros(num_clients), dist_reduce_fx=None)
        metric.add_state(
            "participations", torch.zeros(num_clients, dtype=torch.long), dist_reduce_fx=None
        )
        metric.add_state("values", torch.full((num_clients, width), torch.nan), dist_reduce_fx=None)

    def update(
        self, metric: Any, client_ids: Tensor, estimate: ShapleyEstimate, factor: float
    ) -> None:
        values = estimate.values.to(metric.values).reshape(metric.values.shape)
        metric.values = values.masked_fill(metric.participations[:, None] == 0, torch.nan)

    def compute(self, metric: Any) -> Tensor:
        return metric.values


class OneRoundShapley(CoalitionValue, chosen=("num_classes", "fold", "weighting", "per_class")):
    r"""Shapley values of one coalition game for the whole run. It takes 2^n models at the end instead of 2^n a round.

    .. math::
        U(S) = u\Bigl(x_0 + \sum_t \sum_{i \in S} w_i^t d_i^t\Bigr)

    The model of coalition S is the initial model :math:`x_0` plus the updates :math:`d_i^t` of its members from all
    rounds t, with weights :math:`w_i^t`. The updates come from the run with all clients. Buffers (BatchNorm's
    statistics) are the global model's buffers. Until the game is evaluated all values are NaN. The metric stores n + 1
    vectors of the model's size, in checkpoints too. Merging parts of a run, or a sync between processes, raises an
    error.

    The paper stores every client's update of every round. This metric stores each client's weighted sum over the
    rounds. With ``coalition_weights="renormalized"`` the two are equal only if a client's weight is the same in all
    rounds. Otherwise (partial participation, adaptive weights) this metric renormalizes with each client's mean weight
    over the rounds, the paper with the weights of each round.

    ``compute`` returns ``[num_clients]``, in the performance's unit. Use ``update``, not ``forward``.

    When not to use it:
        With many rounds of large steps: the coalitions' models are sums of updates that were never trained. With more
        than ten clients, since 2^n models are evaluated. With personalization, or if an attack changes the aggregate.

    Args:
        rounds: the number of rounds after which the game is evaluated, usually the run's ``max_epochs``. A longer run
            evaluates the game of all rounds so far again after each multiple of this number, and at its end. So does a
            shorter run.
        num_clients: n, the number of clients. None inside a ``FederatedLoop``.
        estimator: as for :class:`flsv.metrics.PartialFederatedShapley`.
        estimator_args: its keywords, such as ``{"budget": 200}``.
        performance: the performance measure, see :mod:`flsv.scores.performance`.
        coalition_weights: as for :class:`flsv.metrics.DecayedShapley`. ``"fixed"`` equals the paper's game even if the
            weights change between rounds.
        mode: whether less (``"min"``) or more (``"max"``) of a logged value is better.
        kwargs: arguments of ``torchmetrics.Metric``.

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

    claims = ("effect",)
    cost = "a validation of every coalition's model once, at the end; n + 1 models in memory."
    full_state_update = True
    mergeable = False

    fold: _AtTheEnd
    start: Tensor
    updates: Tensor
    weight: Tensor
    participations: Tensor

    def __init__(
        self,
        rounds: Count,
        num_clients: int | None = None,
        *,
        coalition_weights: CoalitionWeights = "renormalized",
        **kwargs: Any,
    ) -> None:
        super().__init__(
            num_clients,
            num_classes=None,
            fold=_AtTheEnd(rounds),
            weighting=weighting_of(coalition_weights),
            per_class=False,
            **kwargs,
        )

    needs: Sequence[str] = ("games",)

    @property
    def round_fields(self) -> dict[str, Any]:
        """Functions ``{argument: f(round)}`` with which a ``FederatedLoop`` computes arguments of ``update``."""
        return {
            **super().round_fields,
            "utility": self._game_of_run,
            "client_updates": "state_updates",
        }

    def _game_of_run(self, round: Round) -> Game:
        # The game may be evaluated at the end of the run, so it does not refer to the round with its clients' models.
        return partial(
            game_of_run,
            round_index=round.round_index,
            global_vector=round.global_vector,
            space=round.space,
            games=round.games,
            measure=self.measure,
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
        """Add a round's updates to the sums. After each ``rounds`` rounds, and at the run's end, evaluate the game.

        Args:
            client_ids: ``[k]``, the round's clients.
            round_index: the round's index, from 0.
            global_vector: ``[P]``, the model before the round.
            client_updates: ``[k, P]``, the clients' updates with buffers, a round's ``state_updates``.
            aggregation_weights: ``[k]``, the clients' weights in the round's aggregation.
            utility: a function from the initial model ``[P]``, the updates ``[n, P]`` and their weights to the game.
            generator: the estimator's generator of random numbers.
        """
        self._prepare_states(round_index, global_vector)
        weights = aggregation_weights.to(client_updates)
        self.updates[client_ids] += weights[:, None] * client_updates
        self.weight[client_ids] += aggregation_weights.to(self.weight)
        self.participations[client_ids] += 1

        rounds_added = int(self.rounds) + 1  # the present round is counted later
        evaluate_game = partial(self._evaluate_game, utility, generator, round_index, rounds_added)
        if (round_index + 1) % self.fold.rounds == 0:
            self.compute_at_run_end = None
            evaluate_game()
        else:
            self.compute_at_run_end = evaluate_game

    def _prepare_states(self, round_index: int, global_vector: Tensor) -> None:
        """Store the initial model, and give the sum of updates its length, in the first round."""
        if round_index == 0:
            self.start.data = global_vector.clone()  # `data`: the length changes
        if len(self.start) != len(global_vector):
            raise ValueError(
                f"{type(self).__name__} was not updated with round 0, so it does not know the initial model. Update it "
                "with every round."
            )
        has_model_length = self.updates.shape[1] == len(global_vector)
        if not has_model_length:
            self.updates = self.updates.new_zeros(
                len(self.updates), len(global_vector), dtype=global_vector.dtype
            )

    def _evaluate_game(
        self,
        make_game: Game,
        generator: torch.Generator | None,
        round_index: int,
        rounds_added: int,
    ) -> None:
        mean_weights = self.weight / rounds_added
        # A client without any update has the weight 0.
        divisors = mean_weights.where(mean_weights > 0, 1.0)
        mean_updates = self.updates / divisors.to(self.updates)[:, None]
        weighting: Any
        if self.weighting == "aggregation-fixed":
            weighting = mean_weights
        else:
            weighting = Renormalized(mean_weights)

        game = make_game(self.start, mean_updates, weighting)
        players = torch.arange(len(mean_weights), device=mean_weights.device)
        super().update(players, game, generator, round_index)


def game_of_run(
    initial_vector: Tensor,
    updates: Tensor,
    weighting: Weighting,
    *,
    round_index: int,
    global_vector: Tensor,
    space: ParameterSpace,
    games: Any,
    measure: Any,
) -> CoalitionUtility:
    """Create the coalition game of a whole run: the game of one round in which n clients start from ``initial_vector
    [P]`` and send ``updates [n, P]``.
    """
    models = initial_vector + updates  # [n, P]
    # A variance plus its changes could be negative, so the buffers, after the parameters, are the global model's.
    buffers = slice(space.num_parameters, None)
    models[:, buffers] = global_vector[buffers]
    whole_run = _round_of_run(initial_vector, models, round_index, space)
    return CoalitionUtility(
        whole_run,
        games.evaluator_of(measure),
        metric=measure,
        weighting=weighting,
        server_lr=games.server_lr,
        table=games.table_of(whole_run, measure),
    )


def _round_of_run(
    initial_vector: Tensor,
    models: Tensor,
    round_index: int,
    space: ParameterSpace,
) -> Round:
    num_clients = len(models)
    return Round(
        round_index,
        client_ids=torch.arange(num_clients, device=models.device),
        # Not read: the weighting has the run's weights.
        num_samples=torch.ones(num_clients, dtype=torch.long, device=models.device),
        global_vector=initial_vector,
        client_vectors=models,
        space=space,
    )
