"""``flsv bench`` from the command line."""

import importlib
import sys

import pandas
import pytest
import yaml

from flsv.benchmark.federation import FOLDER
from flsv.cli import main
from flsv.cli.bench import QUICK
from flsv.utilities.errors import ConfigurationError
from helpers.runs import rows


@pytest.fixture
def mine(tmp_path):
    """Three clients of the digits, one of whom has the wrong labels; two rounds."""
    said = yaml.safe_load((FOLDER / "digits_sizes.yaml").read_text())
    partitioner = {
        "class_path": "flsv.data.SizePartitioner",
        "init_args": {"proportions": [3, 5, 2], "seed": 1},
    }
    noise = {"class_path": "flsv.data.ClosedSetLabelNoise", "init_args": {"clients": [1]}}
    said["data"] |= {"partitioner": partitioner, "corruptions": [noise]}
    said["data"]["splits"]["max_samples"] = 160
    path = tmp_path / "mine.yaml"
    path.write_text(yaml.safe_dump({**said, "rounds": 2, "bad": {"label_noise": [1]}}))
    return str(path)


METRIC = """
import torch
from flsv.metrics import ContributionMetric

class Mine(ContributionMetric):
    is_differentiable, higher_is_better, full_state_update = False, True, False

    def init_states(self, num_clients, num_classes):
        pass

    def update(self, client_ids):
        self.rounds += 1
        {does}

    def compute(self):
        return {scale} * torch.arange(3.0)
"""


@pytest.mark.slow
def test_bench_stores_values_of_a_users_metric_and_prints_its_errors(
    mine, tmp_path, monkeypatch, capsys
):
    out, values = tmp_path / "out", tmp_path / "out/values.csv"
    monkeypatch.syspath_prepend(tmp_path)
    asked = [
        "bench",
        "--federations",
        mine,
        "--seeds",
        "1",
        "--truth-seeds",
        "2",
        "--out",
        str(out),
        "-q",
    ]

    def bench(does: str = "", scale: float = 1) -> tuple[int, str]:
        (tmp_path / "edited_metric.py").write_text(METRIC.format(does=does, scale=scale))
        sys.modules.pop("edited_metric", None)
        importlib.invalidate_caches()
        status = main([*asked, "--metric", "edited_metric.Mine"])
        return status, capsys.readouterr().err

    def kept() -> list[float]:
        found = rows(values) if values.is_file() else []
        return [float(row["value"]) for row in found if row["metric"] == "Mine"]

    status, said = bench(does="torch.ones(2) + torch.ones(3)")
    assert status == 1
    assert "Mine has no value in mine, seed 0: Traceback" in said
    assert "RuntimeError: The size of tensor a (2) must match" in said
    assert kept() == []
    # Corrected, edited, with the same code again.
    assert bench() == (0, "")
    assert kept() == [0, 1, 2]
    assert bench(scale=-2) == (0, "")
    assert kept()[3:] == [0, -2, -4]
    before = values.read_bytes()
    assert bench(scale=-2) == (0, "")
    assert values.read_bytes() == before
    # Baselines stand beside it.
    found = pandas.read_csv(out / "benchmark.csv", index_col="metric")
    assert set(found.index) == {"Mine", "size", "training_loss", "cgsv", "fedsv_samples"}
    assert 0 <= found["auroc label_noise"]["cgsv"] <= 1


def test_bench_quick_runs_four_federations(monkeypatch, tmp_path):
    seen: list[set[str]] = []

    def instead(known: dict[str, object], *_: object, **__: object) -> None:
        seen.append(set(known))
        raise ConfigurationError("enough")

    monkeypatch.delenv("FLSV_DATA_ROOT", raising=False)
    monkeypatch.setattr("flsv.cli.bench.bench", instead)
    assert main(["bench", "--metric", "size", "--out", str(tmp_path), "--quick"]) == 2
    assert seen == [set(QUICK)]
    assert len(QUICK) == 4


def test_bench_leaves_out_federations_without_data(monkeypatch, tmp_path, capsys):
    monkeypatch.delenv("FLSV_DATA_ROOT", raising=False)
    assert (
        main(["bench", "--metric", "size", "--federations", "mnist_sizes", "--out", str(tmp_path)])
        == 2
    )
    captured = capsys.readouterr()
    assert "mnist_sizes is left out: MNIST/raw is not there" in captured.out
    assert "there is no federation to run" in captured.err
