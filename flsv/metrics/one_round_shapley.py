"""OneRoundShapley: the Shapley value of a single game at the end, on models rebuilt from all rounds' updates (OR).

Song, Tong, Wei, "Profit Allocation for Federated Learning", IEEE Big Data 2019, Algorithm 1; the baseline OR of Guo et
al., "A Fair Contribution Measurement Method for Federated Learning", Sensors 24(15), 2024.

The paper keeps every client's update of every round. The model of a coalition,

    x(0) + sum_t sum_{i in S} w_i(t) d_i(t),

needs only each client's weighted sum over the rounds, ``[n, P]`` instead of ``[T, n, P]``. With weights made to sum to
1 inside S that holds where they do not change between rounds; where they do (partial participation, adaptive weights)
their mean over the rounds takes their place in the divisor.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torchmetrics import Metric
from torchmetrics.utilities.distributed import gather_all_tensors

from flsv.arguments import check_number
from flsv.functional.shapley import ShapleyEstimate, Utility
from flsv.games import CoalitionUtility, Renormalized, Weighting
from flsv.games.performance import Mode
from flsv.metrics.decayed_shapley import CoalitionWeights, check_coalition_weights
from flsv.metrics.federated_shapley import PartialFederatedShapley, latest
from flsv.metrics.guide import Guide
from flsv.metrics.intervals import OverRounds
from flsv.round import Round

Game = Callable[[Tensor, Tensor, Weighting], Utility]
"""The coalition game of a model ``[P]``, updates ``[n, P]`` and weights of the updates ``[n]``."""


class OneRoundShapley(PartialFederatedShapley):
    """One coalition game for a whole run: 2^n models at the end instead of 2^n a round.

    Coalition S is the initial model plus what its members have added to it in all rounds, along the path that all of
    them took together. Buffers (BatchNorm's statistics) are the global model's. Until the game is played everybody is
    NaN. Memory: n + 1 vectors of the model's size, in checkpoints too. The game needs all rounds in one place, so parts
    of a run cannot be merged, nor two processes' rounds synchronised: that is refused.

    As input to ``update``: ``client_ids [k]``, ``round_index`` from 0 (the initial model is taken from round 0),
    ``global_vector [P]``, ``client_updates [k, P]``, ``aggregation_weights [k]``, a ``utility`` that makes a game (see
    ``Game``) and a ``generator``. Use ``update``, not ``forward``: a single round of many has no such game.

    Args:
        rounds: how many rounds to collect, the run's ``max_epochs``; then the game is played (and again after as many).
            A shorter run has no values, and is warned of when it starts.
        num_clients: n. None inside a ``FederatedLoop``: taken from the data.
        estimator: as for :class:`PartialFederatedShapley`.
        estimator_args: likewise.
        performance: what a coalition's model is measured by, see :mod:`flsv.games.performance`.
        coalition_weights: as for :class:`DecayedShapley`. ``"fixed"`` is exact whatever the weights.
        mode: as for :class:`PartialFederatedShapley`.
        kwargs: see ``torchmetrics.Metric``.

    Raises:
        ConfigurationError: ``rounds`` below 1; an unknown estimator or kind of weights.
        ValueError: the first round was not round 0; in a merge, two metrics that have rounds.

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

    over_rounds: OverRounds = None  # one game, of the whole run
    start: Tensor
    updates: Tensor
    weight: Tensor
    seen: Tensor
    values: Tensor

    def __init__(
        self,
        rounds: int,
        num_clients: int | None = None,
        estimator: str | Callable[..., ShapleyEstimate] = "auto",
        estimator_args: dict[str, Any] | None = None,
        performance: str | Metric = "accuracy",
        coalition_weights: CoalitionWeights = "renormalized",
        mode: Mode | None = None,
        **kwargs: Any,
    ) -> None:
        check_number(self, "rounds", rounds, least=1, whole=True)
        check_coalition_weights(type(self).__name__, coalition_weights)
        self.every, self.coalition_weights = rounds, coalition_weights
        super().__init__(num_clients, None, estimator, estimator_args, performance, mode=mode, **kwargs)

    def check_rounds(self, rounds: int) -> None:
        if rounds < self.every:  # no error: the run may be resumed with more rounds
            warnings.warn(
                f"OneRoundShapley(rounds={self.every}) plays its game after {self.every} rounds, and the run has "
                f"max_epochs={rounds}: nobody will have a value. Say rounds={rounds}, or resume the run with more.",
                stacklevel=2,
            )

    @property
    def round_fields(self) -> dict[str, Any]:
        """Where a ``FederatedLoop`` finds the arguments of ``update``."""
        return {**super().round_fields, "utility": lambda round: partial(self._game, round)}

    def init_states(self, num_clients: int, num_classes: int | None) -> None:
        # The length of a vector is not known yet: these zeros are broadcast when the first is added.
        self.add_state("start", torch.zeros(1), dist_reduce_fx="sum")
        self.add_state("updates", torch.zeros(num_clients, 1), dist_reduce_fx="sum")
        self.add_state("weight", torch.zeros(num_clients), dist_reduce_fx="sum")
        self.add_state("seen", torch.zeros(num_clients, dtype=torch.long), dist_reduce_fx="sum")
        self.add_state("values", torch.full((num_clients,), float("nan")), dist_reduce_fx=latest)
        self.add_state("evaluations", torch.tensor(0), dist_reduce_fx="sum")

    def update(  # type: ignore[override]
        self,
        client_ids: Tensor,
        round_index: int,
        global_vector: Tensor,
        client_updates: Tensor,
        aggregation_weights: Tensor,
        utility: Game,
        generator: torch.Generator | None = None,
    ) -> None:
        """Collect one round's updates; after the last of ``rounds``, play the game."""
        self._check_clients(client_ids)
        self._check_lengths(client_ids, client_updates=client_updates, aggregation_weights=aggregation_weights)
        if round_index == 0:
            self.start = global_vector.clone()
        if len(self.start) != len(global_vector):
            raise ValueError("OneRoundShapley has not seen round 0, so it does not know the initial model.")
        if self.updates.shape[1] != len(global_vector):
            self.updates = self.updates.new_zeros(len(self.updates), len(global_vector), dtype=global_vector.dtype)
        self.updates[client_ids] += aggregation_weights.to(client_updates)[:, None] * client_updates
        self.weight[client_ids] += aggregation_weights.to(self.weight)
        self.seen[client_ids] += 1
        self.rounds += 1
        if (round_index + 1) % self.every:
            return
        weight = self.weight / self.rounds
        # Weights of 0 belong to clients that have added nothing.
        mean = self.updates / weight.to(self.updates).where(weight > 0, torch.ones_like(weight))[:, None]
        game = utility(self.start, mean, weight if self.coalition_weights == "fixed" else Renormalized(weight))
        estimate = self._estimate(game, len(weight), generator)
        self.values = estimate.values.to(self.values).masked_fill(self.seen == 0, float("nan"))
        self.evaluations += estimate.evaluations

    def _reduce_states(self, incoming_state: dict[str, Any]) -> None:
        self._check_parts([int(self.rounds), int(incoming_state["rounds"])])
        super()._reduce_states(incoming_state)

    def _sync_dist(self, dist_sync_fn: Any = gather_all_tensors, process_group: Any | None = None) -> None:
        group = process_group or self.process_group
        self._check_parts([int(rounds) for rounds in dist_sync_fn(self.rounds, group=group)])
        mine = torch.tensor([len(self.start), self.start.element_size()]).to(self.rounds)
        length, bytes = torch.stack(dist_sync_fn(mine, group=group)).amax(0).tolist()
        if len(self.start) != length:  # a process without rounds
            dtype = torch.float64 if bytes == 8 else self.start.dtype
            self.start = self.start.new_zeros(length, dtype=dtype)
            self.updates = self.updates.new_zeros(len(self.updates), length, dtype=dtype)
        super()._sync_dist(dist_sync_fn, process_group)

    @staticmethod
    def _check_parts(rounds: list[int]) -> None:
        if sum(count > 0 for count in rounds) > 1:
            raise ValueError(
                f"OneRoundShapley plays one game on the updates of all rounds, and finds {rounds} of them in different "
                "metrics or processes. Update one metric with every round, or use DecayedShapley(decay=1), which can "
                "be merged."
            )

    def compute(self) -> Tensor:
        """``[num_clients]``, NaN for clients never seen and before the game is played."""
        return self.values

    def guide(self) -> Guide:
        cost = "a validation of every coalition's model once, at the end; n + 1 models in memory."
        return replace(super().guide(), cost=cost)

    def diagnostics(self) -> dict[str, Tensor]:
        """Coalitions evaluated."""
        return {"evaluations": self.evaluations.clone()}

    def _game(self, round: Round, start: Tensor, updates: Tensor, weighting: Weighting) -> CoalitionUtility:
        """A round of its own, with everybody in it."""
        assert round.games is not None
        models, cut = start + updates, round.space.num_parameters
        models[:, cut:] = round.global_vector[cut:]  # a sum of changes of a running variance may be negative
        whole = Round(
            round.round_index,
            torch.arange(len(updates), device=updates.device),
            torch.ones(len(updates), dtype=torch.long, device=updates.device),
            start,
            models,
            round.space,
        )
        evaluator, rate = round.games.evaluator_of(self.performance), round.games.server_lr
        table = round.games.table_of(whole, self.performance)
        return CoalitionUtility(
            whole, evaluator, metric=self.performance, weighting=weighting, server_lr=rate, table=table
        )
