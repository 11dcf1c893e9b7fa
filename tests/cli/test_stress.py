"""``flsv stress`` from the command line."""

from __future__ import annotations

import csv
import random
from pathlib import Path
from typing import Any

import pytest
import yaml

from flsv import read_run
from flsv.benchmark.federation import FOLDER
from flsv.cli import main

#: Of a run of three clients, whose aggregator reads a metric.
RUN: dict[str, Any] = {
    "seed_everything": 0,
    "trainer": {"max_epochs": 2, "accelerator": "cpu"},
    "model": {"class_path": "flsv.ClassifierClient", "init_args": {"network": "softmax"}},
    "data": {
        "source": "digits",
        "partitioner": {"class_path": "flsv.data.SizePartitioner", "init_args": {"proportions": [1, 2, 4]}},
        "splits": {"max_samples": 300, "server_val": 0.2},
    },
    "federation": {
        "seed": 0,
        "aggregator": {"class_path": "flsv.aggregation.ShapFedWA", "init_args": {"metric": "cssv"}},
        "metrics": {"cssv": {"class_path": "flsv.metrics.ClassSpecificShapley"}},
    },
}


def fitted(folder: Path, config: dict[str, Any]) -> Path:
    file = folder / "run.yaml"
    file.write_text(yaml.safe_dump(config))
    assert main(["fit", "--config", str(file), "--trainer.default_root_dir", str(folder), "-q"]) == 0
    return folder / "lightning_logs" / "version_0"


def values_kept(folder: Path) -> dict[tuple[str, str], list[float]]:
    """Cheat and metric to the clients' values."""
    found: dict[tuple[str, str], list[float]] = {}
    with (folder / "values.csv").open(newline="") as file:
        for row in csv.DictReader(file):
            found.setdefault((row["condition"].partition(" [")[0], row["metric"]), []).append(float(row["value"]))
    return found


def test_one_metric_and_a_cheat(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    said = yaml.safe_load((FOLDER / "digits_sizes.yaml").read_text())
    partitioner = {"class_path": "flsv.data.SizePartitioner", "init_args": {"proportions": [3, 5, 2], "seed": 1}}
    said["data"]["partitioner"] = partitioner
    said["data"]["splits"]["max_samples"] = 160
    path = tmp_path / "mine.yaml"
    path.write_text(yaml.safe_dump({**said, "rounds": 2}))
    out = tmp_path / "out"
    asked = ["stress", "--metric", "cgsv", "--attacks", "sybils", "--federations", str(path)]
    asked += ["--seeds", "1", "--clients", "1", "--out", str(out)]
    assert main(asked) == 0
    shown = capsys.readouterr().out
    assert "What the best cheat gains" in shown
    page = (out / "stress.md").read_text()
    assert "## Gains without a safeguard" in page
    assert "## Gains under the safeguard copies" in page
    assert "comes as two clients" in page


@pytest.mark.slow
def test_a_run_whose_metrics_value_by_several_performances(tmp_path: Path) -> None:
    by = {"loss": "negative_loss", "right": "accuracy"}
    metrics = {
        name: {"class_path": "flsv.metrics.CumulativeShapley", "init_args": {"performance": performance}}
        for name, performance in by.items()
    }
    run = fitted(tmp_path, {**RUN, "federation": {"seed": 0, "metrics": metrics}})
    asked = ["stress", str(run), "--attacks", "duplication", "--seeds", "1", "--clients", "1", "-q"]
    assert main([*asked, "--safeguard", "none"]) == 0
    found, before = values_kept(run / "stress"), read_run(run)
    for name in by:
        last = before[(before["metric"] == name) & before["class"].isna()].groupby("client")["value"].last()
        assert found["honest", name] == pytest.approx(last.tolist(), rel=1e-3, abs=1e-5)
    assert found["honest", "loss"] != found["honest", "right"]
    assert "| `loss` | " in (run / "stress" / "stress.md").read_text()


def test_a_wrong_federation_and_the_list(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["stress", "--federations", "nowhere"]) == 2
    assert "there is no federation 'nowhere'" in capsys.readouterr().err
    assert main(["stress", "--list"]) == 0
    assert "duplication" in capsys.readouterr().out


def test_in_a_run_s_own_federation(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = fitted(tmp_path, RUN)
    assert main(["stress", str(run), "--attacks", "scaling", "sybils", "--seeds", "1", "--partner", "1"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "6 fits or fewer" in shown
    assert "client 1: " in shown
    kept = values_kept(run / "stress")
    # Nobody cheats: it is the run itself, with its aggregator, seed and rounds.
    told = read_run(run)
    last = told[(told["round"] == 1) & (told["metric"] == "cssv") & told["class"].isna()].sort_values("client")
    assert kept["honest", "cssv"] == pytest.approx(last["value"].tolist(), rel=1e-5)
    assert len(kept["sybils of 1", "cssv"]) == 4
    page = (run / "stress" / "stress.md").read_text()
    assert "## What each partner could gain\n\n| partner |" in page
    assert "| client 1 | `size` |" in page
    assert "## Gains as the run is" in page
    # What is kept is not run again.
    before = (run / "stress" / "values.csv").read_bytes()
    assert main(["stress", str(run), "--attacks", "scaling", "--seeds", "1", "--partner", "1", "-q"]) == 0
    assert (run / "stress" / "values.csv").read_bytes() == before


def test_partners_with_data_of_their_own_are_cheats_by_name(tmp_path: Path) -> None:
    draws = random.Random(0)
    for name in ("Boston", "Lyon", "Graz"):
        rows = [(draws.gauss(0, 1), draws.gauss(0, 1)) for _ in range(40)]
        lines = [f"{x:.3f},{y:.3f},{int(x + y > 0)}" for x, y in rows]
        (tmp_path / "hospitals").mkdir(exist_ok=True)
        (tmp_path / "hospitals" / f"{name}.csv").write_text("\n".join(["a,b,label", *lines]))
    data = {"source": str(tmp_path / "hospitals"), "labels": "label", "splits": {"server_val": 0.2}}
    run = fitted(tmp_path, {**RUN, "data": data})
    asked = ["--attacks", "duplication", "split_sybils", "collusion", "--safeguard", "none", "--seeds", "1"]
    assert main(["stress", str(run), *asked, "--partner", "Lyon", "-q"]) == 0
    kept = values_kept(run / "stress")
    # Clients in the order of their names: Boston, Graz, Lyon; whose next one is Boston.
    size, more = kept["honest", "size"], kept["duplication of 2", "size"]
    assert more == [size[0], size[1], 3 * size[2]]
    halves = kept["split_sybils of 2", "size"]
    assert halves[:2] == size[:2]
    assert halves[2] + halves[3] == size[2]
    assert kept["collusion of 2", "size"] == [size[0] + size[2], size[1], size[0] + size[2]]
    assert "| Lyon | `size` |" in (run / "stress" / "stress.md").read_text()


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ("stress --partner Boston", "names clients of a run"),
        ("stress {0} --federations digits_sizes", "leave --federations and --client-val out"),
        ("stress {0} --attacks scaling", "holds no config.yaml"),
    ],
)
def test_what_is_asked_of_a_run_in_vain(
    asked: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([part.format(tmp_path) for part in asked.split()]) == 2
    assert said in capsys.readouterr().err
