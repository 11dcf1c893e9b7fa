from __future__ import annotations

import csv
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
import yaml

from flsv import ClassifierClient, FederatedDataModule, FederatedLoop, Reporting
from flsv.cli import main
from flsv.cli.retrain import retrain
from flsv.cli.saved_run import performance_by
from flsv.data import SizePartitioner, Splits
from flsv.errors import ConfigurationError
from flsv.functional import exact_shapley
from flsv.games.retraining import RetrainedUtility
from flsv.metrics import (
    ClassSpecificShapley,
    CumulativeShapley,
    GradientAgreement,
    GradientShapley,
    LeaveOneOut,
    PartialFederatedShapley,
)

CONFIG = """
seed_everything: 3
trainer: {max_epochs: 2, accelerator: cpu, enable_progress_bar: false, enable_model_summary: false}
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
  aggregator: {class_path: ShapFedWA, init_args: {metric: cssv}}
  metrics: {cssv: ClassSpecificShapley}
  reporting: {table: false, figures: 0}
"""
#: Of a table, without metrics.
TABLE = {
    **yaml.safe_load(CONFIG),
    "model": {"class_path": "flsv.ClassifierClient", "init_args": {"network": "softmax"}},
    "federation": {"reporting": {"table": False, "figures": 0}},
}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run's folder, as the command line leaves it."""
    folder = tmp_path_factory.mktemp("retrained")
    (folder / "federation.yaml").write_text(CONFIG)
    assert main(["fit", "--config", str(folder / "federation.yaml"), f"--trainer.default_root_dir={folder}"]) == 0
    return next(folder.glob("lightning_logs/*"))


def rows(path: Path) -> list[dict[str, str]]:
    with path.open() as file:
        return list(csv.DictReader(file))


