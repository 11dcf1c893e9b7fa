"""Verdict: whether a budget may be shared out by values. Pages, files, terminal and notebook show the same one."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch

from flsv.core.state import OF_VALUES
from flsv.functional.intervals import t_quantile
from flsv.functional.joint_shares import JointShares, ValueErrors, joint_shares
from flsv.results.round_result import OF_VALIDATION, UNLIKE_RUN, Event, data_warnings_in
from flsv.results.text import MESSAGES, is_small_gain, joined, percent
from flsv.utilities.choices import Negatives
from flsv.utilities.csv_files import NAN
from flsv.utilities.display import INTERVAL_LEVEL, client_label
from flsv.utilities.errors import listed

#: Where the utilities of coalitions come from: all were trained, outputs or scores of some were predicted, or no
#: coalition was trained.
Source = Literal["trainings", "outputs", "scores", "none"]
#: Whether all together have gained nothing, no more than the most frequent class's fraction, or something.
Improvement = Literal["none", "like majority", "clear"]
#: Fraction of the validation set in one class from which on accuracy says little about each client's contribution.
ONE_CLASS_FRACTION = 0.7
#: Largest probability that all together have gained nothing with which values are still paid by.
MAX_PROBABILITY_OF_NO_GAIN = 0.05
#: Largest expected fraction of a payment that other seeds and validation samples would give to other clients.
MAX_MOVED_FRACTION = 0.18
#: Fraction of a payment from which on it is said that values computed in 64 bits would move it.
MIN_MOVED_BY_ROUNDING = 0.01
#: Numbers of validation samples below which nothing, or nothing without a reservation, is paid by values.
#: docs/results/validation_samples.csv has the experiments.
MIN_VALIDATION_SAMPLES = 30
MANY_VALIDATION_SAMPLES = 100
#: Reasons that forbid payments, the most important first. All others are reservations.
FORBIDDING_REASONS = (
    "rounds",
    "unfinished",
    "unsuitable",
    "no_values",
    "validation_copies",
    "shared_samples",
    "unlike_run",
    "ranking",
    "evaluated_by_clients",
    "no_gain",
    "majority",
    "too_few_samples",
    "wide",
)
#: Fields of :class:`PaymentInputs` that ``run.json`` holds for a metric's performance.
RECORDED_INPUTS = (
    "by",
    "source",
    "alone_only",
    "halved",
    "ranks_only",
    "disagreement",
    "rounding",
    "alone",
    "together",
    "majority",
    "cases",
    "why_no_values",
)
#: Largest number of data-quality warnings that a reason describes.
MAX_WARNINGS_SHOWN = 3


@dataclass(frozen=True)
class PaymentInputs:
    """Facts about values that decide whether a budget may be shared out by them."""

    #: `[n]`, the values, NaN for a client without one.
    values: Sequence[float]
    #: The sources of the values' errors. A covariance that is not known is NaN.
    errors: Sequence[ValueErrors] = ()
    #: The name of the performance that the values distribute.
    by: str = ""
    #: Where the utilities of coalitions come from.
    source: Source = "none"
    #: Whether only each client alone was trained, and all together.
    alone_only: bool = False
    #: Whether only each client alone, complementary coalitions, and all clients together were trained.
    halved: bool = False
    #: Whether the trained coalitions only allow a ranking.
    ranks_only: bool = False
    #: `[n]`, the difference of the values by two ways to predict the scores of coalitions. Empty: none was predicted.
    disagreement: Sequence[float] = ()
    #: `[n]`, by how much values differ if models train in 64 bits. Empty: training does not enlarge rounding errors.
    rounding: Sequence[float] = ()
    #: The name of a metric whose documentation advises against payment.
    unsuitable: str = ""
    #: The framework that ran single rounds, without a federation of flsv.
    of_rounds: str = ""
    #: The number of rounds after which the training was stopped, as in "2 of 3 rounds". "" if it has ended.
    stopped_after: str = ""
    seeds: int = 1
    #: Whether the clients scored the models, and whether the payer accepts that.
    evaluated_by_clients: bool = False
    accepts_partners: bool = False
    #: The utility of the model of all together, and of each client alone.
    together: float = NAN
    alone: Sequence[float] = ()
    #: By how much the utility of all must be above the best client's to be clearly higher.
    margin: float = 0.0
    #: The model's accuracy, the fraction of the validation set's most frequent class, and the number of its samples.
    accuracy: float = NAN
    majority: float = NAN
    cases: int | None = None
    #: The number of samples on which the server scored models, if it is known.
    validation_samples: int | None = None
    #: The name of a score of a table's rows in which the model of all is perfect.
    perfect_score: str = ""
    #: Descriptions of validation samples that clients train on, of samples that several clients have, and of other
    #: strong data-quality warnings.
    validation_copies: str = ""
    shared_samples: str = ""
    data_warnings: str = ""
    #: Sentences that say how the training of coalitions differs from the run.
    unlike_run: str = ""
    #: A description of replies that sites did not send in training, or that differ from what was requested.
    incidents: str = ""
    #: The metric's reason why no client has a value, if it knows one.
    why_no_values: str = ""

    @property
    def has_values(self) -> bool:
        """Return whether a client has a value."""
        return any(not math.isnan(value) for value in self.values)

    @property
    def has_trainings(self) -> bool:
        """Return whether coalitions were trained."""
        return self.source != "none"

    @property
    def are_gains(self) -> bool:
        """Return whether the values add up to what all together have gained."""
        is_suitable = not self.unsuitable and not self.of_rounds
        return self.has_values and is_suitable

    @property
    def distance(self) -> float:
        """Return which part of a payment would go to others by the other way to predict scores."""
        return self._moved_by(self.disagreement)

    @property
    def moved_by_rounding(self) -> float:
        """Return which part of a payment would go to others if models trained in 64 bits."""
        return self._moved_by(self.rounding)

    def _moved_by(self, differences: Sequence[float]) -> float:
        """Return which part of a payment would go to others by values that differ so. NaN: it is not known."""
        paid = math.fsum(value for value in self.values if value > 0)
        if not differences or not paid:
            return NAN
        return min(1.0, math.fsum(map(abs, differences)) / 2 / paid)

    @property
    def allows_ranks_only(self) -> bool:
        """Return whether the trained coalitions only allow a ranking."""
        is_scored_alone = self.alone_only and self.source == "scores"
        return self.has_trainings and (self.ranks_only or is_scored_alone)


@dataclass(frozen=True)
class Verdict:
    """Decision whether a budget may be shared out by values, with the reasons against it."""

    #: `{name: reason}`, the reasons that forbid payments first. A reason also says what to do about it.
    reasons: Mapping[str, str]
    #: The number of seeds of the values.
    seeds: int = 1

    @property
    def forbids_payment(self) -> bool:
        """Return whether a payment by these values is advised against."""
        return any(name in FORBIDDING_REASONS for name in self.reasons)

    @property
    def title(self) -> str:
        """Return the decision: to pay, to pay with reservations, or not to pay."""
        titles: Mapping[str, str] = MESSAGES["verdicts"]
        if self.forbids_payment:
            return titles["forbidden"]
        if not self.reasons:
            return titles["payable"].format(self.seeds)
        if len(self.reasons) == 1:
            return titles["one_reservation"]
        return titles["several_reservations"].format(len(self.reasons))

    @property
    def text(self) -> str:
        """Return the decision with its reasons."""
        sentences = [self.title, *self.reasons.values()]
        return " ".join(sentences)

    @property
    def lines(self) -> list[str]:
        """Return the decision and each reason, as lines for a terminal."""
        return [self.title, *(f"- {text}" for text in self.reasons.values())]

    def for_one_client(self) -> Verdict:
        """Return this verdict with reasons that neither name a client nor describe a client's table."""
        sentences: Mapping[str, str] = MESSAGES["against_for_one"]
        reasons = {name: sentences.get(name, text) for name, text in self.reasons.items()}
        return Verdict(reasons, self.seeds)


