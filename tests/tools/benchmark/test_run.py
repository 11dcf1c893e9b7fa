"""Every metric of the registry builds and has a score; one of one's own, too; a metric that fails, fails alone."""

import pytest
import torch

from benchmark import make_truth, truth_table
from benchmark.registry import METRICS, REQUIREMENTS, Entry, entry
from benchmark.run import bench, run_metrics
from benchmark.scores import share_error, spearman
from benchmark.summary import scores_of, summarize
from flsv.metrics import ContributionMetric
from helpers import refused
from helpers.small_federation import SIZES, make_small_federation


class Last(ContributionMetric):
    per_class = False

    def __init__(self, num_clients=None, factor=1.0):
        self.factor = factor
        super().__init__(num_clients, None)

    def init_states(self, num_clients, num_classes):
        pass

    def update(self, client_ids):
        self.rounds += 1

    def compute(self):
        return self.factor * torch.arange(self.num_clients or 0).float()


class Cost(Last):
    higher_is_better = False


@pytest.mark.slow
def test_benchmark_run_computes_every_registered_metric_in_one_fit():
    run = run_metrics(make_small_federation(), METRICS, seed=0)

    assert not run.refused
    assert run.values.keys() == METRICS.keys()
    for name, values in run.values.items():
        assert values.shape == (3,), name
        assert values.isfinite().all(), name
    assert len(METRICS) >= 18  # no fewer than there have been
    assert not any(metric.is_users for metric in METRICS.values())

    needs = set()
    for metric in METRICS.values():
        needs |= set(metric.requirements)

    assert needs <= set(REQUIREMENTS)

    num_samples = make_small_federation().datamodule().num_samples
    assert run.values["size"].tolist() == num_samples.tolist()


@pytest.mark.slow
def test_regression_run_refuses_metrics_that_need_classes():
    model = {"class_path": "flsv.models.RegressorClient", "init_args": {}}
    source = {
        "class_path": "benchmark.built_in.BuiltInData",
        "init_args": {"name": "diabetes"},
    }
    data = {"source": source, "partitioner": SIZES, "batch_size": 64}
    diabetes = make_small_federation(
        data=data,
        attacks=[],
        model=model,
        performance="val_loss",
        mode="min",
    )
    names = ("fedsv", "gradient_agreement", "cssv", "one_round", "decayed")
    entries = {name: METRICS[name] for name in names}

    run = run_metrics(diabetes, entries, seed=0)

    assert run.values.keys() == {"fedsv", "gradient_agreement", "one_round", "decayed"}
    assert all("no classes" in why for why in run.refused.values())


@pytest.mark.slow
def test_run_turns_the_sign_of_a_metric_of_which_less_is_better():
    run = run_metrics(
        make_small_federation(),
        {
            "mine": Entry("mine", Last),
            "cost": Entry("cost", Cost),
        },
        seed=0,
    )

    assert run.values["mine"].tolist() == [0, 1, 2]
    assert run.values["cost"].tolist() == [0, -1, -2]  # more is better, as of the truth
    assert not run.refused


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("cssvv", "there is no metric 'cssvv'. Did you mean cssv or ssv"),
        ("FedExP", "flsv.contrib.FedExP is no metric"),
        ("flsv.metrics.GradientShapley(2)", "given by name"),
        ("flsv.metrics.GradientShapley(order=open)", "Write my_package"),
    ],
)
def test_entry_with_an_unknown_name_raises(name, message):
    with refused(message):
        entry(name)


@pytest.mark.slow
def test_finished_runs_are_read_and_extended_by_another_metric(tmp_path):
    small = make_small_federation()
    make_truth(small, tmp_path, seeds=[1, 2])
    federations = {"small": (small, truth_table(small, tmp_path))}
    entries = {name: METRICS[name] for name in ("size", "cgsv", "fedsv")}
    with_another = {**entries, "ssv": METRICS["ssv"]}
    folder = tmp_path / "out"
    printed = []

    results = bench(
        federations,
        entries,
        seeds=2,
        folder=folder,
        say=printed.append,
    )

    assert len(printed) == 2

    extended = bench(federations, with_another, seeds=1, folder=folder, say=printed.append)

    for name in entries:
        key = ("small", 0, name)
        values_before = results.values[key].double()
        assert torch.allclose(extended.values[key], values_before, rtol=1e-6)
    assert ("small", 0, "ssv") in extended.values

    run_scores = scores_of(results, federations)
    summary = summarize(run_scores, entries)
    correlations = summary["all"]

    truth = federations["small"][1].mean
    scores = [spearman(results.values["small", seed, "fedsv"], truth) for seed in (0, 1)]

    assert correlations["fedsv"] == pytest.approx(sum(scores) / 2)
    errors = [share_error(results.values["small", seed, "fedsv"], truth) for seed in (0, 1)]
    assert summary["misallocated"]["fedsv"] == pytest.approx(sum(errors) / 2)
