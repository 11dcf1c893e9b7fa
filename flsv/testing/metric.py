"""Checks of contribution metrics on prepared rounds."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor
from torchmetrics import Metric

from flsv.core import Round
from flsv.core.needs import needs_of
from flsv.metrics import ContributionMetric
from flsv.server import ContributionMetrics
from flsv.testing import fits
from flsv.testing.checks import (
    Check,
    ensure,
    equal,
    is_one,
    raises_value_error,
    saved,
    untouched_rngs,
)
from flsv.testing.rounds import (
    COHORTS,
    EMPTY,
    HALF,
    LEARNERS,
    LEARNING_KINDS,
    MISLABELED,
    NEVER,
    NUM_CLASSES,
    NUM_CLIENTS,
    ORDER,
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
        self.checks = (is_one, *_OF_ALL)
        if isinstance(part, ContributionMetric):
            of_claims = checks_of_claims(part)
            self.checks = (is_one, *_OF_CONTRIBUTIONS, *of_claims, *_OF_ALL)

    def loop_arguments(self, part: Any) -> dict[str, Any]:
        return {"metrics": {"mine": part, **self.loop.get("metrics", {})}}

    @property
    def sees_clients(self) -> bool:  # type: ignore[override]  # depends on the metric
        """Return whether the metric asks clients for evaluations, or reads their reports."""
        fields_from_clients = {"clients", "all_clients", *self.round_functions}
        return self.in_a_loop and not fields_from_clients.isdisjoint(self.fields)

    @property
    def in_a_loop(self) -> bool:  # type: ignore[override]  # likewise
        """Return whether a loop can update the metric."""
        reported_names = set[str]()
        for part in self.loop.values():
            reported_names.update(getattr(part, "reports", ()))
        is_contribution = isinstance(self.part, ContributionMetric)
        return is_contribution and reported_names.issuperset(self.round_functions)

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

    def arguments(self, round: Round) -> dict[str, Any]:
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

    def results(self, kind: RoundKind | None = None) -> dict[str, Any]:
        """Return the results, by name, after all rounds of a kind, computed once for all checks."""
        if kind not in self._results:
            self._results[kind] = results_of(self.updated(kind=kind))
        return self._results[kind]

    @property
    def all_results(self) -> dict[str, Any]:
        """Return the results, by name, after all prepared rounds."""
        return self.results()

    def values_of_learners(self, kind: RoundKind = "learning") -> Tensor:
        """Return the overall values of the :data:`LEARNERS` after all rounds of a learning kind."""
        overall: Tensor = self.results(kind)["overall"]
        return overall[list(LEARNERS)]


def results_of(metric: Any, value: Tensor | None = None) -> dict[str, Any]:
    """Return a metric's value, overall values, intervals and diagnostics, by name."""
    if value is None:
        value = metric.compute()
    if not isinstance(metric, ContributionMetric):
        return {"value": value}
    overall = metric.per_client(value)
    return {
        "value": value,
        "overall": overall,
        "intervals": metric.intervals(value=overall),
        **metric.diagnostics(),
    }


def one_row_per_client(case: MetricCase) -> None:
    """Check that compute returns detached floats [n] or, with per_class or columns, [n, M], and per_client [n], of all
    n clients."""
    value = case.all_results["value"]
    if isinstance(value, Tensor):
        description = str(list(value.shape))
        has_row_per_client = value.ndim in (1, 2) and len(value) == NUM_CLIENTS
    else:
        description = type(value).__name__
        has_row_per_client = False
    ensure(has_row_per_client, f"compute() {description} of {NUM_CLIENTS} clients")

    is_plain_float = value.is_floating_point() and not value.requires_grad
    ensure(is_plain_float, "other numbers, or gradients with them")

    has_unnamed_columns = (
        value.ndim == 2 and not case.part.per_class and case.part.columns() is None
    )
    ensure(
        not has_unnamed_columns,
        f"compute() {list(value.shape)} with per_class = False and no columns()",
    )

    overall = list(case.all_results["overall"].shape)
    ensure(overall == [NUM_CLIENTS], f"per_client {overall} of {NUM_CLIENTS} clients")