def verdict_of(inputs: PaymentInputs, rule: Negatives = "zero") -> Verdict:
    """Decide whether a budget may be shared out by the rule ``rule``.

    Example:
        >>> values = PaymentInputs(values=[0.3, 0.2], by="accuracy", source="trainings", seeds=3)
        >>> verdict_of(values).text
        'These values can be a basis for payment: models were also trained without some of the partners, with 3 seeds.'
    """
    joint = _joint(inputs, rule)
    improvement = _improvement(inputs, joint)
    detail_by_reason = {
        **_forbidding_details(inputs, joint, improvement),
        **_reservations(inputs, improvement),
    }
    return Verdict(_sentences(detail_by_reason), inputs.seeds)


def _improvement(inputs: PaymentInputs, joint: JointShares) -> Improvement:
    """Return whether the model of all together is clearly better than an untrained one."""
    if inputs.are_gains and _has_no_gain(inputs, joint):
        return "none"
    if _is_like_majority(inputs):
        return "like majority"
    return "clear"


def _forbidding_details(
    inputs: PaymentInputs, joint: JointShares, improvement: Improvement
) -> dict[str, Any]:
    """Return a detail of each of :data:`FORBIDDING_REASONS`, false for reasons that do not apply."""
    is_wide = improvement == "clear" and joint.moved > MAX_MOVED_FRACTION
    # False or "" means that a reason does not apply. Any other detail is a part of its sentence.
    return {
        "rounds": inputs.of_rounds,
        "unfinished": inputs.stopped_after,
        "unsuitable": inputs.unsuitable,
        "no_values": not inputs.has_values and _why_no_values(inputs),
        "validation_copies": inputs.validation_copies,
        "shared_samples": inputs.shared_samples,
        "unlike_run": inputs.unlike_run,
        "ranking": inputs.has_values and inputs.allows_ranks_only,
        "evaluated_by_clients": inputs.evaluated_by_clients and not inputs.accepts_partners,
        "no_gain": improvement == "none",
        "majority": improvement == "like majority" and percent(inputs.majority),
        "too_few_samples": inputs.has_values
        and _samples_in_words(inputs, 0, MIN_VALIDATION_SAMPLES),
        "wide": is_wide and percent(joint.moved),
    }


