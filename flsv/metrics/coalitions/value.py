"""CoalitionValue: clients' values in coalition games, with a choice of performance, estimator and fold over rounds.

Published methods are presets of it.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
from torch import Tensor
from torchmetrics import Metric

from flsv.core import Round
from flsv.functional import ShapleyEstimate
from flsv.functional.shapley.estimators import check_estimator, estimator_of
from flsv.games import CoalitionUtility, Renormalized
from flsv.metrics.base import Claims, ContributionMetric
from flsv.metrics.coalitions.folds import Fold, FoldName, fold_named
from flsv.scores.performance import (
    Evaluators,
    Measure,
    Mode,
    as_measure,
    classifier_measure,
    measure_of,
    performance_of,
    title_of,
)
from flsv.utilities.errors import ConfigurationError

Weighting = Literal["uniform", "samples", "fixed", "aggregation", "aggregation-fixed"]
_AGGREGATION_WEIGHTINGS = ("aggregation", "aggregation-fixed")


class MeasuredMetric(ContributionMetric):
    """Base class of metrics that evaluate models.

    Models are evaluated at the server or at the clients, by a performance measure or by the accuracy of each class.
    """

    claims: Claims = ("value",)
    to_pay_by = True
    performance: str | Measure
    evaluators: Evaluators

    def _set_performance(
        self, performance: str | Metric, mode: Mode | None, per_class: bool, evaluators: Evaluators
    ) -> None:
        self.per_class = per_class
        self.evaluators = evaluators
        self.performance = performance_of(self, performance, mode).request
        if per_class and self.performance != "accuracy":
            raise ConfigurationError(
                f"{type(self).__name__}(per_class=True) works with performance='accuracy' only, but got "
                f"performance={performance!r}. Remove the argument performance or per_class."
            )

    @property
    def measure(self) -> Any:
        """The performance measure by which models are evaluated, in the form that :meth:`flsv.Round.game` takes."""
        performance = as_measure(self.performance)
        if self.per_class:
            performance = classifier_measure("per_class_accuracy")
        return measure_of(self.evaluators, performance)

    @property
    def evaluates(self) -> bool:  # type: ignore[override]  # depends on the evaluators
        """Return whether clients evaluate models on their own samples: True if ``evaluators`` is ``"clients"``."""
        return self.evaluators == "clients"

    @property
    def needs_classes(self) -> bool:
        """Return whether the training samples must have classes: True if values or clients' scores are per class."""
        return self.per_class or self.measure.by_class

    @property
    def unit(self) -> str:  # type: ignore[override]  # depends on the performance
        """Unit of a round's value: that of the performance measure."""
        if self.per_class:
            return "gain in a class's accuracy"
        measure = self.measure
        if measure.title == "negative_loss" and measure.is_of_classifier:
            return "fall of the validation loss (nats)"
        positive_class = None
        if self.class_names is not None and len(self.class_names) == 2:
            positive_class = self.class_names[1]
        title = title_of(measure, positive_class).replace("_", " ")
        return f"gain in {title}"