def test_all_coalitions_give_the_exact_values_of_the_game_by_hand(run: Path) -> None:
    from flsv.aggregation import ShapFedWA

    found, path = retrain(run, "all", metric="negative_loss", seeds=1)
    data = FederatedDataModule(
        "digits", SizePartitioner([1, 2, 4], seed=0), batch_size=64, splits=Splits(server_val=0.2, seed=0)
    )

    def trainer(cohort: object) -> L.Trainer:
        metrics = {"cssv": ClassSpecificShapley()}
        loop = FederatedLoop(
            ShapFedWA("cssv"), metrics, sampler=cohort, seed=3, reporting=Reporting(table=False, figures=0)
        )  # type: ignore[arg-type]
        quiet = {"enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}
        return L.Trainer(
            max_epochs=2, accelerator="cpu", callbacks=[loop], logger=False, default_root_dir=run, limit_val_batches=0,
            **quiet,  # type: ignore[arg-type]
        )  # fmt: skip

    L.seed_everything(3, verbose=False)
    module = ClassifierClient(
        "softmax", num_classes=10, input_shape=(1, 8, 8), optimizer=partial(torch.optim.SGD, lr=0.1)
    )
    exact = exact_shapley(RetrainedUtility(trainer, module, data, "negative_loss"), 3).values  # type: ignore[arg-type]
    torch.testing.assert_close(torch.tensor(found["value"]), exact, rtol=0, atol=1e-7)
    assert [row["client"] for row in rows(path)] == ["0", "1", "2"]
    assert float(rows(path)[2]["value"]) == found["value"][2]
    for file in run.glob("retrained*"):
        file.unlink()


@pytest.mark.slow
def test_the_command_goes_on_and_its_shares_sum_to_one(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["retrain", str(run), "--rounds", "1", "--trainings", "singles"]
    assert main(command) == 0
    said = capsys.readouterr().out
    assert "accuracy, by retraining (each client alone, seed 3, 1 of 2 rounds)" in said
    assert "Retrained:" in said
    kept = run / "retrained_accuracy.csv"
    lines = kept.read_bytes().splitlines(keepends=True)
    assert len(lines) == 2 + 5
    before = rows(run / "retrained.csv")
    assert {row["share"] for row in before} == {""}  # they rank only
    assert {(row["seeds"], row["rounds"]) for row in before} == {("3", "1")}
    assert all(float(row["low"]) <= float(row["value"]) <= float(row["high"]) for row in before)
    kept.write_bytes(b"".join(lines[:4]) + lines[4][:5])
    assert main(command) == 0
    assert kept.read_bytes() == b"".join(lines)
    assert rows(run / "retrained.csv") == before
    page, mine = run / "all.html", run / "mine.html"
    assert main(["report", str(run), "--out", str(page)]) == 0
    assert main(["report", str(run), "--out", str(mine), "--client", "1"]) == 0
    assert {row["by"] for row in before} == {"accuracy"}
    for text in (page.read_text(), mine.read_text()):
        assert "Retrained with some clients only" in text
        assert "each model was judged by accuracy" in " ".join(text.split())
    # More of the same game: what is known is not trained again.
    assert main([*command[:-1], "both", "--quiet"]) == 0
    assert kept.read_bytes().startswith(b"".join(lines))
    assert sum(float(row["share"]) for row in rows(run / "retrained.csv")) == pytest.approx(1)
    for file in run.glob("retrained*"):
        file.unlink()


def test_all_coalitions_of_one_seed_have_no_interval(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["retrain", str(run), "--rounds", "1", "--trainings", "all", "--seeds", "1"]) == 0
    assert "nothing tells the error of their values: use --seeds 3" in " ".join(capsys.readouterr().out.split())
    found = rows(run / "retrained.csv")
    assert {row["low"] for row in found} == {row["high"] for row in found} == {""}
    assert [float(row["kernel_shap"]) for row in found] == pytest.approx([float(row["value"]) for row in found])
    assert main(["report", str(run), "--out", str(run / "all.html")]) == 0
    for file in run.glob("retrained*"):
        file.unlink()


def test_where_one_class_has_most_of_the_accuracy_it_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [f"{'AB'[i % 2]},{i % 7},{i % 3},{'ny'[i % 5 == 0]}" for i in range(100)]
    (tmp_path / "clinics.csv").write_text("\n".join(["clinic,age,dose,ill", *rows, ""]))
    data = {"source": str(tmp_path / "clinics.csv"), "labels": "ill", "groups": "clinic"}
    (tmp_path / "federation.yaml").write_text(yaml.safe_dump({**TABLE, "data": data}))
    assert main(["fit", "--config", str(tmp_path / "federation.yaml"), f"--trainer.default_root_dir={tmp_path}"]) == 0
    run = next(tmp_path.glob("lightning_logs/*"))
    for metric, said in (("accuracy", True), ("negative_loss", False)):
        capsys.readouterr()
        assert main(["retrain", str(run), "--trainings", "singles", "--metric", metric]) == 0
        assert ("of the validation set is of one class" in " ".join(capsys.readouterr().out.split())) is said
        assert main(["report", str(run), "--out", str(run / "all.html")]) == 0
        assert ("of the validation set is of one class" in (run / "all.html").read_text()) is said


def test_it_inherits_the_runs_performance() -> None:
    def of(**metrics: Any) -> tuple[str, str | None]:
        return performance_by(FederatedLoop(metrics=metrics, reporting=Reporting(table=False)))

    loss = CumulativeShapley(performance="negative_loss")
    assert of(cssv=ClassSpecificShapley()) == ("accuracy", None)
    assert of(cssv=ClassSpecificShapley(), sv=loss) == ("negative_loss", None)
    assert of(sv=CumulativeShapley(performance="val_loss", mode="min")) == ("val_loss", "min")
    assert of(sv=PartialFederatedShapley(num_classes=3, per_class=True)) == ("balanced_accuracy", None)
    assert of(sv=GradientShapley(), own=GradientAgreement()) == ("negative_loss", None)
    with pytest.raises(ConfigurationError, match="value by negative_loss, accuracy: say which one by --metric"):
        of(sv=loss, loo=LeaveOneOut())


def test_other_data_than_the_runs_are_refused_by_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The inputs of one clinic change under equal labels, then there is a clinic that took no part, then none."""
    rows = [["clinic", "age", "dose", "ill"]]
    rows += [
        [name, str(30 + i * 7 % 23), str(i % 5 + k), "ny"[i % 3 == 0]]
        for k, name in enumerate("ABC")
        for i in range(30)
    ]
    file = tmp_path / "clinics.csv"

    def write(rows: list[list[str]]) -> None:
        file.write_text("".join(",".join(row) + "\n" for row in rows))

    write(rows)
    data = {"source": str(file), "labels": "ill", "groups": "clinic"}
    (tmp_path / "federation.yaml").write_text(yaml.safe_dump({**TABLE, "data": data}))
    command = ["fit", "--config", str(tmp_path / "federation.yaml"), f"--trainer.default_root_dir={tmp_path}"]
    assert main(command) == 0
    run = next(tmp_path.glob("lightning_logs/*"))
    again = ["retrain", str(run), "--trainings", "singles", "-q"]
    assert main(again) == 0
    before = (run / "retrained.csv").read_bytes()
    swapped = [[*row[:2], "9", row[3]] if row[0] == "B" else row for row in rows]
    for changed, said in (
        (swapped, "other samples or labels for clients"),
        ([*rows, ["D", "40", "2", "y"], ["D", "41", "2", "n"]], "its clients are A, B, C, and these are A, B, C, D"),
        ([row for row in rows if row[0] != "C"], "its clients are A, B, C, and these are A, B"),
    ):
        write(changed)
        capsys.readouterr()
        assert main(again) == 2
        error = capsys.readouterr().err
        assert f"the data are not those of {run}" in error
        assert said in error
        assert (run / "retrained.csv").read_bytes() == before
    # The same data in another folder are the same, and none of the trainings is done again.
    write(rows)
    kept = (run / "retrained_accuracy.csv").read_bytes()
    (tmp_path / "moved").mkdir()
    moved = file.rename(tmp_path / "moved" / file.name)
    assert main([*again, f"--data.source={moved}"]) == 0
    assert (run / "retrained_accuracy.csv").read_bytes() == kept


def test_what_is_no_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["retrain", str(tmp_path)]) == 2
    assert "holds no config.yaml: name the folder of a run of flsv fit" in capsys.readouterr().err
    (tmp_path / "config.yaml").write_text("seed_everything: 0\n")
    with pytest.raises(ConfigurationError, match="seeds=0.: expected a whole number of at least 1"):
        retrain(tmp_path, seeds=0)
    with pytest.raises(ConfigurationError, match="say balanced_accuracy, their mean"):
        retrain(tmp_path, metric="per_class_accuracy")
    with pytest.raises(ConfigurationError, match="mode='min': say by metric, too"):
        retrain(tmp_path, mode="min")


@pytest.mark.parametrize(
    ("arguments", "trainings", "seeds", "coalitions"),
    [
        ([], "all", "3 4 5", 8),
        (["--seeds", "1"], "all", "3", 8),
        (["--federation.optimizer_state=persist"], "all", "3", 8),
        (["--trainings", "pairs"], "all", "3 4 5", 8),
        (["--trainings", "singles"], "singles", "3", 5),
    ],
)
def test_what_is_trained_unless_something_else_is_asked_for(
    run: Path, arguments: list[str], trainings: str, seeds: str, coalitions: int, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["retrain", str(run), "--rounds", "1", *arguments]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    kept = (run / "retrained_accuracy.csv").read_bytes().splitlines()
    found = rows(run / "retrained.csv")
    for file in run.glob("retrained*"):
        file.unlink()
    assert {(row["trainings"], row["seeds"], row["rounds"]) for row in found} == {(trainings, seeds, "1")}
    assert len(kept) == 2 + coalitions * len(seeds.split())
    assert "1 of 2 rounds" in printed
    one_by_one = "optimizer_state" in "".join(arguments)
    assert ("7 trainings follow, one after the other: with optimizer_state" in printed) is one_by_one
    changed = "federation.optimizer_state 'persist' instead of 'reset'" if one_by_one else ""
    assert {row["changed"] for row in found} == {changed}
    assert changed in printed


def test_values_that_only_rank_share_out_nothing(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["retrain", str(run), "--rounds", "1", "--trainings", "singles"]) == 0
    assert "These trainings rank clients only" in " ".join(capsys.readouterr().out.split())
    page = run / "shares.html"
    assert main(["report", str(run), "--out", str(page), "--budget", "100"]) == 2
    assert "each client alone, which ranks clients" in " ".join(capsys.readouterr().err.split())
    assert not page.exists()
    assert main(["report", str(run), "--out", str(page), "--budget", "100", "--by", "cssv"]) == 0
    assert "flsv retrain: each client alone, seed 3, 1 of 2 rounds" in " ".join(page.read_text().split())
    assert main(["retrain", str(run), "--rounds", "1", "--federation.local_epochs", "2", "--seeds", "2"]) == 2
    for file in run.glob("retrained*"):
        file.unlink()
    assert main(["retrain", str(run), "--rounds", "1", "--federation.local_epochs", "2", "--seeds", "2"]) == 0
    assert main(["report", str(run), "--out", str(page), "--budget", "100"]) == 0
    said = "all coalitions, seeds 3 and 4, 1 of 2 rounds, federation.local_epochs 2 instead of 1"
    assert " ".join(page.read_text().split()).count(said) >= 2
    for file in run.glob("retrained*"):
        file.unlink()