def _reservations(inputs: PaymentInputs, improvement: Improvement) -> dict[str, Any]:
    """Return a detail of each reason that does not forbid a payment, false for those that do not apply."""
    has_trained_values = inputs.has_trainings and inputs.has_values
    allows_shares = inputs.has_values and not inputs.allows_ranks_only
    has_one_class = inputs.has_values and inputs.majority >= ONE_CLASS_FRACTION
    is_accepted = inputs.evaluated_by_clients and inputs.accepts_partners
    is_alone = has_trained_values and allows_shares and inputs.alone_only
    is_small = improvement == "clear" and is_small_gain(inputs.by, inputs.values)
    is_moved = inputs.seeds == 1 and inputs.moved_by_rounding >= MIN_MOVED_BY_ROUNDING
    best_alone = max(inputs.alone, default=-math.inf)
    # False or "" means that a reason does not apply. Any other detail is a part of its sentence.
    return {
        "metric": inputs.are_gains and not inputs.has_trainings,
        "data_warnings": inputs.data_warnings,
        "incidents": inputs.incidents,
        "one_class": has_one_class and percent(inputs.majority),
        "perfect_score": inputs.has_values and inputs.perfect_score,
        "few_samples": allows_shares
        and _samples_in_words(inputs, MIN_VALIDATION_SAMPLES, MANY_VALIDATION_SAMPLES),
        "one_seed": has_trained_values and inputs.seeds == 1,
        "alone": is_alone and _distance_in_words(inputs),
        "halves": inputs.has_values and inputs.halved,
        "rounding": is_moved and percent(inputs.moved_by_rounding),
        "scores": allows_shares and inputs.source == "scores",
        "partners": inputs.has_values and is_accepted,
        "best_alone": best_alone >= inputs.together - inputs.margin,
        "small_gain": has_trained_values and is_small,
    }


def _samples_in_words(inputs: PaymentInputs, fewest: int, limit: int) -> str:
    """Return the number of validation samples as text if it is from ``fewest`` to below ``limit``, else ""."""
    number = inputs.validation_samples
    if number is None or not fewest <= number < limit:
        return ""
    return "1 validation sample" if number == 1 else f"{number} validation samples"


def _distance_in_words(inputs: PaymentInputs) -> str:
    """Say how far predicted values have been off elsewhere, by their distance if it is known."""
    sentences: Mapping[str, str] = MESSAGES["predicted"]
    if math.isnan(inputs.distance):
        return sentences["unknown distance"]
    return sentences["distance"].format(percent(inputs.distance))


def _sentences(detail_by_reason: Mapping[str, Any]) -> dict[str, str]:
    """Return the sentence of each reason that has a detail, those that forbid a payment first."""
    reasons = {}
    for name, detail in detail_by_reason.items():
        if detail:
            reasons[name] = MESSAGES["against"][name].format(detail)
    forbidding = {name: reasons[name] for name in FORBIDDING_REASONS if name in reasons}
    return {**forbidding, **reasons}