def never_seen_is_nan(case: MetricCase) -> None:
    """Check that a client's value is NaN if it never took part, and else a number. Start the states with NaN, not 0."""
    # A row per client: its values, and the overall value in the last column.
    values = case.all_results["value"].reshape(NUM_CLIENTS, -1)
    overall = case.all_results["overall"]
    rows = torch.cat([values, overall[:, None]], 1)
    absent = rows[NEVER]
    ensure(absent.isnan().all(), f"{absent.tolist()} for client {NEVER}, who never took part")

    participants = [client for client in range(NUM_CLIENTS) if client != NEVER]
    present = rows[participants]
    has_no_values = present[:, :-1].isnan().all(1)
    has_no_overall_value = present[:, -1].isnan()
    is_empty = has_no_values | has_no_overall_value
    ensure(not is_empty.any(), f"{present.tolist()} for clients {participants}, who took part")


def clients_permuted(case: MetricCase) -> None:
    """Check that renumbered clients keep their values. Index by client_ids, not by the order of the cohort."""
    value = case.all_results["value"]
    permuted_value = case.updated(order=ORDER).compute()
    permuted_back = permuted_value[list(ORDER)]
    if case.fields.get("peer_values"):  # the value's columns are clients, too
        permuted_back = permuted_back[:, list(ORDER)]
    ensure(
        equal(value, permuted_back, rtol=1e-4),
        f"{permuted_back.tolist()} with other numbers instead of {value.tolist()}",
    )


def expect_numbers(case: MetricCase, kind: RoundKind) -> None:
    """Raise AssertionError if a client of an odd round has no value, unless update refuses the round."""
    client_ids = list(COHORTS[0])
    if kind == "alone":
        client_ids = client_ids[:1]
    try:
        metric = case.updated(indices=[0], kind=kind)
    except ValueError:  # the metric refuses such a round
        return

    values = metric.compute()
    overall_values = metric.per_client(values)[client_ids]
    values_by_client = values.reshape(NUM_CLIENTS, -1)[client_ids]
    lacks_value = values_by_client.isnan().all(1) | overall_values.isnan()
    message = (
        f"{values_by_client.tolist()}, overall {overall_values.tolist()}, for clients {client_ids}"
    )

    # A metric that needs several rounds has no value after an ordinary first round, either.
    ordinary_values = case.updated(indices=[0]).compute()
    needs_several_rounds = bool(ordinary_values.isnan().all())
    if not needs_several_rounds:
        ensure(not lacks_value.any(), message)
    ensure(not values_by_client.isinf().any(), message)


def alone_is_a_number(case: MetricCase) -> None:
    """Check that a client alone in a round has a value, or that update raises ValueError. Do not divide by the others'
    number, or by the length of their sum."""
    expect_numbers(case, "alone")


def still_is_a_number(case: MetricCase) -> None:
    """Check that clients whose updates are 0 have values, or that update raises ValueError. Add a small number to
    lengths that you divide by."""
    expect_numbers(case, "still")


def buffers_do_not_count(case: MetricCase) -> None:
    """Check that BatchNorm's statistics do not change the values of a metric that evaluates no models. Take the first
    round.space.num_parameters entries of vectors, as client_updates does."""
    reads_evaluations = not fits.EVALUATIONS.isdisjoint(needs_of(case.part))
    if reads_evaluations:  # these depend on all of a model
        return
    # Rounds whose updates differ in BatchNorm's statistics only.
    value = case.updated(kind="normalized").compute()
    other_value = case.updated(kind="other statistics").compute()
    ensure(
        equal(value, other_value, rtol=1e-4),
        f"{other_value.tolist()} with other statistics instead of {value.tolist()}",
    )


