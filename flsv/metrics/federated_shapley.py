"""PartialFederatedShapley and LeaveOneOut: what every client of a round's cohort adds to the model, by coalition games.

Sun et al., "ShapleyFL: Robust Federated Learning Based on Shapley Value", KDD 2023, definition 4.1.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Literal, get_args

import torch
from torch import Tensor
from torchmetrics import Metric

from flsv.arguments import check_number
from flsv.errors import ConfigurationError
from flsv.functional.momentum import momentum_merge, momentum_row, momentum_value
from flsv.functional.shapley import ESTIMATORS, ShapleyEstimate, Utility
from flsv.games.performance import Mode, performance_of
from flsv.metrics._estimator import check_estimator
from flsv.metrics.base import ContributionMetric
from flsv.metrics.guide import Guide
from flsv.metrics.intervals import OverRounds

Weighting = Literal["uniform", "samples", "fixed"]


def latest(stretches: Tensor) -> Tensor:
    """Of successive stretches of rounds ``[W, ...]``, earliest first, the last value that is not NaN."""
    latest = stretches[0]
    for later in stretches[1:]:
        latest = torch.where(later.isnan(), latest, later)
    return latest


class PartialFederatedShapley(ContributionMetric):
    r"""The Shapley value of the game of a round, played by its cohort.

    .. math::
        SV_i = \frac1k \sum_{S \subseteq C \setminus i} \frac{U(S \cup i) - U(S)}{\binom{k-1}{|S|}}

    with U(S) the performance, on the server's validation set, of the model made of the updates of S. A client outside
    the cohort keeps its value; one never seen is NaN.

    As input to ``update``: ``client_ids [k]``, a ``utility(masks: bool [K, k]) -> [K]`` (or ``[K, M]``) and a
    ``generator``. Inside a ``FederatedLoop`` the utility is the round's coalition game; all metrics of a round share
    its evaluations. ``compute`` gives ``[num_clients]``, in the utility's unit, or ``[num_clients, num_classes]``.

    Args:
        num_clients: n. None inside a ``FederatedLoop``: taken from the data.
        num_classes: M. Where it is given, values are per class: the game of each class's accuracy.
        estimator: a name in ``flsv.functional.shapley.ESTIMATORS``, a function of the same signature, or ``"auto"``:
            exact for up to 10 players, else ``"surrogate"`` with 20 evaluations per player.
        estimator_args: keywords for the estimator, such as ``{"budget": 200}``.
        performance: what a coalition's model is measured by, where values are not per class: ``"accuracy"``,
            ``"balanced_accuracy"``, ``"negative_loss"``, ``"auroc"``, ``"average_precision"``, ``"f1"``, any name that
            the module logs when it validates, or any torchmetrics metric; see :mod:`flsv.games.performance`.
        weighting: how a coalition's updates are averaged: ``"uniform"``, by ``"samples"``, or ``"fixed"``: every update
            counts 1/k, however many are in the coalition. Then an update of zero changes no coalition's model (without
            BatchNorm) and is worth exactly 0. In an average it draws the others' updates towards 0: where local
            training overshoots that is a gain, and a free rider is paid for it.
        momentum: mu in [0, 1) of a moving average over a client's rounds; 0: the last round's value.
        per_class: values per class, with the number of classes taken from the data.
        mode: whether less (``"min"``) or more (``"max"``) of a logged value is better; of a torchmetrics metric where
            it does not say so itself.
        init: the value before a client's first round, from which the moving average starts: a number, or
            ``"uniform"``, 1/n, as in S-FedAvg. Samplers and aggregators take clients never seen to be worth it. None:
            there is none, the average starts at the first round's value.
        kwargs: see ``torchmetrics.Metric``.

    Raises:
        ConfigurationError: an unknown estimator, weighting or argument of an estimator, momentum outside [0, 1), a
            logged name without ``mode``, an ``init`` that is no number and not "uniform"; before the first round, a
            name that the module does not log.

    Example:
        >>> metric = PartialFederatedShapley(num_clients=4, estimator="exact")
        >>> glove = lambda masks: (masks[:, 0] & masks[:, 1:].any(1)).float()  # one left glove, two right ones
        >>> metric.update(torch.tensor([0, 1, 3]), glove)
        >>> metric.compute()
        tensor([0.6667, 0.1667,    nan, 0.1667])
        >>> metric.diagnostics()["evaluations"]
        tensor(8)
    """

    over_rounds: OverRounds = "momentum"
    init: float | Literal["uniform"] | None = None
    history: Tensor
    stderr: Tensor
    freedom: Tensor
    evaluations: Tensor

    def __init__(
        self,
        num_clients: int | None = None,
        num_classes: int | None = None,
        estimator: str | Callable[..., ShapleyEstimate] = "auto",
        estimator_args: dict[str, Any] | None = None,
        performance: str | Metric = "accuracy",
        weighting: Weighting = "uniform",
        momentum: float = 0.0,
        per_class: bool = False,
        mode: Mode | None = None,
        init: float | Literal["uniform"] | None = None,
        **kwargs: Any,
    ) -> None:
        check_estimator(self, estimator, estimator_args or {})
        check_number(self, "momentum", momentum, least=0, below=1)
        self.estimator, self.estimator_args = estimator, dict(estimator_args or {})
        self.performance = performance_of(self, performance, mode)
        if isinstance(init, str) and init != "uniform":
            raise ConfigurationError(f'{type(self).__name__}(init={init!r}): expected a number, "uniform" or None.')
        if init is not None and not isinstance(init, str):
            check_number(self, "init", init)
        if weighting not in get_args(Weighting):
            known = ", ".join(map(repr, get_args(Weighting)))
            raise ConfigurationError(f"{type(self).__name__}(weighting={weighting!r}): expected one of {known}.")
        self.weighting, self.momentum = weighting, momentum
        if init is not None:  # checkpoints of runs without it stay what they were
            self.init = init
        self.per_class = per_class or num_classes is not None
        if self.per_class and not isinstance(self.performance, str):
            raise ConfigurationError(
                f"{type(self).__name__}(performance={self.performance.of!r}): values per class are those of "
                "the classes' accuracies. Leave performance out, or num_classes and per_class."
            )
        super().__init__(num_clients, num_classes, **kwargs)

    @property
    def round_fields(self) -> dict[str, Any]:
        """Where a ``FederatedLoop`` finds the arguments of ``update``: in the round's coalition games."""
        return {
            "utility": lambda round: round.play(self.measured_by, _coalition_weights(self.weighting, len(round))),
            "generator": lambda round: round.generator(type(self).__name__),
        }

    @property
    def measured_by(self) -> Any:
        """What a game's models are measured by, see :meth:`flsv.Round.play`."""
        return "per_class_accuracy" if self.per_class else self.performance

    def guide(self) -> Guide:
        of = self.performance if isinstance(self.performance, str) else getattr(self.performance, "of", "performance")
        said = of if isinstance(of, str) else type(of).__name__
        units = {"accuracy": "gain in accuracy", "negative_loss": "fall of the validation loss (nats)"}
        return Guide(
            unit="gain in a class's accuracy"
            if self.per_class
            else units.get(said, f"gain in {said.replace('_', ' ')}"),
            sign="positive: the coalitions do better with the client; negative: worse; 0: no difference.",
            needs="the server's validation set.",
            cost="a validation of every coalition's model: 2^k of k clients, or the estimator's budget.",
        )

    def init_states(self, num_clients: int, num_classes: int | None) -> None:
        width = num_classes if self.per_class and num_classes is not None else 1
        reduction = partial(momentum_merge, momentum=self.momentum)
        self.add_state("history", torch.zeros(num_clients, 2 * width + 1), dist_reduce_fx=reduction)
        for name in ("stderr", "freedom"):
            self.add_state(name, torch.full((num_clients, width), float("nan")), dist_reduce_fx=latest)
        self.add_state("evaluations", torch.tensor(0), dist_reduce_fx="sum")
        if self.init is not None:
            self.prior = 1 / num_clients if self.init == "uniform" else self.init

    def update(self, client_ids: Tensor, utility: Utility, generator: torch.Generator | None = None) -> None:
        """Play one round's game; ``client_ids [k]`` are its players."""
        self._check_clients(client_ids)
        estimate = self._estimate(utility, len(client_ids), generator)
        values, stderr = (value.to(self.history).reshape(len(client_ids), -1) for value in self._value(estimate))
        now, now_stderr = torch.zeros_like(self.history), torch.full_like(self.stderr, float("nan"))
        now[client_ids], now_stderr[client_ids] = momentum_row(values, self.momentum), stderr
        self.history = momentum_merge(torch.stack([self.history, now]), self.momentum)
        self.stderr = latest(torch.stack([self.stderr, now_stderr]))
        now_freedom = torch.full_like(self.freedom, float("nan"))
        now_freedom[client_ids] = freedom_of(estimate).to(self.freedom).reshape(len(client_ids), -1)
        self.freedom = latest(torch.stack([self.freedom, now_freedom]))
        self._note(client_ids, values.mean(-1))
        self.evaluations += estimate.evaluations
        self.rounds += 1

    def compute(self) -> Tensor:
        """``[num_clients]`` or ``[num_clients, num_classes]``, NaN for clients never seen."""
        value = momentum_value(self.history, self.momentum, init=None if self.init is None else self.prior)
        return value if self.per_class else value.squeeze(-1)

    def per_client(self, value: Tensor) -> Tensor:
        """``[num_clients]``: per-class values are summed over classes divided by M, the value of the mean recall."""
        return value.mean(-1) if value.ndim == 2 else value

    def diagnostics(self) -> dict[str, Tensor]:
        """The standard error of each client's last value, and the evaluations spent in all rounds."""
        result = {"evaluations": self.evaluations.clone()}
        return result if self.per_class else {**result, "stderr": self.stderr.squeeze(-1)}

    def error_freedom(self) -> Tensor:
        return self.freedom.squeeze(-1)

    def _value(self, estimate: ShapleyEstimate) -> tuple[Tensor, Tensor]:
        """What a round contributes to the running value, and its standard error."""
        return estimate.values, estimate.stderr

    def _estimate(self, utility: Utility, players: int, generator: torch.Generator | None) -> ShapleyEstimate:
        if callable(self.estimator):
            return self.estimator(utility, players, generator=generator, **self.estimator_args)
        name, arguments = self.estimator, self.estimator_args
        if name == "auto":
            name, arguments = ("exact", {}) if players <= 10 else ("surrogate", {"budget": 20 * players, **arguments})
        return ESTIMATORS[name](utility, players, generator=generator, **arguments)


