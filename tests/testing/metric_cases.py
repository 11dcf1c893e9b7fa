"""Every metric of ``flsv.metrics``, and what it needs to be checked: by :mod:`flsv.testing`, and beyond that."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from testing.part_cases import remote_is_equal, vmap_is_equal
from torch import Tensor

from flsv import metrics
from flsv.core import Client, LocalData, Round
from flsv.functional.shapley.few_coalitions import few_coalitions
from flsv.games.coalition_utility import utility_of
from flsv.personalization import PFedSV
from flsv.privacy import GaussianPrivacy
from flsv.testing import fits
from flsv.testing.checks import PartCheck, checks_of, ensure, equal
from flsv.testing.metric import MetricCase, results_of
from flsv.testing.rounds import HALF, NEVER, NUM_CLIENTS, ROUND_INDICES, PreparedRounds


def raises_value_error(call: Callable[[], Any]) -> bool:
    try:
        call()
    except ValueError:
        return True
    return False


class MoreRounds(PreparedRounds):
    """Rounds in which clients score each other's models, too.

    Args:
        cohorts: who takes part in each round.
        options: see :class:`flsv.testing.rounds.PreparedRounds`.
    """

    def __init__(
        self, *args: Any, cohorts: Sequence[Sequence[int]] = PreparedRounds.cohorts, **options: Any
    ):
        super().__init__(*args, **options)
        self.cohorts = cohorts

    def __getitem__(self, index):
        round = super().__getitem__(index)
        views = self.normal(NUM_CLIENTS, NUM_CLIENTS, key=("views", index))
        peer_values = views.masked_fill(views < -1, float("nan"))
        peer_values[:, NEVER] = float("nan")

        round = round.personalized(peer_values[round.client_ids])
        reports = {}
        for name, report_of in self._fields.items():
            reports[name] = report_of(round)

        return replace(round, reports=reports)


class OwnMetricCase(MetricCase):
    """A metric of flsv's own."""

    def __init__(self, part: Any, **options: Any):
        super().__init__(part, **options)
        contributes = isinstance(part, metrics.ContributionMetric)
        self.checks = (*self.checks, *OF_ALL, *(OF_CONTRIBUTIONS if contributes else ()))

    @property
    def sees_clients(self) -> bool:
        """Whether the metric asks clients for evaluations, or reads reports that a part of the loop makes."""
        reported_names = set[str]()
        for part in self.loop.values():
            reported_names.update(getattr(part, "reports", ()))
        has_reports = reported_names.issuperset(self.round_functions)
        fields_from_clients = {"clients", "all_clients", *self.round_functions}
        return has_reports and not fields_from_clients.isdisjoint(self.fields)

    def rounds(self, **options) -> PreparedRounds:
        return MoreRounds(self.round_functions, **options)


class TrainedCase(OwnMetricCase):
    """A metric of trained coalitions: each client alone, every two and all, as if they had trained the mean model."""

    def arguments(self, round: Round) -> dict[str, Any]:
        measure = self.part.measure

        def utility(masks: Tensor) -> Tensor:
            cohort_masks = masks[:, round.client_ids]

            def build(index: int, out: Tensor):
                members = cohort_masks[index]
                model = round.client_vectors[members].mean(0)
                out.copy_(model if members.any() else round.global_vector)

            scores = round.games.evaluator_of(measure).evaluate(build, len(masks))
            return utility_of(scores, measure)

        masks = few_coalitions(NUM_CLIENTS, "pairs")
        return {**super().arguments(round), "coalitions": masks, "utility": utility}


def inference_mode_is_no_matter(case: MetricCase):
    """Rounds within torch.inference_mode(), as in a Lightning validation, and rounds outside of it are one run."""
    metric = case.new()
    rounds = case.rounds()
    for index in ROUND_INDICES[:HALF]:
        arguments = case.arguments(rounds[index])
        with torch.inference_mode():
            metric.update(**arguments)

    metric_after_all = case.updated(ROUND_INDICES[HALF:], metric)
    fits.expect_same(results_of(metric_after_all), case.results())


def bad_clients_are_refused(case: MetricCase):
    """Numbers that no client has, one twice, none at all, and one row for several clients are refused."""
    if case.fields.get("client_ids") != "client_ids":
        return

    first_round = case.rounds()[0]
    arguments = case.arguments(first_round)
    for ids in BAD_IDS:
        client_ids = torch.tensor(ids, dtype=torch.long)
        wrong_arguments = {**arguments, "client_ids": client_ids}
        update = partial(case.new().update, **wrong_arguments)
        ensure(raises_value_error(update), f"no error of {ids}")

    for name, value in arguments.items():
        if has_row_per_client(case, name, value):
            check_one_row(case, name, {**arguments, name: value[:1]})


#: A client too many, a negative one, one twice, and none.
BAD_IDS: list[list[int]] = [
    [0, 1, NUM_CLIENTS],
    [-1, 1, 2],
    [0, 1, 1],
    [],
]


