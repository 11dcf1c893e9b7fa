"""DecayedShapley: each client's share of every round's gain, early rounds counting most.

Guo et al., "A Fair Contribution Measurement Method for Federated Learning", Sensors 24(15), 2024, Algorithm 1.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import Tensor
from torchmetrics import Metric

from flsv.errors import ConfigurationError
from flsv.functional.decayed_shapley import check_decay, round_factor, round_shares
from flsv.functional.shapley import ShapleyEstimate, Utility
from flsv.games import CoalitionUtility, Renormalized
from flsv.games.performance import Mode
from flsv.metrics.federated_shapley import PartialFederatedShapley
from flsv.metrics.guide import Guide
from flsv.metrics.intervals import OverRounds
from flsv.round import Round

CoalitionWeights = Literal["renormalized", "fixed"]


class DecayedShapley(PartialFederatedShapley):
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

    over_rounds: OverRounds = "sum"
    total: Tensor
    seen: Tensor
    skipped: Tensor
    flagged: Tensor
    truncated: Tensor

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
        check_decay(type(self).__name__, decay, threshold)
        check_coalition_weights(type(self).__name__, coalition_weights)
        self.decay, self.threshold, self.normalize = decay, threshold, normalize
        self.coalition_weights = coalition_weights
        super().__init__(num_clients, None, estimator, estimator_args, performance, mode=mode, **kwargs)

    @property
    def round_fields(self) -> dict[str, Any]:
        """Where a ``FederatedLoop`` finds the arguments of ``update``."""
        return {**super().round_fields, "utility": self._game}

    def init_states(self, num_clients: int, num_classes: int | None) -> None:
        self.add_state("total", torch.zeros(num_clients), dist_reduce_fx="sum")
        self.add_state("seen", torch.zeros(num_clients, dtype=torch.long), dist_reduce_fx="sum")
        for name in ("evaluations", "skipped", "flagged", "truncated"):
            self.add_state(name, torch.tensor(0), dist_reduce_fx="sum")

    def update(  # type: ignore[override]
        self,
        client_ids: Tensor,
        round_index: int,
        utility: Utility,
        generator: torch.Generator | None = None,
        aggregation_weights: Tensor | None = None,
    ) -> None:
        """Play one round's game; ``client_ids [k]`` are its players.

        ``aggregation_weights`` is named so that a loop updates after aggregation; the game already knows them.
        """
        self._check_clients(client_ids)
        self.rounds += 1
        factor = round_factor(round_index, self.decay, self.threshold)
        if factor == 0:
            self.truncated += 1
            self._note(client_ids[:0], self.total[:0])
            return
        estimate = self._estimate(utility, len(client_ids), generator)
        shares, skipped, flagged = round_shares(estimate.values)
        values = (shares if self.normalize else estimate.values).to(self.total)
        self.total[client_ids] += factor * values
        self._note(client_ids, values, factor)
        self.seen[client_ids] += 1
        self.evaluations += estimate.evaluations
        self.skipped += skipped
        self.flagged += flagged

    def compute(self) -> Tensor:
        """``[num_clients]``, NaN for clients never seen."""
        return self.total.masked_fill(self.seen == 0, float("nan"))

    def guide(self) -> Guide:
        shares = "decayed sum of shares of the rounds' gains"
        told = super().guide()
        return replace(told, unit=shares if self.normalize else f"{told.unit}, decayed sum over rounds")

    def diagnostics(self) -> dict[str, Tensor]:
        """Coalitions evaluated, and how many rounds were skipped, flagged, and not evaluated."""
        names = ("evaluations", "skipped", "flagged", "truncated")
        return {name: getattr(self, name).clone() for name in names}

    def _game(self, round: Round) -> CoalitionUtility:
        assert round.aggregation_weights is not None
        fixed = self.coalition_weights == "fixed"
        return round.play(
            self.performance, round.aggregation_weights if fixed else Renormalized(round.aggregation_weights)
        )


def check_coalition_weights(owner: str, coalition_weights: str) -> None:
    """Raise ConfigurationError for an unknown kind of weights."""
    if coalition_weights not in ("renormalized", "fixed"):
        raise ConfigurationError(
            f'{owner}(coalition_weights={coalition_weights!r}): expected "renormalized" or "fixed".'
        )