def freedom_of(estimate: ShapleyEstimate) -> Tensor:
    """Of the standard error's shape."""
    return torch.as_tensor(estimate.freedom, dtype=torch.float64).expand(estimate.stderr.shape)


def _coalition_weights(weighting: Weighting, players: int) -> Literal["uniform", "samples"] | Tensor:
    return torch.full((players,), 1 / players) if weighting == "fixed" else weighting


class LeaveOneOut(PartialFederatedShapley):
    """What the round's model loses without a client: U(C) - U(C without i). k + 1 evaluations a round.

    Arguments as :class:`PartialFederatedShapley`'s, without the estimator's.

    Example:
        >>> metric = LeaveOneOut(num_clients=3)
        >>> metric.update(torch.arange(3), lambda masks: masks.float() @ torch.tensor([1.0, 2.0, 3.0]))
        >>> metric.compute()
        tensor([1., 2., 3.])
    """

    def __init__(
        self,
        num_clients: int | None = None,
        num_classes: int | None = None,
        performance: str | Metric = "accuracy",
        weighting: Weighting = "uniform",
        momentum: float = 0.0,
        per_class: bool = False,
        mode: Mode | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(
            num_clients, num_classes, "leave_one_out", None, performance, weighting, momentum, per_class, mode, **kwargs
        )
