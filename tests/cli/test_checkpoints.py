"""A run's checkpoints: ``--ckpt_path last`` and ``best`` as a user types them, and what is written with them."""

import os
import random
import re
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
import yaml
from lightning.pytorch.loggers import TensorBoardLogger

from flsv.cli import main
from flsv.cli.checkpoints import default_checkpoints, find_checkpoint
from flsv.data import FederatedDataModule, IIDPartitioner
from flsv.federation import FederatedLoop
from flsv.utilities.errors import ConfigurationError
from helpers.fits import fit, trainer_for
from helpers.models import Plain
from helpers.runs import QUIET, rows, written


def run(command: str, folder: Path, *arguments: str) -> int:
    config = str(written(folder.parent / "federation.yaml"))
    return main(
        [command, "--config", config, f"--trainer.default_root_dir={folder}", *QUIET, *arguments]
    )


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("trained") / "runs"
    assert run("fit", folder, "--trainer.max_epochs=3") == 0
    assert sorted(path.name for path in folder.rglob("*.ckpt")) == ["best.ckpt", "last.ckpt"]
    return folder


@pytest.mark.parametrize("command", ["validate", "test", "predict"])
def test_evaluating_a_checkpoint_creates_no_new_run_folder(trained, command, capfd):
    before = {path for path in trained.rglob("*") if path.is_dir()}
    last, best = (next(trained.rglob(f"{word}.ckpt")) for word in ("last", "best"))
    assert run(command, trained, "--ckpt_path", str(last), "--quiet") == 0
    assert capfd.readouterr().out == ""
    assert run(command, trained, "--ckpt_path", "best") == 0
    shown = capfd.readouterr()
    assert f"Weights from {best}" in shown.out
    assert "dirpath has changed" not in shown.err + shown.out
    assert {path for path in trained.rglob("*") if path.is_dir()} == before
    if command != "predict":
        (accuracy,) = re.findall(r"(?:val|test)_accuracy\W+([\d.]+)", shown.out)
        assert float(accuracy) > 0.4  # 0.1 untrained
        return
    assert "predictions.csv (360 samples)" in shown.out.replace("'", "")
    found = rows(trained / "lightning_logs/version_0/predictions.csv")
    assert [int(row["index"]) for row in found] == list(range(360))
    chances = torch.tensor([[float(row[str(j)]) for j in range(10)] for row in found])
    assert chances.sum(1).allclose(torch.ones(360), atol=1e-4)
    assert [int(row["prediction"]) for row in found] == chances.argmax(1).tolist()
    # Against the test set itself: as good as Lightning says.
    data = FederatedDataModule("digits", IIDPartitioner(2))
    data.setup("test")
    y = torch.cat([labels for _, labels in data.test_dataloader()]).tolist()
    right = sum(int(row["prediction"]) == label for row, label in zip(found, y)) / 360
    assert run("test", trained, "--ckpt_path", "best") == 0
    (accuracy,) = re.findall(r"test_accuracy\W+([\d.]+)", capfd.readouterr().out)
    assert float(accuracy) == pytest.approx(right, abs=1e-6)


def test_ckpt_path_last_is_the_newest_file_of_the_runs_folder(tmp_path):
    for age, name in enumerate(
        ("repeat/seed_1/version_1/last", "version_0/last", "version_1/best", "version_9/last")
    ):
        path = tmp_path / "lightning_logs" / name.replace("/last", "/checkpoints/last.ckpt")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
        os.utime(path, (2e9 - age, 2e9 - age))
    trainer = L.Trainer(
        default_root_dir=tmp_path, accelerator="cpu", logger=TensorBoardLogger(tmp_path)
    )
    assert (
        find_checkpoint("last", trainer)
        == tmp_path / "lightning_logs/version_0/checkpoints/last.ckpt"
    )


@pytest.mark.parametrize(
    ("path", "said"),
    [
        ("last", "no checkpoint below {}/runs"),
        ("{}/none.ckpt", "there is no checkpoint {}/none.ckpt"),
        ("{}/half.ckpt", "{}/half.ckpt cannot be read as a checkpoint"),
    ],
)
def test_ckpt_path_without_a_checkpoint_is_a_one_line_error(tmp_path, path, said, capsys):
    (tmp_path / "half.ckpt").write_bytes(b"PK\x03\x04half")
    assert run("fit", tmp_path / "runs", "--ckpt_path", path.format(tmp_path)) == 2
    error = capsys.readouterr().err
    assert re.search(rf"^flsv: error: .*{said.format(tmp_path)}", error, flags=re.MULTILINE)
    assert "Traceback" not in error
    assert not list((tmp_path / "runs").rglob("*.csv"))