def inputs_stay(case: MetricCase) -> None:
    """Check that update does not change its arguments, and draws random numbers from the round's generator only."""
    arguments = case.arguments(case.rounds()[0])
    tensors = {name: value for name, value in arguments.items() if isinstance(value, Tensor)}
    originals = copy.deepcopy(tensors)
    with untouched_rngs("an update"), torch.no_grad():
        case.new().update(**arguments)
    changed = [name for name in tensors if not equal(tensors[name], originals[name])]
    ensure(not changed, f"changed {', '.join(changed)}")


def forward_counts_once(case: MetricCase) -> None:
    """Check that forward has the effect of one update, or raises ValueError. Give each state a dist_reduce_fx that
    merges two states, the later one second."""
    metric = case.new()
    rounds = case.rounds()
    for index in ROUND_INDICES:
        arguments = case.arguments(rounds[index])
        forward = partial(metric, **arguments)
        was_refused = raises_value_error(forward)
        if was_refused:
            return
    value = metric.compute()
    expected = case.all_results["value"]
    ensure(equal(value, expected, rtol=1e-5), f"{value.tolist()} instead of {expected.tolist()}")


def parts_merge(case: MetricCase) -> None:
    """Check that merge_state of a metric of later rounds with one of earlier rounds gives the results of all, or raises
    ValueError. Give each state a dist_reduce_fx that merges two states, the later one second."""
    if not hasattr(case.part, "merge_state"):  # torchmetrics before 1.5
        return
    rounds_before_last = ROUND_INDICES[HALF:-1]
    last_round = ROUND_INDICES[-1:]
    try:
        metric = case.updated(rounds_before_last)
        metric.merge_state(case.updated_by_half())  # with a metric of the rounds before these
        case.updated(last_round, metric)
        results = results_of(metric)
    except ValueError:  # the metric refuses to merge
        return
    fits.expect_same(results, case.all_results, rtol=1e-4)


def resumes_bitwise(case: MetricCase) -> None:
    """Check that a metric saved and loaded between two rounds (state_dict) ends bitwise alike. Keep all results
    of update in states, by add_state: a checkpoint holds nothing else."""
    metric = case.new()
    metric.load_state_dict(saved(case.updated_by_half().state_dict()))
    fits.expect_same(results_of(case.updated(ROUND_INDICES[HALF:], metric)), case.all_results)


def any_precision(case: MetricCase) -> None:
    """Check that models and states in double precision give the same values, up to rounding. Convert tensors to the
    states' dtype, by tensor.to(state)."""
    expected = case.all_results["value"]
    metric_in_double = case.new().set_dtype(torch.float64)
    # Models in double precision, with states in single and in double precision.
    for metric in (case.new(), metric_in_double):
        case.updated(metric=metric, dtype=torch.float64)
        value = metric.compute()
        ensure(
            equal(value, expected, rtol=1e-3), f"{value.tolist()} instead of {expected.tolist()}"
        )


def states_move(case: MetricCase) -> None:
    """Check that metric.to(device) moves all tensors of the metric. Make them states or buffers."""
    metric = case.updated_by_half().to("meta")
    not_moved = []
    for name, value in vars(metric).items():
        if not isinstance(value, Tensor) or name == "class_counts":  # class_counts are no state
            continue
        if value.device.type != "meta":
            not_moved.append(name)
    ensure(not not_moved, f"{', '.join(not_moved)} where they were")


def guide_says_the_unit(case: MetricCase) -> None:
    """Check that no line of guide(), such as the values' unit, is empty."""
    lines = case.new().guide().lines()
    ensure(all(lines.values()), lines)


def equal_clients_are_equal(case: MetricCase) -> None:
    """Check that clients with the same samples and updates have the same value. Do not use a client's number or its
    position in the cohort."""
    values = case.values_of_learners()
    twins = values[list(TWINS)]
    ensure(equal(twins[0], twins[1], rtol=1e-4), f"{twins.tolist()} for two equal clients")


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


