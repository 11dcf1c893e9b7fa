"""Checks of contribution metrics on prepared rounds."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torchmetrics import Metric

from flsv.core import Round
from flsv.core.needs import requirements_of
from flsv.metrics import ContributionMetric
from flsv.server import ContributionMetrics
from flsv.server.contribution_metrics import result_of
from flsv.testing import fits
from flsv.testing.checks import (
    Check,
    ensure,
    equal,
    untouched_rngs,
)
from flsv.testing.rounds import (
    COHORTS,
    EMPTY,
    HALF,
    LEARNERS,
    MISLABELED,
    NEVER,
    NUM_CLASSES,
    NUM_CLIENTS,
    ROUND_INDICES,
    TWINS,
    Given,
    PreparedRounds,
    RoundKind,
)
from flsv.utilities.errors import ConfigurationError


class MetricCase(fits.FitCase):
    """Metric under test."""

    base = Metric

    def __init__(
        self,
        part: Metric,
        *,
        given: Given | None = None,
        **options: Any,
    ) -> None:
        self.round_functions = dict(given or {})
        self._results: dict[RoundKind | None, dict[str, Any]] = {}
        super().__init__(part, **options)
        self.checks = _OF_ALL
        if isinstance(part, ContributionMetric):
            of_claims = checks_of_claims(part)
            self.checks = (*_OF_CONTRIBUTIONS, *of_claims, *_OF_ALL)

    def loop_arguments(
        self,
        part: Any,
    ) -> dict[str, Any]:
        return {"metrics": {"mine": part, **self.loop.get("metrics", {})}}

    @cached_property
    def fields(self) -> dict[str, Any]:
        """Return the source of each argument of ``update``: an attribute or a function of the round."""
        metrics = ContributionMetrics({"mine": self.part}, self.round_functions)
        return metrics.fields["mine"]

    def new(self, num_clients: int = NUM_CLIENTS) -> Any:
        metric = copy.deepcopy(self.part)
        if isinstance(metric, ContributionMetric):
            class_counts = torch.eye(num_clients, NUM_CLASSES).long()
            metric.bind(num_clients, NUM_CLASSES, class_counts=class_counts)
        metric.persistent(True)
        return metric

    def rounds(self, **options: Any) -> PreparedRounds:
        return PreparedRounds(self.round_functions, **options)

    def arguments(
        self,
        round: Round,
    ) -> dict[str, Any]:
        """Return the arguments of the metric's ``update`` for a round, by name."""
        arguments = {}
        for name, field in self.fields.items():
            if callable(field):
                arguments[name] = field(round)
            else:
                arguments[name] = round.get(field)
        return arguments

    @torch.no_grad()
    def updated(
        self,
        indices: Iterable[int] = ROUND_INDICES,
        metric: Any = None,
        **options: Any,
    ) -> Any:
        """Update ``metric`` (None: a new one) with the prepared rounds ``indices``, and return it."""
        if metric is None:
            metric = self.new()
        rounds = self.rounds(**options)
        for index in indices:
            metric.update(**self.arguments(rounds[index]))
        return metric

    def updated_by_half(self) -> Any:
        """Return a new copy of the metric after the first half of the rounds."""
        return self.updated(ROUND_INDICES[:HALF])

    def results(
        self,
        kind: RoundKind | None = None,
    ) -> dict[str, Any]:
        """Return the results, by name, after all rounds of a kind, computed once for all checks."""
        if kind not in self._results:
            self._results[kind] = results_of(self.updated(kind=kind))
        return self._results[kind]

    def values_of_learners(self, kind: RoundKind = "learning") -> Tensor:
        """Return the overall values of the :data:`LEARNERS` after all rounds of a learning kind."""
        overall: Tensor = self.results(kind)["overall"]
        return overall[list(LEARNERS)]


def results_of(metric: Any) -> dict[str, Any]:
    """Return the tensors of a metric's :class:`flsv.core.Values`, by name."""
    values = result_of(metric)
    ends = {}
    if values.ends is not None:
        ends = dict(zip(("low", "high"), values.ends))
    return {
        "value": values.value,
        "overall": values.overall,
        "half_width": values.half_width,
        **ends,
        **values.diagnostics,
    }


