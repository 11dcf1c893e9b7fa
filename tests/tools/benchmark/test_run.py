"""Every metric of the registry builds and has a score; one of one's own, too; a metric that fails, fails alone."""

import pytest
import torch

from benchmark import make_truth, truth_table
from benchmark.registry import METRICS, NEEDS, Entry, entry
from benchmark.run import bench, run_metrics
from benchmark.scores import BenchResults, RunResults, share_error, spearman
from benchmark.summary import scores_of, summarize
from flsv.metrics import ContributionMetric
from helpers import refused
from helpers.small_federation import SIZES, make_small_federation


class Last(ContributionMetric):
    per_class = False

    def __init__(self, num_clients: int | None = None, factor: float = 1.0):
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


class Broken(Last):
    def update(self, client_ids):
        raise RuntimeError("no idea")


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

    assert needs <= set(NEEDS)

    num_samples = make_small_federation().datamodule().num_samples
    assert run.values["size"].tolist() == num_samples.tolist()


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
def test_run_with_a_failing_metric_keeps_the_other_values():
    run = run_metrics(
        make_small_federation(),
        {
            "mine": Entry("mine", Last),
            "cost": Entry("cost", Cost),
            "broken": Entry("broken", Broken),
        },
        seed=0,
    )

    assert run.values["mine"].tolist() == [0, 1, 2]
    assert run.values["cost"].tolist() == [0, -1, -2]  # more is better, as of the truth
    assert not run.refused
    assert list(run.failed) == ["broken"]
    assert "RuntimeError: no idea" in run.failed["broken"]


@pytest.mark.slow
def test_entry_of_a_metric_includes_its_client_algorithm():
    name, in_run = entry("flsv.contrib.InRunShapley()")
    assert in_run.requirements == METRICS["in_run"].requirements

    entries = {name: in_run, "size": METRICS["size"]}
    run = run_metrics(make_small_federation(), entries, seed=0)

    assert not run.refused

    # The training is the same with it and without.
    lone = {"in_run": METRICS["in_run"]}
    run_alone = run_metrics(make_small_federation(), lone, seed=0)

    assert torch.equal(run_alone.values["in_run"], run.values[name])


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("cgvs", "there is no metric"),
        ("FedExP", "flsv.contrib.FedExP is no metric"),
        ("flsv.metrics.GradientShapley(2)", "given by name"),
        ("flsv.metrics.GradientShapley(order=open)", "Write my_package"),
    ],
)
def test_entry_with_an_unknown_name_raises(name, message):
    with refused(message):
        entry(name)


@pytest.mark.slow
def test_finished_runs_are_read_instead_of_repeated(tmp_path):
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

    repeated = bench(federations, entries, seeds=2, folder=folder, say=printed.append)
    assert len(printed) == 2

    extended = bench(federations, with_another, seeds=1, folder=folder, say=printed.append)

    for key, values in results.values.items():
        assert torch.allclose(repeated.values[key], values.double(), rtol=1e-6)
    assert ("small", 0, "ssv") in extended.values

    run_scores = scores_of(results, federations)
    summary = summarize(run_scores, entries)
    correlations = summary["all"]

    truth = federations["small"][1].mean
    scores = [spearman(results.values["small", seed, "fedsv"], truth) for seed in (0, 1)]

    assert correlations["fedsv"] == pytest.approx(sum(scores) / 2)
    errors = [share_error(results.values["small", seed, "fedsv"], truth) for seed in (0, 1)]
    assert summary["misallocated"]["fedsv"] == pytest.approx(sum(errors) / 2)


def test_metric_with_a_truncated_last_row_is_left_out_and_rows_are_added(tmp_path):
    lines = [
        "federation,seed,metric,values,identity",
        "small,0,size,1 2,",
        "small,0,cgsv,1 2",  # the row is cut off
    ]
    (tmp_path / "values.csv").write_text("\n".join(lines))

    results = BenchResults(tmp_path)
    assert list(results.values) == [("small", 0, "size")]

    shadow_values = [1.0, float("nan")]
    results.add("small", 1, RunResults({"shadow": torch.tensor(shadow_values)}))
    reread_results = BenchResults(tmp_path)

    assert reread_results.values["small", 0, "size"].tolist() == [1, 2]

    reread_shadow_values = reread_results.values["small", 1, "shadow"].tolist()
    assert reread_shadow_values == pytest.approx(shadow_values, nan_ok=True)


def test_values_of_a_version_with_other_columns_are_refused_before_rows_are_added(
    tmp_path,
):
    # In earlier versions each client had a row.
    lines = [
        "federation,seed,metric,client,value,identity",
        "small,0,size,0,1,",
    ]
    (tmp_path / "values.csv").write_text("\n".join(lines) + "\n")

    with refused("client', 'value', 'identity': expected .*values, identity"):
        BenchResults(tmp_path)
