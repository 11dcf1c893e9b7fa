"""Updates that nobody should average, or that count too much: found in their own round, named once, capped."""

import math
import re
import warnings
from dataclasses import replace

import pandas as pd
import pytest
import torch
from lightning.pytorch.callbacks import LambdaCallback
from torch.testing import assert_close

from flsv import ClientEvaluation
from flsv.aggregation import FedAvg, GeometricMedian, ShapleyWeighted
from flsv.attacks import Attack
from flsv.core import ClientUpdate
from flsv.federation import FederatedLoop
from flsv.filters import Cohort, MultiKrum, NormCap, OutlierFilter, SampleCap
from flsv.metrics import (
    ClassSpecificShapley,
    ContributionEstimation,
    CosineGradientShapley,
    GradientAgreement,
    GradientShapley,
    SurrogateFederatedShapley,
)
from flsv.payment import write_report
from flsv.personalization import Standalone
from flsv.results import open_run, read_run
from flsv.results.round_result import invalid_updates_in
from helpers import refused, warns
from helpers.data import toy_data
from helpers.fits import KeepsRounds, fit, make_shapfed_loop, state_vector
from helpers.models import Diverges, Plain, network, sgd
from helpers.pages import text_of_page


class Huge(Attack):
    """Client 1 sends an update with one huge entry, or a multiple of its update, in some rounds."""

    def __init__(
        self,
        entry=None,
        rounds=(1,),
        factor=1.0,
    ):
        super().__init__([1])
        self.entry = entry
        self.rounds = rounds
        self.factor = factor

    def attack(self, update, context, generator):
        if context.round_index not in self.rounds:
            return update

        sent = self.factor * update
        if self.entry is not None:
            sent[3] = self.entry  # any one of the update's
        return sent


@pytest.mark.fast_rows
@pytest.mark.parametrize("size", [1e10, 3e38])
def test_huge_update_is_reported_and_left_out_if_it_would_drown_the_others(tmp_path, size):
    metrics = {"cgsv": CosineGradientShapley()}
    loop = FederatedLoop(uploads=[Huge(size)], metrics=metrics, seed=1)

    with pytest.warns(UserWarning, match="update|NaN") as caught:
        module = fit(loop, tmp_path, data=toy_data((4, 3, 4, 3)), rounds=4)

    messages = [str(warning.message) for warning in caught]
    (message,) = [text for text in messages if "update" in text or "NaN" in text]
    assert re.search("client 1 sent an update far larger.* in round 2 .*excluded from", message)
    (event,) = loop.events  # and nobody later
    assert event.what == "large_excluded"
    assert event.client == 1
    assert event.times == 1
    faults_of_client_1 = (1, 4)  # one faulty update of four
    assert loop.named == {1: faults_of_client_1}
    assert loop.participations.tolist() == [4, 3, 4, 4]
    assert state_vector(module).abs().max() < 100