def _joint(inputs: PaymentInputs, rule: Negatives) -> JointShares:
    values = torch.tensor(inputs.values, dtype=torch.float64)
    if not inputs.errors or bool(values.isnan().all()):
        unknown = torch.full(values.shape, NAN)
        return JointShares(unknown, unknown, NAN, NAN)
    return joint_shares(values, inputs.errors, rule)


def _why_no_values(inputs: PaymentInputs) -> str:
    """Return why no client has a value, and what to do."""
    if inputs.why_no_values:
        return inputs.why_no_values
    sentences: Mapping[str, str] = MESSAGES["why_no_values"]
    if inputs.stopped_after:
        return sentences["unfinished"]
    if inputs.source != "none":
        return sentences["trainings"]
    return sentences["rounds"]


def _has_no_gain(inputs: PaymentInputs, joint: JointShares) -> bool:
    """Return whether the gain of all together is not clearly above 0."""
    if math.isnan(joint.without_gain):
        return math.fsum(value for value in inputs.values if value == value) <= 0
    return joint.without_gain > MAX_PROBABILITY_OF_NO_GAIN


def _is_like_majority(inputs: PaymentInputs) -> bool:
    """Return whether the accuracy is not clearly above the most frequent class's fraction."""
    margin = 0.0
    if inputs.cases:
        deviation = math.sqrt(inputs.majority * (1 - inputs.majority) / inputs.cases)
        margin = float(t_quantile(INTERVAL_LEVEL)) * deviation
    return inputs.accuracy <= inputs.majority + margin


def performance_inputs(record: Mapping[str, Any], metric: str) -> dict[str, Any]:
    """Return the inputs of :class:`PaymentInputs` that a run's record has about a metric's performance."""
    missing = record.get("missing", {})  # why metrics have no values
    if metric in missing:
        return {"why_no_values": missing[metric]}
    performance = record.get("paid_in", {}).get(metric)  # what the metric's values distribute
    if performance is None:
        return {}
    inputs = {
        name: performance[name] for name in RECORDED_INPUTS if performance.get(name) is not None
    }
    if "majority" in inputs and performance["end"] is not None:
        inputs["accuracy"] = performance["end"]
    return inputs


def inputs_of_events(
    events: Sequence[Event],
    client_names: Sequence[str],
) -> dict[str, Any]:
    """Return the inputs of :class:`PaymentInputs` that follow from a run's events.

    Example:
        >>> shared = Event(0, "data_warning", 0, 0, others=[1], text="80 of 80 are also samples of Lyon")
        >>> inputs_of_events([shared], ["Graz", "Lyon"])["shared_samples"]
        'Graz and Lyon (80 of 80 are also samples of Lyon)'
    """
    validation_copies = []
    shared_samples = []
    descriptions = []
    for data_warning in data_warnings_in(events):
        owners = _owners(data_warning, client_names)
        if data_warning.kind == OF_VALIDATION:
            owner = joined(owners) or "all partners"
            validation_copies.append(f"{owner} ({data_warning.text})")
        elif data_warning.others:
            shared_samples.append(f"{joined(owners)} ({data_warning.text})")
        else:
            column_at_owners = ", ".join([*owners, data_warning.column])
            descriptions.append(f"{column_at_owners} ({data_warning.text})")

    return {
        "validation_copies": listed(validation_copies, MAX_WARNINGS_SHOWN),
        "shared_samples": listed(shared_samples, MAX_WARNINGS_SHOWN),
        "data_warnings": listed(descriptions, MAX_WARNINGS_SHOWN),
        "incidents": listed(_incidents(events, client_names), MAX_WARNINGS_SHOWN),
        "unlike_run": "; ".join(event.text for event in events if event.what == UNLIKE_RUN),
    }


def _owners(data_warning: Event, client_names: Sequence[str]) -> list[str]:
    """Return the names of the clients that a warning is about, none if it is about all."""
    if data_warning.client is None:
        return []
    clients = [data_warning.client, *data_warning.others]
    return [client_label(client, client_names) for client in clients]


def _incidents(events: Sequence[Event], client_names: Sequence[str]) -> list[str]:
    incidents = []
    for event in events:
        if event.kind == OF_VALUES and event.client is not None:
            site = client_label(event.client, client_names)
            incidents.append(f"{site} {event.what} ({event.times} times)")
    return incidents
