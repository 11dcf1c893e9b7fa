"""One game for a whole run.

Song, Tong, Wei, "Profit Allocation for Federated Learning", IEEE Big Data 2019, Algorithm 1 (OneRoundShapley).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from flsv.metrics.coalitions.presets import CoalitionWeights, weighting_of
from flsv.metrics.coalitions.value import CoalitionValue
from flsv.metrics.coalitions.whole_run import Game, WholeRun


class OneRoundShapley(CoalitionValue, chosen=("num_classes", "value", "fold", "weighting", "per_class")):
    r"""One coalition game for a whole run: 2^n models at the end instead of 2^n a round.

    .. math::
        U(S) = u\Bigl(x_0 + \sum_t \sum_{i \in S} w_i^t d_i^t\Bigr)

    Coalition S is the initial model plus what its members have added to it in all rounds, along the path that all of
    them took together. Buffers (BatchNorm's statistics) are the global model's. Until the game is played everybody is
    NaN. Memory: n + 1 vectors of the model's size, in checkpoints too. The game needs all rounds in one place, so parts
    of a run cannot be merged, nor two processes' rounds synchronised: that is refused.

    As input to ``update``: ``client_ids [k]``, ``round_index`` from 0 (the initial model is taken from round 0),
    ``global_vector [P]``, ``client_updates [k, P]``, ``aggregation_weights [k]``, a ``utility`` that makes a game (see
    ``Game``) and a ``generator``. ``compute`` gives ``[num_clients]``, in the performance's unit. Use ``update``, not
    ``forward``: a single round of many has no such game.

    When not to use it:
        With many rounds of large steps: the coalitions' models are sums of updates that nobody has trained. Above ten
        clients: the game has 2^n models. With personalised or corrupted aggregations.

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

    def __init__(
        self,
        rounds: int,
        num_clients: int | None = None,
        *,
        coalition_weights: CoalitionWeights = "renormalized",
        **kwargs: Any,
    ) -> None:
        fold, weighting = WholeRun(rounds), weighting_of(self, coalition_weights)
        super().__init__(num_clients, None, value="shapley", fold=fold, weighting=weighting, per_class=False, **kwargs)

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
        super().update(client_ids, utility, generator, round_index, aggregation_weights, global_vector, client_updates)
