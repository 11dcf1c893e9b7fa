"""Every metric of the registry builds and has a score; one of one's own, too; a metric that fails, fails alone."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from flsv.benchmark import make_truth, truth_table
from flsv.benchmark.registry import METRICS, NEEDS, Entry, entry
from flsv.benchmark.run import bench, run_metrics
from flsv.benchmark.scores import BenchResults, Values, spearman
from flsv.benchmark.summary import by_set, costs, summarize
from flsv.metrics import ContributionMetric
from flsv.utilities.errors import ConfigurationError
from helpers.runs import SIZES, small_federation


class Last(ContributionMetric):
    per_class = False

    def __init__(self, num_clients: int | None = None, factor: float = 1.0) -> None:
        self.factor = factor
        super().__init__(num_clients, None)

    def init_states(self, num_clients: int, num_classes: int | None) -> None:
        pass

    def update(self, client_ids: Tensor) -> None:
        self.rounds += 1

    def compute(self) -> Tensor:
        return self.factor * torch.arange(self.num_clients or 0).float()


class Broken(Last):
    def update(self, client_ids: Tensor) -> None:
        raise RuntimeError("no idea")


def test_benchmark_run_computes_every_registered_metric_in_one_fit() -> None:
    found = run_metrics(small_federation(), METRICS, seed=0)
    assert not found.refused
    assert found.values.keys() == METRICS.keys()
    for name, values in found.values.items():
        assert values.shape == (3,), name
        assert values.isfinite().all(), name
    assert len(METRICS) >= 18
    assert {need for each in METRICS.values() for need in each.needed} <= set(NEEDS)
    assert found.evaluations["fedsv"] == 2 * 8
    assert found.values["size"].tolist() == small_federation().datamodule().num_samples.tolist()


def test_regression_run_refuses_metrics_that_need_classes() -> None:
    model = {"class_path": "flsv.models.RegressorClient", "init_args": {}}
    source = {
        "class_path": "flsv.benchmark.built_in.BuiltInData",
        "init_args": {"name": "diabetes"},
    }
    data = {"source": source, "partitioner": SIZES, "batch_size": 64}
    mine = small_federation(
        data=data, attacks=[], bad={}, model=model, performance="val_loss", mode="min"
    )
    names = ("fedsv", "gradient_agreement", "cssv", "one_round", "decayed")
    found = run_metrics(mine, {name: METRICS[name] for name in names}, seed=0)
    assert found.values.keys() == {"fedsv", "gradient_agreement", "one_round", "decayed"}
    assert all("no classes" in why for why in found.refused.values())


def test_run_with_a_failing_metric_keeps_the_other_values() -> None:
    found = run_metrics(
        small_federation(), {"mine": Entry("mine", Last), "broken": Entry("broken", Broken)}, seed=0
    )
    assert found.values["mine"].tolist() == [0, 1, 2]
    assert not found.refused
    assert list(found.failed) == ["broken"]
    assert "RuntimeError: no idea" in found.failed["broken"]


@pytest.mark.slow
def test_entry_of_a_metric_includes_its_client_algorithm() -> None:
    name, mine = entry("flsv.metrics.InRunShapley()")
    assert mine.needed == METRICS["in_run"].needed
    entries = {name: mine, "size": METRICS["size"]}
    found = run_metrics(small_federation(), entries, seed=0)
    assert not found.refused
    # The training is the same with it and without.
    alone = run_metrics(small_federation(), {"in_run": METRICS["in_run"]}, seed=0)
    assert torch.equal(alone.values["in_run"], found.values[name])


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("cgvs", "there is no metric"),
        ("flsv.metrics.GradientShapley(2)", "given by name"),
        ("flsv.metrics.GradientShapley(order=open)", "Write my_package"),
    ],
)
def test_entry_with_an_unknown_name_raises(name: str, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        entry(name)


@pytest.mark.slow
def test_finished_runs_are_read_instead_of_repeated(tmp_path: Path) -> None:
    mine = small_federation()
    make_truth(mine, tmp_path, seeds=[1, 2])
    known = {"small": (mine, truth_table(mine, tmp_path))}
    said: list[str] = []
    entries = {name: METRICS[name] for name in ("size", "cgsv", "fedsv")}
    results = bench(known, entries, seeds=2, folder=tmp_path / "out", say=said.append)
    assert len(said) == 2
    again = bench(known, entries, seeds=2, folder=tmp_path / "out", say=said.append)
    assert len(said) == 2
    for key, values in results.values.items():
        assert torch.allclose(again.values[key], values.double(), rtol=1e-6)
    more = bench(
        known, {**entries, "ssv": METRICS["ssv"]}, seeds=1, folder=tmp_path / "out", say=said.append
    )
    assert ("small", 0, "ssv") in more.values

    cost = costs(mine, entries, tmp_path / "costs.csv", say=said.append)
    assert cost["fedsv"].evaluations == 8
    assert min(each.seconds for each in cost.values()) > 0
    assert costs(mine, entries, tmp_path / "costs.csv").keys() == cost.keys()
    summary = summarize(results, known, entries)
    table = by_set(results, known, entries, cost).set_index("metric")
    assert table["rank_correlation"].to_dict() == pytest.approx(
        summary["all"].to_dict(), nan_ok=True
    )
    assert table["misallocated"].to_dict() == pytest.approx(summary["error"].to_dict(), nan_ok=True)
    best, following = table.index[:2]
    assert table["lead"][best] == pytest.approx(summary["all"][best] - summary["all"][following])
    assert table["ms_a_round"]["fedsv"] == pytest.approx(1000 * cost["fedsv"].seconds)
    values = results.values["small", 0, "fedsv"], results.values["small", 1, "fedsv"]
    truth = known["small"][1].mean
    scores = [spearman(v, truth) for v in values]
    assert summary["all"]["fedsv"] == pytest.approx(sum(scores) / 2)
    half = 6.3138 * abs(scores[0] - scores[1]) / 2  # Student's t of one degree of freedom, 90 %
    assert summary["interval"]["fedsv"] == pytest.approx(half, rel=1e-3, abs=1e-9)
    assert 0 <= summary["auroc free_rider"]["cgsv"] <= 1


def test_metric_with_a_truncated_last_row_is_run_again(tmp_path: Path) -> None:
    head = "federation,seed,metric,client,value,identity\n"
    first = f"{head}small,0,size,0,1,\n"
    (tmp_path / "values.csv").write_text(f"{first}small,0,cgsv,0,1,\nsmall,0,")
    results = BenchResults(tmp_path)
    assert [key[2] for key in results.values] == ["size"]
    results.add("small", 1, Values({"shadow": torch.tensor([1.0, float("nan")])}))
    read = BenchResults(tmp_path)
    assert read.values["small", 0, "size"].tolist() == [1]
    assert read.values["small", 1, "shadow"].tolist() == pytest.approx(
        [1, float("nan")], nan_ok=True
    )


def test_values_of_a_version_with_other_columns_are_refused_before_rows_are_added(
    tmp_path: Path,
) -> None:
    (tmp_path / "values.csv").write_text(
        "federation,seed,metric,client,value,low,high,identity\nsmall,0,size,0,1,,,\n"
    )
    with pytest.raises(
        ConfigurationError,
        match="value,low,high,identity: expected .*value,identity. Move the file",
    ):
        BenchResults(tmp_path)
