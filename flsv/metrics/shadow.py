"""ShadowShapley: the values of retrained coalitions, from each client alone and predicted outputs.

:mod:`flsv.retraining` trains the coalitions' models. This module computes Shapley values from their outputs and scores.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from math import ceil
from typing import Annotated, Any, ClassVar

import torch
from annotated_types import Ge
from torch import Tensor
from torchmetrics import Metric

from flsv.core import Values
from flsv.functional.shapley.predicted_outputs import ValuesFromOutputs
from flsv.metrics.base import last_values, latest
from flsv.metrics.coalitions.design import (
    EVALUATIONS_PER_RUN,
    MAX_VALUED_ROUNDS,
    WhichCoalitions,
    check_halvings,
    spread_rounds,
)
from flsv.metrics.coalitions.value import MeasuredMetric
from flsv.scores.performance import Evaluators, Mode
from flsv.utilities.declared import Count
from flsv.values.coalition_files import measure_name, outputs_name
from flsv.values.designs import Design, design_named
from flsv.values.query import (
    NUM_RECENT_ROUNDS,
    Game,
    SeedScores,
    value_after_round,
    values_by_round,
)

#: Why there are no values in a run.
BEFORE_TRAINING = "there are no values before the coalitions are trained"


class ShadowShapley(MeasuredMetric):
    r"""How much each client adds: Shapley values over the coalitions of clients, for one or two more training runs.

    .. math::
        \phi_i = \sum_{S \subseteq N \setminus i} \frac{U(S \cup i) - U(S)}{n \binom{n-1}{|S|}}, \qquad
        U(S) = u(\text{the model that S alone has trained})

    U(S) is the performance u, on the server's validation set, of the model that only the clients in S have trained, and
    N the set of all n clients. By default all coalitions are trained if they can be trained at once for about two runs,
    as those of a few clients and small networks can, or if this takes no longer than half a minute or so, at once or
    one by one. Then the values are exact. Otherwise few coalitions are trained, by default each client alone. The
    *outputs* of all others on the validation samples are predicted from those of the trained ones, and scored, see
    :mod:`flsv.functional.shapley.predicted_outputs`.

    **Training.** A coalition is the same run with its members only. It is the ordinary fit of a copy of Trainer, module
    and callbacks, made before the run, with the same seed and as many rounds. It is trained after the run in the same
    process, without loggers, progress bars, early stopping or time limit. Ranks share the coalitions. The coalition of
    all clients is trained once more for the first two rounds. If its model differs from the run's own model, a warning
    and the verdict say so. Sites train coalitions beside the run, and
    values are computed after it.

    **At once.** Where it is cheaper, one fit trains all coalitions, as rows of stacked tensors. Their models are those
    of single fits up to rounding. Each run proves this: the coalition of all clients must come to the run's own
    models. The clients with the fewest and the most samples, which train alone as well, must come to those of their own
    fits. Otherwise a line says why, and the coalitions are trained one by one. Where training enlarges rounding errors,
    coalitions train in 64 bits, too, and intervals include by how much the values differ.

    **Cost.** For n clients ``"singles"`` costs the training of one more run and validations of n models, one by one,
    ``"both"`` that of n runs, and ``"all"`` of :math:`2^{n-1} - 1`. At once they cost less if the network is small
    (``docs/explanation/value.md``).

    **Performances.** Outputs are predicted for accuracy, balanced accuracy, negative loss, values per class and
    torchmetrics metrics of ``(forward(x), y)``. A value that the module logs has no outputs: then the missing
    coalitions' *scores* are estimated by :func:`flsv.functional.few_coalitions_shapley`, which is less accurate.

    **Samplers.** Each coalition draws its own cohorts among its members, as many clients as the run draws, or all if it
    has fewer (:meth:`flsv.sampling.ClientSampler.among`). If every round is valued, the values are means over the last
    three rounds. Samplers that choose by values or losses are refused.

    Utilities and outputs of trained coalitions are stored in the run's folder ``coalitions``, and the utilities in
    ``coalitions.csv``, too. After a kill ``flsv
    retrain``, or the same fit with ``ckpt_path``, trains the rest.

    ``compute`` gives the last round's values ``[num_clients]``, or by class. A client that never took part is NaN.

    When not to use it:
        With a single seed, for payment: run ``flsv retrain`` with several seeds. With sites that may send
        another model than their own. With ``evaluators="clients"``, to pay clients who may report false scores
        (``docs/results/client_evaluation.md``).

    Args:
        num_clients: n, the number of clients. None inside a ``FederatedLoop``.
        num_classes: M, the number of classes. If it is set, each class's accuracy is a game of its own.
        coalitions: the coalitions to train: a design of :func:`flsv.functional.few_coalitions` (``"singles"``,
            ``"both"``, ``"all"``, ...), a list of coalitions, each a list of its members' numbers, or a
            :class:`flsv.values.designs.Design`. ``"halves"``: each
            client alone, then complementary halves of clients whose outputs, or at sites first updates, are unlike, see
            :func:`flsv.functional.choose_halvings`. ``"auto"``: the most accurate of ``"all"``,
            ``"pairs+leave-two-out"``, ``"pairs+leave-one-out"``, ``"both"``, three, two and one of ``"halves"``, and
            ``"singles"`` within ``max_fits``.
        performance: the performance measure of a model, see :mod:`flsv.scores.performance`.
        per_class: compute values per class.
        mode: whether less (``"min"``) or more (``"max"``) of a logged value is better.
        every: compute values every ``every`` rounds and at the end, which is after each of the last three rounds for
            ``"accuracy"``, ``"balanced_accuracy"`` and ``"negative_loss"``, and after the last for any other
            performance. Between them the previous values stand. None: up to ten times in a run for these three, five
            times for any other performance. Ten are reduced, at least to the last three rounds, until scoring the
            trained models takes no more than a quarter of the samples on which these train, see
            :func:`flsv.metrics.coalitions.design.num_valued_rounds`. With ``evaluators="clients"`` ten are not
            reduced.
        max_fits: the largest cost of ``coalitions="auto"``, in training runs of the whole federation, see
            :mod:`flsv.retraining.price`. None: two runs for coalitions that are trained at once. If none can be, each
            client is trained alone. But for 1, all coalitions may cost 10,000 steps of a small model, some 15 to 30
            seconds. 1 trains each client alone.
        evaluators: who scores the models, see :mod:`flsv.games.client_evaluation`: the ``"server"``, or the
            ``"clients"``, of whom then each predicts coalitions' outputs on its own samples.
        excluded_callbacks: names of classes of callbacks that take no part in coalitions, such as one that sends
            messages. None: those of installed packages that need neither torch nor Lightning.
        halvings: the number of times that all clients are halved with ``coalitions="halves"``. Each costs one more run.
        kwargs: arguments of ``torchmetrics.Metric``.

    Raises:
        ConfigurationError: an option is unknown, values per class are computed with a performance other than accuracy,
            or in a loop, before training: coalitions cannot be trained with a personalizer, colluders, privacy noise,
            or a part of the module that stays at the clients (``share``), if it is used in the server's scores, or at
            sites.

    Example:
        >>> from flsv.functional import few_coalitions
        >>> metric = ShadowShapley(num_clients=3, coalitions="all")
        >>> masks = few_coalitions(3, "all")
        >>> metric.update(torch.arange(3), masks, lambda masks: masks.double() @ torch.tensor([1.0, 2.0, 4.0]).double())
        >>> metric.compute()
        tensor([1., 2., 4.], dtype=torch.float64)
    """

    trains_coalitions = True
    sign = "positive: federations do better with the client; negative: worse; 0: no difference."
    cost = "by default one or two more fits, and validations of the coalitions' models."
    values: Tensor
    half_widths: Tensor
    evaluations: Tensor
    recent: Tensor
    participations: Tensor

    averages = False
    """Whether values are means over the last rounds, as with a sampler. :meth:`plan_rounds` sets it."""

    _max_valued_rounds = MAX_VALUED_ROUNDS
    _num_rounds: int | None = None  # None: not known yet
    # Each client's score of the federation's own model, if clients score models.
    _client_scores: Tensor | None = None
    _latest: Values  # the states `values` and `half_widths` hold what is merged and saved of them

    def __init__(
        self,
        num_clients: int | None = None,
        num_classes: int | None = None,
        coalitions: WhichCoalitions = "auto",
        performance: str | Metric = "accuracy",
        per_class: bool = False,
        mode: Mode | None = None,
        every: Count | None = None,
        max_fits: Annotated[float, Ge(1)] | None = None,
        evaluators: Evaluators = "server",
        excluded_callbacks: Sequence[str] | None = None,
        halvings: Count | None = None,
        **kwargs: Any,
    ) -> None:
        self.halvings = halvings
        check_halvings(coalitions, self.num_halvings, evaluators)
        self.coalitions = coalitions
        if not isinstance(coalitions, str | Design):
            self.coalitions = [list(members) for members in coalitions]
        self.excluded_callbacks = None if excluded_callbacks is None else tuple(excluded_callbacks)
        self.max_fits = max_fits
        self.every = every
        self._rounds_per_value = every or 1
        # The argument num_classes alone has the same effect.
        per_class = per_class or num_classes is not None
        self._set_performance(performance, mode, per_class=per_class, evaluators=evaluators)
        super().__init__(num_clients, num_classes, **kwargs)

    @property
    def design(self) -> Design | None:
        """The design that ``coalitions`` names. None: a loop chooses it by its price."""
        if self.coalitions == "auto":
            return None
        return design_named(self.coalitions, self.num_halvings)

    @property
    def num_halvings(self) -> int:
        """The argument ``halvings``, or its default."""
        return self.halvings or 1

    needs: Sequence[str] | None = ("games",)
    # In a FederatedLoop the values are computed after the run, by `complete`.
    round_fields: ClassVar[Mapping[str, str | None]] = {
        "client_ids": "senders",
        "coalitions": None,
        "utility": None,
    }

    def check_rounds(self, rounds: int) -> None:
        self._num_rounds = rounds
        if self.every is None and not self.measure.is_of_classifier:
            self._rounds_per_value = ceil(rounds / EVALUATIONS_PER_RUN)

    def plan_rounds(self, averages: bool, max_valued_rounds: int = MAX_VALUED_ROUNDS) -> None:
        """Choose the rounds with values of a run that trains coalitions. A loop calls this before the first round.

        Args:
            averages: whether values are means over the last rounds.
            max_valued_rounds: the largest number of rounds with values, if ``every`` is None. It depends on how much is
                scored.
        """
        self.averages = averages
        self._max_valued_rounds = max_valued_rounds

    def is_due(self, round_index: int) -> bool:
        """Return whether there are values after a round, even if it is not the last."""
        has_default_rounds = self.every is None and self.measure.is_of_classifier
        if has_default_rounds and self._num_rounds is not None:
            return round_index in spread_rounds(range(self._num_rounds), self._max_valued_rounds)
        is_one_of_last = (
            self._values_last_rounds
            and self._num_rounds is not None
            and round_index >= self._num_rounds - NUM_RECENT_ROUNDS
        )
        return is_one_of_last or (round_index + 1) % self._rounds_per_value == 0

    @property
    def _values_last_rounds(self) -> bool:
        """Return whether the last three rounds have values, for any ``every``, so that the intervals of a fit and of a
        retraining are the same. Where a score is expensive, they do only if all rounds have values.
        """
        if self.measure.is_of_classifier or self._rounds_per_value == 1:
            return True
        return self._num_rounds is not None and self._num_rounds <= EVALUATIONS_PER_RUN

    def rounds_to_value(self, num_rounds: int) -> list[int]:
        """Return the rounds after which a run of ``num_rounds`` rounds has values, ascending."""
        # The last rounds have values if these are averaged.
        num_last = NUM_RECENT_ROUNDS if self.averages and self._values_last_rounds else 1
        first_of_last = num_rounds - num_last
        return [
            index for index in range(num_rounds) if index >= first_of_last or self.is_due(index)
        ]

    def init_states(self, num_clients: int, num_classes: int | None) -> None:
        width = num_classes if self.per_class and num_classes is not None else 1
        for name in ("values", "half_widths"):
            no_values = torch.full((num_clients, width), torch.nan).double()
            self.add_state(name, no_values, dist_reduce_fx=latest)
        self._latest = Values(no_values, evidence={})
        # The values after each of the last rounds. NaN if they are not known.
        no_recent_values = torch.full((NUM_RECENT_ROUNDS, num_clients, width), torch.nan).double()
        self.add_state("recent", no_recent_values, dist_reduce_fx=last_values)
        self.add_state(
            "participations", torch.zeros(num_clients, dtype=torch.long), dist_reduce_fx="sum"
        )
        self.add_state("evaluations", torch.tensor(0), dist_reduce_fx="sum")

    def update(
        self,
        client_ids: Tensor,
        coalitions: Tensor | None = None,
        utility: Callable[[Tensor], Tensor] | None = None,
    ) -> None:
        """Count a round, and compute the values of the coalitions' game after it.

        Args:
            client_ids: ``[k]``, the round's clients.
            coalitions: bool ``[K, n]``, the trained coalitions with the empty and the full one. None: :meth:`complete`
                computes the values after the run.
            utility: ``utility(masks: bool [K, n]) -> [K]`` or ``[K, M]``, the performance of the coalitions' models.
        """
        self.participations[client_ids] += 1
        if coalitions is None or utility is None:
            return
        self._check_width(coalitions)
        masks = coalitions.cpu()
        utilities = utility(masks).detach().cpu().double()
        recent_values = self.recent.cpu()  # [rounds, n, M]
        is_known = recent_values.isfinite().flatten(1).all(1)
        values, estimate = value_after_round(
            self.game(masks, rounds=[0]),
            utilities.view(len(masks), -1),
            recent_estimates=list(recent_values[is_known]),
        )
        self.recent = torch.cat([self.recent[1:], estimate[None].to(self.recent)])
        self.take(values)
        _warn_of_missing(values)
        self.evaluations = self.evaluations + len(masks)

    def _check_width(self, coalitions: Tensor) -> None:
        if coalitions.ndim != 2 or coalitions.shape[1] != self.num_clients:
            raise ValueError(
                f"expected coalitions bool [K, {self.num_clients}], got {list(coalitions.shape)}."
            )

    def game(
        self,
        masks: Tensor,
        rounds: Sequence[int],
        weights: Tensor | None = None,
        of_outputs: ValuesFromOutputs | None = None,
    ) -> Game:
        """Return the game whose values these are.

        Args:
            masks: bool ``[K, n]``, the trained coalitions, with the empty and the full one.
            rounds: the rounds after which there are values.
            weights: ``[n]``, the clients' weights in the federation's average.
            of_outputs: the measure as a function of outputs. None: no outputs are predicted.
        """
        return Game(
            masks,
            rounds,
            measure_name(self.measure),
            weights=weights,
            of_outputs=of_outputs,
            outputs=outputs_name(self.measure),
            averages=self.averages and self._values_last_rounds,
            per_class=self.per_class,
        )

    def reset(self) -> None:
        """Remove all values and counts."""
        super().reset()
        self._client_scores = None
        if self._has_sizes:  # else there are no states yet
            self._latest = Values(self.values, evidence={})

    def await_training(self) -> None:
        """Before a fit's first round, remove all values until :meth:`complete` is called."""
        # A checkpoint has the values of an earlier round.
        no_values = torch.full_like(self.values, torch.nan)
        self.take(Values(no_values, evidence={}, missing=BEFORE_TRAINING))

    def take(self, values: Values) -> None:
        """Let :meth:`result` return these values from now on."""
        self.values = self._as_state(values.value)
        self.half_widths = self._as_state(values.half_width)
        self._latest = values
        self._computed = None

    def _as_state(self, numbers: Tensor | None) -> Tensor:
        """Return numbers as a state ``[n, 1]`` or ``[n, M]``."""
        if numbers is None:
            return torch.full_like(self.values, torch.nan)
        return numbers.reshape(self.values.shape).to(self.values)

    def complete(self, scores: SeedScores, game: Game) -> dict[int, Values]:
        """Compute the values from coalitions that were trained after the run.

        Args:
            scores: the coalitions' scored models.
            game: the game, as :meth:`game` returns it.

        Returns:
            ``{round's index: values}``, the result after each of the game's rounds. :meth:`result` returns the last of
            them from now on.
        """
        num_evaluations = len(game.masks) * len(game.rounds)
        self.evaluations = torch.full_like(self.evaluations, num_evaluations)
        if self.evaluators == "clients":
            utilities = scores.utilities(game, game.rounds[-1])
            self._client_scores = utilities[game.masks.all(1)].mean()
        results = {}
        for round_index, values in values_by_round(scores, game).items():
            self.take(values)
            _warn_of_missing(values)
            results[round_index] = self.result()
        return results

    def compute(self) -> Tensor:
        """Return the latest values, ``[num_clients]`` or ``[num_clients, num_classes]``. NaN without a value."""
        never_took_part = self.participations == 0
        value = self.values.masked_fill(never_took_part[:, None], torch.nan)
        return value if self.per_class else value.squeeze(-1)

    @property
    def latest_values(self) -> Values:
        """The latest values as they were computed, also those of clients that never took part."""
        return self._latest

    def result(self) -> Values:
        """Return the latest values, their 90 % intervals for the means over many seeds if they are not per class (see
        :mod:`flsv.functional.intervals`), and their evidence (see :meth:`flsv.values.query.Game.evidence`).

        Example:
            >>> from flsv.functional import few_coalitions
            >>> metric = ShadowShapley(num_clients=2)
            >>> metric.update(torch.arange(2), few_coalitions(2, "all"), lambda masks: masks.sum(1).double())
            >>> metric.result().low
            tensor([0.8520, 0.8520], dtype=torch.float64)
        """
        half_width = None
        if not self.per_class:
            half_width = self.half_widths.squeeze(-1)
        return replace(
            super().result(),
            half_width=half_width,
            evidence=self._latest.evidence,
            missing=self._latest.missing,
            case_values=self._latest.case_values,
        )

    def diagnostics(self) -> dict[str, Tensor]:
        """Return the number of ``evaluations`` of models, unless coalitions are still to be trained. If the clients
        score the models, also ``client_scores``, each client's last score of the federation's own model."""
        numbers = {}
        if self._latest.missing != BEFORE_TRAINING:
            numbers["evaluations"] = self.evaluations.clone()
        if self._client_scores is not None:
            numbers["client_scores"] = self._client_scores
        return numbers


def _warn_of_missing(values: Values) -> None:
    if values.missing is not None:
        warnings.warn(f"ShadowShapley: there are no values. {values.missing}", stacklevel=3)