class CoalitionValue(MeasuredMetric):
    r"""A client's value in the coalition games of its rounds.

    There are three choices: the ``performance`` of a coalition's model, the ``estimator``, which selects the coalitions
    to evaluate, and the ``fold`` of rounds. Published methods are subclasses: :class:`PartialFederatedShapley`,
    :class:`CumulativeShapley`, :class:`SurrogateFederatedShapley`, :class:`DecayedShapley`, :class:`OneRoundShapley`
    and :class:`LeaveOneOut`.

    .. math::
        SV_i = \frac1k \sum_{S \subseteq C \setminus i} \frac{U(S \cup i) - U(S)}{\binom{k-1}{|S|}}

    with C the round's k clients, and U(S) the performance of the model that is aggregated from the updates of the
    clients in S.
    A client that does not take part in a round keeps its value. A client that never took part is NaN.

    Inside a ``FederatedLoop`` the utility is the round's coalition game. All metrics of a round share its evaluations.
    ``compute`` gives ``[num_clients]``, in the utility's unit, or ``[num_clients, num_classes]``.

    When not to use it:
        Without validation data at the server, or with data unlike those that the model is for. With
        ``evaluators="clients"``, to pay clients who may report false scores. In cohorts above some 20 clients, where
        each round costs hundreds of evaluations: take :class:`GradientAgreement`.

    Args:
        num_clients: n, the number of clients. None inside a ``FederatedLoop``.
        num_classes: M, the number of classes. If it is set, each class's accuracy is a game of its own.
        performance: the performance measure of a coalition's model if values are not per class, as for
            :class:`PartialFederatedShapley`.
        estimator: as for :class:`PartialFederatedShapley`, or ``"leave_one_out"``.
        estimator_args: its keywords, such as ``{"budget": 200}``.
        fold: how the rounds' values are combined: ``"last"``, ``"average"``, ``"surrogate"``, ``"sum"`` or ``"decay"``,
            or a fold from :mod:`flsv.metrics.coalitions` with arguments of its own, such as
            ``Decay(0.9, normalize=False)``.
        weighting: how a coalition's updates are averaged: ``"uniform"``, ``"samples"`` and ``"fixed"`` as for
            :class:`PartialFederatedShapley`. ``"aggregation"``: by the weights of the round's aggregation, scaled to
            sum to 1 inside a coalition. ``"aggregation-fixed"``: by the same weights without scaling, so that a small
            coalition's model moves less.
        per_class: compute values per class.
        mode: whether less (``"min"``) or more (``"max"``) is better, for a logged value, and for a torchmetrics metric
            without ``higher_is_better``.
        evaluators: who scores the models, see :mod:`flsv.games.client_evaluation`: the ``"server"`` or the
        ``"clients"``.
        kwargs: arguments of ``torchmetrics.Metric``.

    Raises:
        ConfigurationError: the fold, weighting or estimator is unknown, the estimator does not take an argument, an
            argument of a fold is out of range, a logged name has no ``mode``, or before the first round: the module
            does not log the name.

    Example:
        The decayed sum of values from random orders of the players.

        >>> from flsv.metrics.coalitions import Decay
        >>> metric = CoalitionValue(3, estimator="permutation", fold=Decay(0.5, normalize=False))
        >>> for index in range(2):
        ...     metric.update(torch.arange(3), lambda masks: masks.float() @ torch.tensor([1.0, 2.0, 4.0]), None, index)
        >>> metric.compute()
        tensor([0.7500, 1.5000, 3.0000])
    """

    cost = "a validation of every coalition's model: 2^k of k clients, or the estimator's budget."
    stderr: Tensor
    evaluations: Tensor

    def __init__(
        self,
        num_clients: int | None = None,
        num_classes: int | None = None,
        performance: str | Metric = "accuracy",
        estimator: str | Callable[..., ShapleyEstimate] = "auto",
        estimator_args: dict[str, Any] | None = None,
        fold: FoldName | Fold = "last",
        weighting: Weighting = "uniform",
        per_class: bool = False,
        mode: Mode | None = None,
        evaluators: Evaluators = "server",
        **kwargs: Any,
    ) -> None:
        name = type(self).__name__
        check_estimator(name, estimator, estimator_args or {})
        self.estimator = estimator
        self.estimator_args = dict(estimator_args or {})
        # The argument num_classes alone has the same effect.
        per_class = per_class or num_classes is not None
        self._set_performance(performance, mode, per_class=per_class, evaluators=evaluators)
        self.fold = fold_named(fold) if isinstance(fold, str) else fold
        self.fold.check(name, self.per_class)
        self.momentum = self.fold.momentum
        self.init = self.fold.init
        self.weighting = weighting
        super().__init__(num_clients, num_classes, **kwargs)

    def __init_subclass__(cls, chosen: Sequence[str] = (), **kwargs: Any) -> None:
        """Set a preset's signature: its own arguments, then those of this class except ``chosen``, which the preset
        fixes.
        """
        super().__init_subclass__(**kwargs)
        if not chosen:
            return
        parameters = dict(inspect.signature(cls.__init__).parameters)
        parameters.pop("self")
        parameters.pop("kwargs", None)  # follows as the last of the inherited ones
        inherited_parameters = inspect.signature(CoalitionValue.__init__).parameters
        omitted_names = {"self", *chosen, *parameters}
        for name, parameter in inherited_parameters.items():
            if name in omitted_names:
                continue
            if name != "kwargs":
                parameter = parameter.replace(kind=parameter.KEYWORD_ONLY)
            parameters[name] = parameter
        # inspect.signature reads this attribute.
        cls.__signature__ = inspect.Signature([*parameters.values()])  # type: ignore[attr-defined]

    @property
    def sign(self) -> str:  # type: ignore[override]  # depends on the fold
        """Meaning of positive, negative and zero values, in words, as the fold declares it."""
        return self.fold.sign

    @property
    def prior(self) -> float | None:  # type: ignore[override]  # depends on the fold
        """Value that samplers, aggregators and personalizers assume for a client that never took part, see
        :meth:`Fold.prior`. None: they get NaN."""
        return self.fold.prior(self.num_clients)

    @property
    def plot_lower_bound(self) -> float | None:  # type: ignore[override]  # depends on the fold
        """The fold's least possible value. None if values have no lower bound."""
        return self.fold.limits[0]

    @property
    def plot_upper_bound(self) -> float | None:  # type: ignore[override]  # depends on the fold
        """The fold's largest possible value. None if values have no upper bound."""
        return self.fold.limits[1]

    @property
    def needs(self) -> Sequence[str]:  # type: ignore[override]  # depends on the weighting
        """Names of attributes of a :class:`flsv.Round` that the functions in :attr:`round_fields` read."""
        if self.weighting in _AGGREGATION_WEIGHTINGS:
            return ("game", "generator", "aggregation_weights")
        return ("game", "generator")

    @property
    def round_fields(self) -> dict[str, Any]:
        """Functions ``{argument: f(round)}`` with which a ``FederatedLoop`` computes arguments of ``update``. An
        argument that has None in place of a function is not passed.
        """
        fields: dict[str, Any] = {
            "generator": lambda round: round.generator(type(self).__name__),
        }
        if self.weighting in _AGGREGATION_WEIGHTINGS:
            fields["utility"] = self._game_by_aggregation
        else:
            fields["utility"] = self._game
            fields["aggregation_weights"] = None
        return fields

    @property
    def unit(self) -> str:  # type: ignore[override]  # depends on the fold
        """Unit of a value: the fold's unit, in which the performance measure's unit is inserted."""
        return self.fold.unit.format(super().unit)

    def init_states(self, num_clients: int, num_classes: int | None) -> None:
        width = num_classes if self.per_class and num_classes is not None else 1
        self.fold.init_states(self, num_clients, width)
        self.add_state("evaluations", torch.tensor(0), dist_reduce_fx="sum")

    def update(
        self,
        client_ids: Tensor,
        utility: Any,
        generator: torch.Generator | None = None,
        round_index: int = 0,
        aggregation_weights: Tensor | None = None,
    ) -> None:
        """Estimate the values of a round's game, and add them to the fold.

        Args:
            client_ids: ``[k]``, the ids of the k players.
            utility: the round's game, ``utility(masks: bool [K, k]) -> [K]`` or ``[K, M]``, for K coalitions and M
                classes.
            generator: the estimator's generator of random numbers.
            round_index: the round's index, from 0.
            aggregation_weights: not used, since the game has the weights. A ``FederatedLoop`` passes them only if the
                ``weighting`` is that of the aggregation, and then updates the metric after the aggregation.
        """
        factor = self.fold.factor(round_index)  # of the round's values in the fold
        if factor == 0:
            self.fold.skip(self)
            return
        num_players = len(client_ids)
        estimator = estimator_of(self.estimator, num_players, self.estimator_args)
        estimate = estimator(utility, num_players, generator=generator)
        self.fold.update(self, client_ids, estimate, factor)
        self.evaluations += estimate.evaluations

    def compute(self) -> Tensor:
        """Compute the fold's values of all rounds so far, ``[num_clients]`` or ``[num_clients, num_classes]``. NaN for
        a client that never took part.
        """
        value = self.fold.compute(self)
        return value if self.per_class else value.squeeze(-1)

    def diagnostics(self) -> dict[str, Tensor]:
        """Return the number of ``evaluations`` in all rounds, and the fold's diagnostics. If values are not per class
        and the fold knows it, also ``stderr [num_clients]``, their standard error due to the estimator's sampling.
        """
        numbers = {"evaluations": self.evaluations.clone(), **self.fold.diagnostics(self)}
        error = self.fold.error(self)
        if error is not None and not self.per_class:
            numbers["stderr"] = error.squeeze(-1)
        return numbers

    def _game(self, round: Round) -> CoalitionUtility:
        weights: Any = self.weighting
        if weights == "fixed":
            weights = torch.full((len(round),), 1 / len(round))
        return round.game(self.measure, weights)

    def _game_by_aggregation(self, round: Round) -> CoalitionUtility:
        weights: Any = round.aggregation_weights
        if self.weighting != "aggregation-fixed":
            weights = Renormalized(weights)
        return round.game(self.measure, weights)
