"""``flsv repeat``: runs of other seeds on the same data, and their means."""

from __future__ import annotations

import csv
import statistics
from pathlib import Path

import pytest
import yaml
from scipy import stats

from flsv.cli import main, repeat
from flsv.report import open_run
from flsv.report.shares import basis_of

CONFIG = """
trainer: {max_epochs: 1, accelerator: cpu}
model:
  class_path: flsv.ClassifierClient
  init_args:
    network: softmax
    optimizer: {class_path: torch.optim.SGD, init_args: {lr: 0.1}}
data:
  source: digits
  partitioner: {class_path: flsv.data.SizePartitioner, init_args: {proportions: [1, 2, 4], seed: 0}}
  splits: {server_val: 0.2, seed: 0}
  batch_size: 64
federation:
  metrics: {cssv: ClassSpecificShapley}
  reporting: {figures: 0}
"""


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("repeat") / "federation.yaml"
    path.write_text(CONFIG)
    return path


def rows(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def test_means_of_runs_of_other_seeds(
    config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    command = ["repeat", "3", "--config", str(config), "--out", str(out)]
    assert main(command) == 0
    said = capsys.readouterr().out
    assert "Run 3 of 3: seed 2" in said
    assert "cssv, 3 runs" in said
    runs = [open_run(path) for path in sorted(out.rglob("contributions.csv"))]
    assert [run.record["settings"]["federation_seed"] for run in runs] == [0, 1, 2]
    finals = [run.final("cssv") for run in runs]
    assert finals[0] != finals[2]  # another seed
    found = rows(out / "repeat.csv")
    assert [row["metric"] for row in found] == ["cssv"] * 3
    for client, row in enumerate(found):
        values = [final[client] for final in finals]
        low, high = stats.t.interval(0.9, 2, statistics.fmean(values), stats.sem(values))
        expected = [3, statistics.fmean(values), statistics.stdev(values), low, high]
        assert [float(row[key]) for key in ("runs", "mean", "std", "low", "high")] == pytest.approx(expected)
    assert sum(float(row["share"]) for row in found) == pytest.approx(1)
    basis = basis_of(runs[1], "cssv")
    assert [*zip(basis.values, basis.low)] == [(float(row["mean"]), float(row["low"])) for row in found]

    monkeypatch.setattr(repeat, "_fit", lambda *args: pytest.fail("a run that is done was started again"))
    assert main([*command, "-q"]) == 0
    assert capsys.readouterr().out == f"Summary: {out}/repeat.csv\n"
    assert rows(out / "repeat.csv") == found
    assert main([*command, "--trainer.max_epochs=2"]) == 2
    assert "holds results of others: trainer.max_epochs is 2 and was 1. Go" in capsys.readouterr().err
    # What changes no number is no other experiment.
    assert main([*command, "--trainer.log_every_n_steps=7", "-q"]) == 0


def test_what_changed_between_two_calls_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The arguments are the same each time: only what the file says and what it names are others."""
    table = [["clinic", "age", "ill"], *([c, str(20 + i * 7 % 31), "ny"[i % 2]] for c in "AB" for i in range(20))]
    data, config, out = tmp_path / "data.csv", tmp_path / "federation.yaml", tmp_path / "out"

    def write(rows: list[list[str]], lr: float) -> None:
        data.write_text("".join(",".join(row) + "\n" for row in rows))
        said = yaml.safe_load(CONFIG) | {"data": {"source": str(data), "labels": "ill", "groups": "clinic"}}
        said["model"]["init_args"]["optimizer"]["init_args"]["lr"] = lr
        config.write_text(yaml.safe_dump(said))

    write(table, 0.1)
    assert main(["repeat", "2", "--config", str(config), "--out", str(out), "-q"]) == 0
    before = (out / "repeat.csv").read_bytes()
    other = [*table[:-1], ["B", "99", table[-1][2]]]
    for rows_, lr, said in (
        (table, 0.2, "optimizer.init_args.lr is 0.2 and was 0.1"),
        (other, 0.1, "samples of"),
    ):
        write(rows_, lr)
        capsys.readouterr()
        assert main(["repeat", "3", "--config", str(config), "--out", str(out)]) == 2
        assert said in capsys.readouterr().err
        assert (out / "repeat.csv").read_bytes() == before
        assert not (out / "seed_2").exists()