def fit_with_faulty_updates(folder, faulty_rounds, aggregator, metrics, factor):
    """Run four rounds, of which client 1 multiplies its update by a factor in some."""
    loop = FederatedLoop(
        uploads=[Huge(rounds=faulty_rounds, factor=factor)],
        metrics=metrics,
        aggregator=aggregator,
        seed=1,
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        data = toy_data((4, 3, 4, 3, 4), server_val=0.3)
        module = Plain(network(batch_norm=False))
        fit(loop, folder, module, data, rounds=4)

    return loop


METRICS = {
    "cssv": ClassSpecificShapley,
    "cgsv": CosineGradientShapley,
    "agreement": GradientAgreement,
    "slopes": GradientShapley,
    "ssv": SurrogateFederatedShapley,
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("aggregator", "factor", "kind"),
    [
        (GeometricMedian(), 100.0, "large_averaged"),
        (ShapleyWeighted("ssv"), 1e30, "large_excluded"),
    ],
    ids=["median", "by values"],
)
def test_client_with_faulty_updates_in_every_round_has_no_value(tmp_path, aggregator, factor, kind):
    metrics = {name: metric() for name, metric in METRICS.items()}

    loop = fit_with_faulty_updates(
        tmp_path,
        faulty_rounds=range(4),
        aggregator=aggregator,
        metrics=metrics,
        factor=factor,
    )

    kinds_of_events = {event.what for event in loop.events}
    rounds_at_fault = {1: (4, 4)}  # client 1 in four of four
    assert loop.named == rounds_at_fault
    assert kinds_of_events == {kind}

    (table,) = tmp_path.rglob("contributions.csv")
    run = open_run(table.parent)
    assert invalid_updates_in(run.record["events"]) == rounds_at_fault
    for name in METRICS:
        has_value = [not math.isnan(value) for value in run.final(name)]
        assert has_value == [True, False, True, True, True], name


@pytest.mark.slow
def test_round_with_a_faulty_update_adds_nothing_to_its_clients_value(tmp_path):
    """Values are sums over rounds: one update of a hundred times its length would be worth a hundred rounds."""
    folder = tmp_path / "once"

    def fit_with_median(folder, faulty_rounds):
        return fit_with_faulty_updates(
            folder,
            faulty_rounds,
            aggregator=GeometricMedian(),
            metrics={"m": GradientShapley()},
            factor=100.0,
        )

    faulty_once = fit_with_median(folder, faulty_rounds=range(3, 4))
    faulty_never = fit_with_median(tmp_path / "never", faulty_rounds=range(0))

    faults_of_client_1 = (1, 4)  # one faulty update of four
    assert faulty_once.named == {1: faults_of_client_1}
    assert faulty_never.named == {}

    value = faulty_once.contributions["m"][1].abs()
    largest_value = faulty_never.contributions["m"].abs().max()

    assert 0 < value < largest_value * 2

    table = open_run(next(folder.rglob("contributions.csv")).parent).table
    of_client = table.query("client == 1").groupby("metric")["round"]

    assert of_client.get_group("m").tolist() == [0, 1, 2]
    assert of_client.get_group("weight").tolist() == [0, 1, 2, 3]


AVERAGED = "updates far too large in 1 of 2 rounds: averaged into the model, but not measured"
EXCLUDED = "updates far too large in 1 of 2 rounds, and excluded from these"
NOT_FINITE = "updates not finite in 1 of 2 rounds, and excluded from these"


@pytest.mark.parametrize(
    ("filters", "size", "finding", "is_averaged"),
    [
        ([], 1e4, AVERAGED, True),
        ([OutlierFilter(exclude=True)], 1e4, EXCLUDED, False),
        ([], 1e10, EXCLUDED, False),  # it would drown the others
        ([], math.nan, NOT_FINITE, False),
    ],
    ids=["default", "exclude", "drowning", "not finite"],
)
def test_page_says_of_an_invalid_update_what_became_of_it(
    tmp_path, filters, size, finding, is_averaged
):
    loop = FederatedLoop(
        metrics={"cgsv": CosineGradientShapley()},
        uploads=[Huge(size)],
        filters=filters or None,
        seed=1,
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        fit(loop, tmp_path, data=toy_data((4, 3, 4, 3)), rounds=2)

    weights = read_run(tmp_path).query("metric == 'weight' and client == 1")
    page = text_of_page(write_report(tmp_path))
    page_for_one = text_of_page(write_report(tmp_path, client=1))

    assert (1 in weights["round"].to_list()) == is_averaged
    for text in (page, page_for_one):
        findings = {kind for kind in (AVERAGED, EXCLUDED, NOT_FINITE) if kind in text}
        assert findings == {finding}


def test_an_aggregate_that_is_not_finite_leaves_the_model_of_the_round_before(tmp_path):
    class Overflows(FedAvg):
        rounds = (1,)

        def aggregate(self, round, contributions):
            vector, weights = super().aggregate(round, contributions)
            if round.round_index in self.rounds:
                vector = vector * float("inf")
            return vector, weights

    models = []
    record = LambdaCallback(
        on_train_epoch_end=lambda trainer, module: models.append(state_vector(module))
    )
    data = toy_data((4, 3, 4, 3))
    metrics = {"cssv": ClassSpecificShapley()}
    loop = FederatedLoop(aggregator=Overflows(), metrics=metrics, seed=1)

    with warns(r"round 2: Overflows\(.*not finite\. The"):
        fit(loop, tmp_path / "once", data=data, rounds=3, callbacks=[record])

    assert torch.equal(models[0], models[1])
    assert not torch.equal(models[1], models[2])
    assert loop.contributions["cssv"].isfinite().all()

    Overflows.rounds = (1, 2)
    with (
        warns("the round before"),
        pytest.raises(RuntimeError, match="round 3:.*second time in a row"),
    ):
        fit(
            FederatedLoop(aggregator=Overflows(), seed=1),
            tmp_path / "twice",
            data=toy_data((4, 3, 4, 3)),
            rounds=4,
        )


def test_round_goes_on_without_an_excluded_outlier(tmp_path):
    size = 1e4
    data = toy_data((4, 3, 4, 3))
    loop = FederatedLoop(
        metrics={"cssv": ClassSpecificShapley(), "cgsv": CosineGradientShapley()},
        filters=[OutlierFilter(exclude=True)],
        uploads=[Huge(size, rounds=[0])],
        evaluation=ClientEvaluation(keep_trained=True),
        seed=1,
    )

    with warns("excluded from the round"):
        module = fit(loop, tmp_path, data=data, rounds=1)

    assert state_vector(module).abs().max() < 100
    assert loop.participations.tolist() == [1, 0, 1, 1]
    assert sorted(loop.state.trained) == [0, 2, 3]
    for value in (
        loop.weights,
        loop.contributions["cgsv"],
        loop.values["cssv"].by_class[:, 0],
    ):
        assert value is not None
        assert value.isnan().tolist() == [False, True, False, False]

    table = pd.read_csv(tmp_path / "contributions.csv")
    norms = table[table["metric"] == "update_norm"].set_index("client")["value"]

    assert norms[1] == pytest.approx(size, rel=1e-5)
    assert norms[[0, 2, 3]].max() < 100


def make_cohort(norms, index=0, broken=()):
    """A cohort of models with one parameter, whose updates have these lengths."""
    rows = torch.tensor(norms, dtype=torch.float64)[:, None]
    updates = tuple(
        ClientUpdate(client_id=client, num_samples=1, vector=row, num_steps=1)
        for client, row in enumerate(rows)
    )
    return Cohort(
        round_index=index,
        updates=updates,
        matrix=rows,
        starts=(torch.zeros(1, dtype=torch.float64),) * len(rows),
        num_samples=torch.ones(len(rows), dtype=torch.long),
        num_parameters=1,
        broken=broken,
    )


def test_warning_about_nan_clients_names_the_earlier_sender_of_a_large_update():
    """After an update that was aggregated most return NaN: the message leads back to whose it was."""
    watch = OutlierFilter()

    watch.apply(make_cohort(norms=[1.0, 1e4, 1.1, 0.9]))
    cohort = watch.apply(make_cohort(norms=[1.0], index=1, broken=[4, 2, 3]))  # client 0 is left

    (line,) = cohort.warnings
    assert "3 of 4 clients returned" in line
    assert "earlier round: client 1 sent an update far larger" in line
    rounds_of_client_1 = {1: 1}
    assert watch.notices.state_dict() == {
        "not_finite": {},
        "large_excluded": {},
        "large_averaged": rounds_of_client_1,
    }


def make_diverging_module(*rounds_and_clients):
    """Rounds and clients from 0."""
    return Diverges(network(), sgd, failing=set(rounds_and_clients))


def test_client_with_nan_is_left_out_and_reported_and_the_run_goes_on(tmp_path):
    loop = make_shapfed_loop(personalizer=Standalone(), optimizer_state="persist")
    second_round, third_round = 1, 2
    nan_of_client_1 = make_diverging_module((second_round, 1), (third_round, 1))

    with warns("client 1 returned.*round 2"):
        module = fit(loop, tmp_path, nan_of_client_1)

    assert state_vector(module).isfinite().all()
    assert loop.weights is not None
    assert loop.weights.isfinite().tolist() == [True, False, True]
    assert loop.received()[1].isfinite().all()
    assert loop.contributions["cssv"].isfinite().all()  # client 1 keeps its value of the first


def test_if_all_clients_fail_the_run_stops_with_the_reason(tmp_path):
    all_fail = make_diverging_module((1, 0), (1, 1), (1, 2))
    with (
        warns("3 of 3 clients returned"),
        pytest.raises(RuntimeError, match="round 2: every client.*NaN"),
    ):
        fit(FederatedLoop(seed=1), tmp_path, all_fail)


# ---- NormCap and SampleCap: what metrics and aggregators are given


def fit_one_round(folder, **options):
    recorder = KeepsRounds()
    fit(FederatedLoop(recorder, seed=1, **options), folder, rounds=1)
    return recorder.rounds[0]


def test_norm_cap_bounds_lengths_and_keeps_directions_and_buffers():
    updates = [
        [3.0, 4.0, 7.0],
        [9.0, 12.0, 8.0],
        [0.3, 0.4, 9.0],
    ]  # of length 5, 15, 0.5, and a buffer
    initial = torch.tensor([1.0, 2.0, 3.0])
    models = initial + torch.tensor(updates)
    cohort = replace(
        make_cohort([1.0, 1.0, 1.0]), matrix=models, starts=(initial,) * 3, num_parameters=2
    )

    capped = NormCap(1.2).apply(cohort)

    expected = [updates[0], [3.6, 4.8, 8.0], updates[2]]  # at most 1.2 times the median of 5
    assert_close(capped.matrix - initial, torch.tensor(expected))


def test_sample_cap_limits_the_aggregators_sample_counts_too(tmp_path):
    filters = [OutlierFilter(), SampleCap(1.0)]  # once the median

    plain = fit_one_round(tmp_path / "plain")
    capped = fit_one_round(tmp_path / "capped", filters=filters)

    median = int(plain.num_samples.double().quantile(0.5))
    expected = plain.num_samples.clamp_max(median)

    assert not torch.equal(expected, plain.num_samples)
    assert torch.equal(capped.num_samples, expected)

    share = expected.double() / expected.sum()
    weights = capped.aggregation_weights

    assert weights is not None
    assert_close(weights.double(), share, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            {"filters": [NormCap(1.0)], "personalizer": Standalone()},
            "all clients start from the global model",
        ),
        (
            {"filters": [NormCap(1.0)], "metrics": {"others": ContributionEstimation()}},
            "subtract their own updates",
        ),
        (
            {"filters": [MultiKrum(1)], "personalizer": Standalone()},
            "all clients start from the global model",
        ),
        ({"filters": [SampleCap(1.0), SampleCap(2.0)]}, "two filters of the same class"),
        ({"filters": [SampleCap(1.0), OutlierFilter()]}, "Put it before the others"),
    ],
)
def test_filters_with_wrong_arguments_are_refused(arguments, message):
    with refused(message):
        FederatedLoop(**arguments)


def test_multi_krum_keeps_the_update_closest_to_the_others():
    cohort = make_cohort([5.0, 5.1, 5.2, 1.0, 9.0])

    filtered = MultiKrum(1, keep=1).apply(cohort)

    assert filtered.ids == [1]