def one_row_per_client(case: MetricCase) -> None:
    """Check that compute returns floats [n] or, with per_class or columns, [n, M], and per_client [n]: NaN for clients
    that never took part, and else a number. Start the states with NaN, not 0."""
    value = case.results()["value"]
    overall = case.results()["overall"]
    shape = list(value.shape)
    has_columns = case.part.per_class or case.part.columns() is not None
    has_row_per_client = shape[:1] == [NUM_CLIENTS] and len(shape) <= 1 + has_columns
    ensure(has_row_per_client, f"compute() {shape} of {NUM_CLIENTS} clients, and {has_columns=}")
    ensure(overall.shape == (NUM_CLIENTS,), f"per_client {list(overall.shape)}")

    lacks_all_values = value.reshape(NUM_CLIENTS, -1).isnan().all(1)
    is_absent = lacks_all_values & overall.isnan()
    ensure(is_absent[NEVER], f"{value[NEVER]} for client {NEVER}, who never took part")
    num_without_value = int((lacks_all_values | overall.isnan()).sum())
    ensure(num_without_value == 1, f"{value.tolist()}, where all but {NEVER} took part")


def expect_numbers(case: MetricCase, kind: RoundKind) -> None:
    """Raise AssertionError if a client of an odd round has no value, unless update refuses the round."""
    try:
        metric = case.updated(indices=[0], kind=kind)
    except ValueError:  # the metric refuses such a round
        return
    cohort = list(COHORTS[0])
    if kind == "alone":
        cohort = cohort[:1]

    all_values = metric.compute()
    values = all_values.reshape(NUM_CLIENTS, -1)[cohort]  # a row per client of the round
    overall_values = metric.per_client(all_values)[cohort]
    has_no_value = values.isnan().all(1) | overall_values.isnan()
    message = f"{values.tolist()}, overall {overall_values.tolist()}, for clients {cohort}"
    if not _needs_several_rounds(case):
        ensure(not has_no_value.any(), message)
    ensure(not values.isinf().any(), message)


def _needs_several_rounds(case: MetricCase) -> bool:
    values_of_ordinary_round = case.updated(indices=[0]).compute()
    return bool(values_of_ordinary_round.isnan().all())


def odd_rounds_have_values(case: MetricCase) -> None:
    """Check that a client alone in a round, and clients whose updates are 0, have values, or that update raises
    ValueError. Do not divide by the others' number, and add a small number to lengths that you divide by."""
    expect_numbers(case, "alone")
    expect_numbers(case, "still")


def buffers_do_not_count(case: MetricCase) -> None:
    """Check that BatchNorm's statistics do not change the values of a metric that evaluates no models. Take the first
    round.space.num_parameters entries of vectors, as client_updates does."""
    evaluations = fits.EVALUATIONS.intersection(requirements_of(case.part))
    if evaluations:  # these depend on the whole model, with BatchNorm's statistics
        return
    # The updates of both rounds are equal, except for BatchNorm's statistics.
    values = case.updated(kind="normalized").compute()
    values_by_other_statistics = case.updated(kind="other statistics").compute()
    ensure(
        equal(values, values_by_other_statistics, rtol=1e-4),
        f"{values_by_other_statistics.tolist()} with other statistics instead of {values.tolist()}",
    )


def inputs_stay(case: MetricCase) -> None:
    """Check that update does not change its arguments, and draws random numbers from the round's generator only."""
    arguments = case.arguments(case.rounds()[0])
    tensors = {name: value for name, value in arguments.items() if isinstance(value, Tensor)}
    originals = copy.deepcopy(tensors)
    with untouched_rngs("an update"), torch.no_grad():
        case.new().update(**arguments)
    changed = []
    for name, tensor in tensors.items():
        if not equal(tensor, originals[name]):
            changed.append(name)
    ensure(not changed, f"changed {', '.join(changed)}")


def resumes(case: MetricCase) -> None:
    """Check that a metric saved and loaded between two rounds (state_dict) ends bitwise alike. Keep all results
    of update in states, by add_state: a checkpoint holds nothing else."""
    metric = case.new()
    metric.load_state_dict(copy.deepcopy(case.updated_by_half().state_dict()))
    metric_after_all = case.updated(ROUND_INDICES[HALF:], metric)
    fits.expect_same(results_of(metric_after_all), case.results())


def merges(case: MetricCase) -> None:
    """Check that two halves of the rounds are all rounds once their states are merged, as by forward, which needs it,
    too. Reduce each state from two, the later second, such as by latest, or set full_state_update = True."""
    can_merge = hasattr(case.part, "merge_state")  # torchmetrics 1.5
    if case.part.full_state_update or not can_merge:
        return
    metric = case.updated(ROUND_INDICES[HALF:-1])
    metric.merge_state(case.updated_by_half())
    case.updated(ROUND_INDICES[-1:], metric)  # intervals are of the last update
    fits.expect_same(results_of(metric), case.results(), rtol=1e-4)