class Rated(Plain):
    """Logs what it is told to, round by round."""

    def __init__(self, name: str | None, values: list[float]) -> None:
        super().__init__()
        self.name, self.values = name, values

    def on_validation_epoch_end(self) -> None:
        if self.name is not None:
            self.log(self.name, self.values[self.current_epoch])


@pytest.mark.parametrize(
    ("name", "values", "best"),
    [("val_accuracy", [0.1, 0.8, 0.5], 1), ("val_loss", [0.3, 0.9, 0.5], 0), (None, [], None)],
)
def test_best_checkpoint_is_chosen_by_val_accuracy_or_else_by_val_loss(
    tmp_path, name, values, best
):
    saving: dict[str, Any] = {"enable_checkpointing": True, "callbacks": default_checkpoints([])}
    fit(FederatedLoop(seed=0), tmp_path, Rated(name, values), **saving)
    trainer = trainer_for(None, tmp_path)
    assert torch.load(find_checkpoint("last", trainer), weights_only=True)["epoch"] == 2
    if best is None:
        with pytest.raises(
            ConfigurationError, match="has no best checkpoint, which needs val_accuracy or val_loss"
        ):
            find_checkpoint("best", trainer)
    else:
        assert torch.load(find_checkpoint("best", trainer), weights_only=True)["epoch"] == best


@pytest.mark.filterwarnings("ignore:The dirpath has changed")
def test_best_checkpoint_before_a_resume_stays_the_best(tmp_path):
    for rounds, place, path in (
        (3, "first", None),
        (4, "second", tmp_path / "first/checkpoints/last.ckpt"),
    ):
        saving: dict[str, Any] = {
            "enable_checkpointing": True,
            "callbacks": default_checkpoints([]),
        }
        module = Rated("val_accuracy", [0.1, 0.8, 0.5, 0.6])
        fit(
            FederatedLoop(seed=0), tmp_path / place, module, rounds=rounds, ckpt_path=path, **saving
        )
    found = find_checkpoint("best", trainer_for(None, tmp_path / "second"))
    assert found == tmp_path / "first/checkpoints/best.ckpt"
    last = torch.load(tmp_path / "second/checkpoints/last.ckpt", weights_only=True)
    assert last["callbacks"]["BestCheckpoint"]["current_score"] == pytest.approx(0.8)


@pytest.mark.parametrize(("wrapped", "preload"), [(False, True), (True, False)])
def test_predictions_csv_names_line_client_and_patient_of_each_row(wrapped, preload, tmp_path):
    draws = random.Random(0)

    def lines(first: int, count: int) -> list[str]:
        made = [(draws.gauss(0, 1), draws.choice("AB")) for _ in range(count)]
        return [
            "patient,age,ill,ward",
            *(f"P{first + i},{x:.2f},{int(x > 0)},{w}" for i, (x, w) in enumerate(made)),
        ]

    (tmp_path / "train.csv").write_text("\n".join(lines(0, 60)))
    held = lines(100, 12)
    held[3] = "P102,0.5,,A"  # nothing to predict: the row is left out
    (tmp_path / "test.csv").write_text("\n".join(held))
    config: dict[str, object] = {
        "labels": "ill",
        "groups": "ward",
        "columns": {"exclude": ["patient"]},
    }
    config |= {"source": str(tmp_path / "train.csv"), "test": str(tmp_path / "test.csv")}
    if wrapped:
        given = {
            "path": "train.csv",
            "test_path": "test.csv",
            "target": "ill",
            "group": "ward",
            "root": str(tmp_path),
        }
        source = {
            "class_path": "flsv.data.TableData",
            "init_args": {**given, "columns": {"exclude": ["patient"]}},
        }
        config = {"source": source, "partitioner": "flsv.data.GroupPartitioner"}
    config["loader"] = {"preload": preload}
    file = tmp_path / "run.yaml"
    trainer = {"accelerator": "cpu", "default_root_dir": str(tmp_path / "runs"), "logger": False}
    file.write_text(yaml.safe_dump({"data": config, "trainer": trainer}))
    assert main(["predict", "--config", str(file), "-q"]) == 0
    found = rows(next(tmp_path.rglob("predictions.csv")))
    kept = [
        [str(place), *line.split(",")]
        for place, line in enumerate(held[1:], 2)
        if line.split(",")[2]
    ]
    expected = [(line, patient, ward) for line, patient, _, _, ward in kept]
    assert [(row["line"], row["patient"], row["client"]) for row in found] == expected
    assert list(found[0])[:5] == ["index", "line", "client", "patient", "prediction"]
