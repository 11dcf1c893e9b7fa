"""Presets of CoalitionValue for a whole run: CumulativeShapley, LowerBoundShapley, DecayedShapley, OneRoundShapley.

Wang et al., "A Principled Approach to Data Valuation for Federated Learning", 2020, definition 1 (CumulativeShapley);
Guo et al., "A Fair Contribution Measurement Method for Federated Learning", Sensors 24(15), 2024, Algorithm 1
(DecayedShapley); Song, Tong, Wei, "Profit Allocation for Federated Learning", IEEE Big Data 2019, Algorithm 1
(OneRoundShapley).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor
from torchmetrics import Metric

from flsv.errors import ConfigurationError
from flsv.functional.shapley import ShapleyEstimate, Utility
from flsv.games.performance import Mode
from flsv.metrics.coalitions.folds import Decay, LowerBound, Sum
from flsv.metrics.coalitions.value import CoalitionValue, Weighting
from flsv.metrics.coalitions.whole_run import Game, WholeRun

CoalitionWeights = Literal["renormalized", "fixed"]


class CumulativeShapley(CoalitionValue):
    """The sum of a client's Shapley values over the rounds in which it took part; 0 in all others.

    Inputs and arguments as for :class:`PartialFederatedShapley`, but for ``momentum`` and ``init``. ``compute`` gives
    ``[num_clients]`` or ``[num_clients, num_classes]``; clients never seen are NaN. The standard errors of the rounds,
    which are independent, add in squares.

    Example:
        >>> metric = CumulativeShapley(num_clients=3)
        >>> worth = lambda masks: masks.float() @ torch.tensor([1.0, 3.0])
        >>> metric.update(torch.tensor([0, 2]), worth)
        >>> metric.update(torch.tensor([0, 1]), worth)
        >>> metric.compute()
        tensor([2., 3., 3.])
    """

    def __init__(
        self,
        num_clients: int | None = None,
        num_classes: int | None = None,
        estimator: str | Callable[..., ShapleyEstimate] = "auto",
        estimator_args: dict[str, Any] | None = None,
        performance: str | Metric = "accuracy",
        weighting: Weighting = "uniform",
        per_class: bool = False,
        mode: Mode | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(
            num_clients,
            num_classes,
            performance,
            estimator=estimator,
            estimator_args=estimator_args,
            fold=Sum(),
            weighting=weighting,
            per_class=per_class,
            mode=mode,
            **kwargs,
        )


class LowerBoundShapley(CoalitionValue):
    r"""A one-sided lower confidence bound of a client's mean Shapley value over its rounds.

    .. math:: v_i = \overline{SV}_i - t_{T_i - 1}(\text{confidence})\, \frac{s_i}{\sqrt{T_i}}

    with the mean and the spread over the :math:`T_i` rounds in which the client took part; the spread holds the error
    of a sampled estimate, and how values change in the course of training. A client in its first round has its value
    less its estimator's standard error times the normal quantile. Whoever is paid by it is paid for what is
    established: values that swing from round to round, as those of noise and of few samples do, count for less, and
    a client seen seldom for less than one seen often. It is no remedy against a client that comes as two, whose values
    are as steady as one's: for that take ``estimator="banzhaf"``, under which two copies together have the one's value,
    or ``"beta"`` with ``{"alpha": 1, "beta": 4}``, under which they have less (see
    :mod:`flsv.functional.shapley.other_values`).

    Inputs as for :class:`PartialFederatedShapley`. ``compute`` gives ``[num_clients]`` or ``[num_clients,
    num_classes]``, in the utility's unit; NaN for clients never seen. ``diagnostics`` holds the means, too.

    Args:
        num_clients: n. None inside a ``FederatedLoop``: taken from the data.
        num_classes: as for :class:`PartialFederatedShapley`.
        estimator: likewise.
        estimator_args: likewise.
        performance: likewise.
        weighting: likewise.
        per_class: likewise.
        mode: likewise.
        confidence: in [0.5, 1); 0.5 is the mean itself.
        kwargs: see ``torchmetrics.Metric``.

    Raises:
        ConfigurationError: confidence outside [0.5, 1); what :class:`PartialFederatedShapley` raises.

    Example:
        >>> metric = LowerBoundShapley(num_clients=3)
        >>> for worth in ([1.0, 3.0], [1.0, 5.0]):
        ...     metric.update(torch.tensor([0, 2]), lambda masks: masks.float() @ torch.tensor(worth))
        >>> metric.compute()
        tensor([1.0000,    nan, 0.9223])
    """

    def __init__(
        self,
        num_clients: int | None = None,
        num_classes: int | None = None,
        estimator: str | Callable[..., ShapleyEstimate] = "auto",
        estimator_args: dict[str, Any] | None = None,
        performance: str | Metric = "accuracy",
        weighting: Weighting = "uniform",
        per_class: bool = False,
        mode: Mode | None = None,
        confidence: float = 0.9,
        **kwargs: Any,
    ) -> None:
        super().__init__(
            num_clients,
            num_classes,
            performance,
            estimator=estimator,
            estimator_args=estimator_args,
            fold=LowerBound(confidence),
            weighting=weighting,
            per_class=per_class,
            mode=mode,
            **kwargs,
        )


class DecayedShapley(CoalitionValue):
    r"""The decayed sum of each client's share of the rounds' gains.

    .. math::
        \phi_i = \sum_{t=1}^{R} \omega^t \frac{\phi_i(t)}{\sum_j \phi_j(t)}

    with :math:`\phi_i(t)` the Shapley value of the game of round t, whose sub-models are rebuilt from the round's
    updates with the weights of the round's own aggregation; so it is updated after that. A round in which nothing
    happens is skipped; in one whose values sum to nothing or less they are divided by the sum of their absolute values.
    Both are counted (``diagnostics``). A round that gains next to nothing counts as much as any other, and nothing
    bounds the shares of one with a small gain and values of both signs: ``normalize=False`` leaves the division out.

    With FedAvg it covers three baselines of the paper, the sum of the rounds' values (SOR), the multi-round index (MR)
    and the truncated one (TMR): ``DecayedShapley(**MULTI_ROUND_INDICES["MR"])``, see
    :mod:`flsv.functional.decayed_shapley`.

    As input to ``update``: ``client_ids [k]``, ``round_index`` from 0, a ``utility(masks: bool [K, k]) -> [K]`` and a
    ``generator``. ``compute`` gives ``[num_clients]``; a client outside the cohort gets nothing in that round, one
    never seen in an evaluated round is NaN.

    Args:
        num_clients: n. None inside a ``FederatedLoop``: taken from the data.
        decay: omega in (0, 1].
        threshold: rounds with decay^t below it are not evaluated at all; at most ``decay``.
        estimator: as for :class:`PartialFederatedShapley`.
        estimator_args: likewise.
        normalize: divide each round's values by their sum; else the value is in the unit of the performance.
        performance: what a coalition's model is measured by, see :mod:`flsv.games.performance`.
        coalition_weights: ``"renormalized"``, the aggregation's weights made to sum to 1 inside a coalition (eq. 4), or
            ``"fixed"``, as they are (Algorithm 1, line 12): a small coalition then makes a small step.
        mode: as for :class:`PartialFederatedShapley`.
        kwargs: see ``torchmetrics.Metric``.

    Raises:
        ConfigurationError: an unknown estimator or kind of weights; decay or threshold out of range.

    Example:
        >>> metric = DecayedShapley(num_clients=3, decay=0.5)
        >>> metric.update(torch.tensor([0, 2]), 0, lambda masks: masks.float() @ torch.tensor([1.0, 3.0]))
        >>> metric.update(torch.tensor([0, 2]), 1, lambda masks: masks.float() @ torch.tensor([1.0, 1.0]))
        >>> metric.compute()
        tensor([0.2500,    nan, 0.5000])
    """

    def __init__(
        self,
        num_clients: int | None = None,
        decay: float = 0.8,
        threshold: float = 0.0,
        normalize: bool = True,
        estimator: str | Callable[..., ShapleyEstimate] = "auto",
        estimator_args: dict[str, Any] | None = None,
        performance: str | Metric = "accuracy",
        coalition_weights: CoalitionWeights = "renormalized",
        mode: Mode | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(
            num_clients,
            None,
            performance,
            estimator=estimator,
            estimator_args=estimator_args,
            fold=Decay(decay, threshold, normalize),
            weighting=_weighting(self, coalition_weights),
            mode=mode,
            **kwargs,
        )

    def update(  # type: ignore[override]
        self,
        client_ids: Tensor,
        round_index: int,
        utility: Utility,
        generator: torch.Generator | None = None,
        aggregation_weights: Tensor | None = None,
    ) -> None:
        """Play one round's game; ``client_ids [k]`` are its players."""
        super().update(client_ids, utility, generator, round_index, aggregation_weights)


class OneRoundShapley(CoalitionValue):
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
        super().__init__(
            num_clients,
            None,
            performance,
            estimator=estimator,
            estimator_args=estimator_args,
            fold=WholeRun(rounds),
            weighting=_weighting(self, coalition_weights),
            mode=mode,
            **kwargs,
        )

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


def _weighting(owner: CoalitionValue, coalition_weights: CoalitionWeights) -> Weighting:
    if coalition_weights not in ("renormalized", "fixed"):
        raise ConfigurationError(
            f'{type(owner).__name__}(coalition_weights={coalition_weights!r}): expected "renormalized" or "fixed".'
        )
    return "aggregation" if coalition_weights == "renormalized" else "aggregation-fixed"