def has_row_per_client(case: MetricCase, name: str, value: Any) -> bool:
    if not isinstance(value, Tensor) or case.fields[name] in ("client_ids", "senders", "reached"):
        return False
    num_clients_in_round = 3
    return value.shape[:1] == (num_clients_in_round,)


def check_one_row(case: MetricCase, name: str, arguments: dict[str, Any]):
    """Check that one row of an argument for several clients is refused, unless the metric does not use it."""
    metric = case.new()
    if raises_value_error(partial(metric.update, **arguments)):
        return
    expected = case.updated([0]).compute()
    is_unused = equal(metric.compute(), expected)
    ensure(is_unused, f"no error of one row of {name}")


OF_ALL = (inference_mode_is_no_matter, bad_clients_are_refused)


OF_CONTRIBUTIONS = (vmap_is_equal, remote_is_equal)


def checks_of_metric(metric, **options) -> list[PartCheck]:
    is_trained = isinstance(metric, metrics.ShadowShapley)
    make_case = TrainedCase if is_trained else OwnMetricCase
    return checks_of(make_case(metric, **options))


NO_DEPLOYMENT = {"remote_is_equal": "a deployment gives no answers about samples"}
COARSE = {"wrong_labels_are_worth_less": "one point of support, for speed, has no labels"}
METRICS = [
    checks_of_metric(metrics.BlendedContribution(decay=0.7)),
    checks_of_metric(
        metrics.CalibratedOTGradient(features="pixels", support=1, iterations=1),
        expected_failures={**NO_DEPLOYMENT, **COARSE},
    ),
    checks_of_metric(metrics.ClassSpecificShapley(momentum=0.6)),
    checks_of_metric(metrics.ClassSpecificShapley(weighting="samples")),
    checks_of_metric(metrics.CoalitionValue(estimator="leave_one_out", fold="sum")),
    checks_of_metric(metrics.CommunicationCost()),
    checks_of_metric(metrics.ContributionEstimation(combine="plus")),
    checks_of_metric(metrics.CosineGradientShapley(alpha=0.7)),
    checks_of_metric(metrics.CumulativeShapley()),
    checks_of_metric(metrics.DecayedShapley(decay=0.7)),
    checks_of_metric(
        metrics.DomainRelevance(alpha=0.4),
        personalizer=PFedSV("mine"),
        expected_failures={"odd_rounds_have_values": "its value is what other clients find in it"},
    ),
    checks_of_metric(metrics.GradientAgreement()),
    checks_of_metric(metrics.GradientShapley(momentum=0.5)),
    checks_of_metric(metrics.LeaveOneOut(momentum=0.3)),
    checks_of_metric(metrics.OneRoundShapley(2, coalition_weights="fixed")),
    checks_of_metric(metrics.PartialFederatedShapley(momentum=0.5)),
    checks_of_metric(metrics.PrivacyLoss(GaussianPrivacy(clip=1.0, noise_multiplier=2.0))),
    checks_of_metric(metrics.ShadowShapley()),
    checks_of_metric(metrics.ShadowShapley(performance="negative_loss")),
    checks_of_metric(metrics.SurrogateFederatedShapley()),
    checks_of_metric(
        metrics.WassersteinContribution(features="pixels", support=1, iterations=1),
        expected_failures={**NO_DEPLOYMENT, **COARSE},
    ),
]


def checks_of_unlisted_metrics() -> list[list[PartCheck]]:
    """Return the checks of exported metrics without a row in the table, made without arguments."""
    listed_names = {"ContributionMetric"}
    for checks in METRICS:
        listed_names.add(checks[0].case.name)

    rows = []
    for name in metrics.__all__:
        if name not in listed_names:
            kind = getattr(metrics, name)
            rows.append(checks_of_metric(kind()))

    return rows


METRICS += checks_of_unlisted_metrics()
#: By its class' name; of two of a class the first.
METRIC_CASES: dict[str, OwnMetricCase] = {}
for checks in METRICS:
    METRIC_CASES.setdefault(checks[0].case.name, checks[0].case)


class SigmoidOfSum:
    """Scores models by the sigmoid of the sum of their entries."""

    def __init__(self, models: Tensor):
        self.models = models

    def value(self, metric) -> Tensor:
        return self.models.double().sum(1).sigmoid()


def make_client_evaluator(client_ids: Tensor, models: Tensor) -> list[Client]:
    """Clients that have trained these models ``[k, P]`` from zero, and score models by :class:`SigmoidOfSum`."""
    class_counts = torch.tensor([4, 4])
    num_clients = 3
    clients = []
    for client, model in zip(client_ids.tolist(), models):
        data = LocalData(
            name=f"client {client}",
            batches=lambda split: [],
            class_counts=class_counts,
            federation_class_counts=num_clients * class_counts,
            evaluator=lambda batches: SigmoidOfSum,
        )
        data.set_models(torch.zeros_like(model), model)
        clients.append(Client(client, data))

    return clients