def places_do_not_count(case: MetricCase) -> None:
    """Check that values stay the same if the clients of a round have another order. Index by client_ids."""
    values = case.results()["value"]
    values_of_reversed = case.results("reversed")["value"]
    ensure(
        equal(values_of_reversed, values, rtol=1e-4),
        f"{values_of_reversed.tolist()} in reverse order instead of {values.tolist()}",
    )


def equal_clients_are_equal(case: MetricCase) -> None:
    """Check that clients with the same samples and updates have the same value, and that one more client, who never
    takes part, changes none. Do not use a client's number, its position in the cohort, or num_clients."""
    values = case.values_of_learners()
    twins = values[list(TWINS)]
    are_equal = equal(twins[0], twins[1], rtol=1e-4)
    ensure(are_equal, f"{twins.tolist()} for two equal clients")

    # One more client, who never takes part, changes no value.
    metric = case.new(NUM_CLIENTS + 1)
    try:
        case.updated(metric=metric, kind="learning")
    except ValueError:  # the prepared rounds' coalitions are of other clients
        return
    same_values = metric.per_client(metric.compute())[list(LEARNERS)]
    ensure(
        equal(same_values, values, rtol=1e-4),
        f"{same_values.tolist()} instead of {values.tolist()} with one more client",
    )


def wrong_labels_are_worth_less(case: MetricCase) -> None:
    """Check that a client with wrong labels has a worse value than one with the right ones, after the first round and
    after all. Look for a wrong sign, axis or round, or set higher_is_better."""
    sign = -1 if case.part.higher_is_better is False else 1
    values = case.values_of_learners()
    metric_after_one = case.updated(ROUND_INDICES[:1], kind="learning")
    values_after_one = metric_after_one.per_client(metric_after_one.compute())[list(LEARNERS)]
    needs_several_rounds = values_after_one.isnan().all()
    if not needs_several_rounds:
        values = torch.stack([values_after_one, values])
    right = sign * values[..., TWINS[0]]
    wrong = sign * values[..., MISLABELED]
    ensure(
        (right > wrong).all(), f"{wrong.tolist()} with wrong labels, {right.tolist()} with right"
    )


def no_samples_are_worth_nothing(case: MetricCase) -> None:
    """Check that a client without samples, whose update is 0, has the value 0. Subtract what is there without the
    client, weigh models by samples, or claim "value" in place of "effect"."""
    values = case.values_of_learners(kind="no samples")
    largest = values.abs().max()
    value = values[EMPTY]
    ensure(value.abs() <= 1e-4 * largest, f"{value}, beside {values.tolist()}")


def length_does_not_count(case: MetricCase) -> None:
    """Check that values stay the same if all updates are twice as long. Divide products by both lengths."""
    expected = case.values_of_learners()
    values = case.values_of_learners(kind="long")
    ensure(equal(values, expected, rtol=1e-4), f"{values.tolist()} instead of {expected.tolist()}")


def shares_sum_to_one(case: MetricCase) -> None:
    """Check that the values of clients seen are not negative and sum to 1. Divide by their sum."""
    for values in (case.values_of_learners(), case.results()["overall"]):
        total = values.nansum()
        is_sum_right = (total - 1).abs() <= 1e-4
        has_negatives = (values < -1e-6).any()
        ensure(is_sum_right and not has_negatives, f"{values.tolist()}, which sum to {total}")


_OF_VALUES: Sequence[Check] = (equal_clients_are_equal, wrong_labels_are_worth_less)
#: Checks of what a metric's ``claims`` say, by claim.
CHECKS_OF_CLAIMS: Mapping[str, Sequence[Check]] = {
    "value": _OF_VALUES,
    "effect": (*_OF_VALUES, no_samples_are_worth_nothing),
    "agreement": (*_OF_VALUES, length_does_not_count),
    "weight": (shares_sum_to_one,),
}


def checks_of_claims(metric: ContributionMetric) -> list[Check]:
    """Return the checks of a metric's claims, each once."""
    checks = {}
    for claim in metric.claims:
        if claim not in CHECKS_OF_CLAIMS:
            raise ConfigurationError(
                f"{type(metric).__name__}: claims = {list(metric.claims)}, expected some of {[*CHECKS_OF_CLAIMS]}."
            )
        checks.update(dict.fromkeys(CHECKS_OF_CLAIMS[claim]))
    return list(checks)


_OF_CONTRIBUTIONS: Sequence[Check] = (
    one_row_per_client,
    places_do_not_count,
    odd_rounds_have_values,
    buffers_do_not_count,
)
_OF_ALL: Sequence[Check] = (inputs_stay, resumes, merges)
MetricCase.checks = (*_OF_CONTRIBUTIONS, *_OF_ALL)