def other_clients_do_not_count(case: MetricCase) -> None:
    """Check that one more client, who never takes part, changes no values, or that update raises ValueError. Divide by
    the number of clients seen, not by num_clients."""
    expected = case.values_of_learners()
    metric = case.new(NUM_CLIENTS + 1)
    try:
        case.updated(metric=metric, kind="learning")
    except ValueError:  # the prepared rounds' coalitions are of other clients
        return
    values = metric.per_client(metric.compute())[list(LEARNERS)]
    ensure(equal(values, expected, rtol=1e-4), f"{values.tolist()} instead of {expected.tolist()}")


def length_does_not_count(case: MetricCase) -> None:
    """Check that values stay the same if all updates are twice as long. Divide products by both lengths."""
    expected = case.values_of_learners()
    values = case.values_of_learners(kind="long")
    ensure(equal(values, expected, rtol=1e-4), f"{values.tolist()} instead of {expected.tolist()}")


def shares_sum_to_one(case: MetricCase) -> None:
    """Check that the values of clients seen are not negative and sum to 1. Divide by their sum."""
    for values in (case.values_of_learners(), case.all_results["overall"]):
        total = values.nansum()
        are_shares = not (values < -1e-6).any() and (total - 1).abs() <= 1e-4
        ensure(are_shares, f"{values.tolist()}, which sum to {total}")


def values_are_in_bounds(case: MetricCase) -> None:
    """Check that all values lie between plot_lower_bound and plot_upper_bound, if the class has them."""
    lowest = case.part.plot_lower_bound
    highest = case.part.plot_upper_bound
    kinds: list[RoundKind | None] = [None, *LEARNING_KINDS]
    for kind in kinds:
        values = case.results(kind)["value"]
        is_low = lowest is not None and (values < lowest - 1e-4).any()
        is_high = highest is not None and (values > highest + 1e-4).any()
        ensure(not is_low and not is_high, f"{values.tolist()} outside of {lowest} to {highest}")


_OF_VALUES: Sequence[Check] = (
    equal_clients_are_equal, wrong_labels_are_worth_less, other_clients_do_not_count,
)  # fmt: skip
#: Checks of what a metric's ``claims`` say, by claim.
CHECKS_OF_CLAIMS: Mapping[str, Sequence[Check]] = {
    "value": _OF_VALUES,
    "effect": (*_OF_VALUES, no_samples_are_worth_nothing),
    "agreement": (*_OF_VALUES, length_does_not_count),
    "weight": (shares_sum_to_one,),
}


def checks_of_claims(metric: ContributionMetric) -> list[Check]:
    """Return the checks of a metric's claims, each once."""
    checks: dict[Check, None] = {}
    for claim in metric.claims:
        if claim not in CHECKS_OF_CLAIMS:
            raise ConfigurationError(
                f"{type(metric).__name__}: claims = {list(metric.claims)}, expected some of {[*CHECKS_OF_CLAIMS]}."
            )
        checks.update(dict.fromkeys(CHECKS_OF_CLAIMS[claim]))
    return list(checks)


_OF_CONTRIBUTIONS: Sequence[Check] = (
    one_row_per_client, never_seen_is_nan, clients_permuted, alone_is_a_number, still_is_a_number,
    buffers_do_not_count, values_are_in_bounds, guide_says_the_unit, fits.resumes_in_a_fit, fits.vmap_is_equal,
    fits.validation_is_declared,
)  # fmt: skip
_OF_ALL: Sequence[Check] = (
    inputs_stay, forward_counts_once, parts_merge, resumes_bitwise, any_precision, states_move,
)  # fmt: skip
MetricCase.checks = (is_one, *_OF_CONTRIBUTIONS, *_OF_ALL)
