"""A run's checkpoints: ``--ckpt_path last`` and ``best`` as a user types them, and what is written with them."""

import os
import random
import re

import lightning as L
import numpy as np
import pandas as pd
import pytest
import torch
import yaml
from lightning.pytorch.loggers import TensorBoardLogger

from flsv.cli import main
from flsv.cli.checkpoints import default_checkpoints, find_checkpoint
from flsv.data import FederatedDataModule, IIDPartitioner
from flsv.federation import FederatedLoop
from helpers import refused
from helpers.fits import fit, plain_trainer
from helpers.models import LogsByRound
from helpers.runs import QUIET, read_rows, write_config


def run_command(command, folder, *arguments):
    config = str(write_config(folder.parent / "federation.yaml"))
    return main(
        [command, "--config", config, f"--trainer.default_root_dir={folder}", *QUIET, *arguments]
    )


@pytest.fixture(scope="module")
def trained_run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("trained") / "runs"
    assert run_command("fit", folder, "--trainer.max_epochs=3") == 0
    assert sorted(path.name for path in folder.rglob("*.ckpt")) == ["best.ckpt", "last.ckpt"]
    return folder


def test_validating_the_best_checkpoint_prints_its_path_and_the_accuracy(trained_run, capfd):
    (best_checkpoint,) = trained_run.rglob("best.ckpt")

    assert run_command("validate", trained_run, "--ckpt_path", "best") == 0

    output = capfd.readouterr()
    assert f"Weights from {best_checkpoint}" in output.out
    assert "dirpath has changed" not in output.err + output.out
    assert printed_accuracy(output.out) > 0.4  # 0.1 untrained


def printed_accuracy(output):
    (accuracy,) = re.findall(r"(?:val|test)_accuracy\W+([\d.]+)", output)
    return float(accuracy)


@pytest.mark.slow
def test_predictions_are_as_good_as_the_accuracy_that_lightning_prints(trained_run, capfd):
    assert run_command("predict", trained_run, "--ckpt_path", "best") == 0
    assert "predictions.csv (360 samples)" in capfd.readouterr().out.replace("'", "")
    assert run_command("test", trained_run, "--ckpt_path", "best") == 0
    accuracy = printed_accuracy(capfd.readouterr().out)

    table = pd.read_csv(trained_run / "lightning_logs/version_0/predictions.csv")
    class_names = [str(label) for label in range(10)]
    chances = table[class_names].to_numpy()
    assert table["index"].tolist() == list(range(360))
    np.testing.assert_allclose(chances.sum(axis=1), 1, atol=1e-4)
    assert table["prediction"].tolist() == chances.argmax(1).tolist()

    data = FederatedDataModule("digits", IIDPartitioner(2))
    data.setup("test")
    labels = torch.cat([y for _, y in data.test_dataloader()]).numpy()
    is_right = table["prediction"] == labels
    assert accuracy == pytest.approx(is_right.mean(), abs=1e-6)


def test_ckpt_path_last_is_the_newest_file_of_the_runs_folder(tmp_path):
    runs = tmp_path / "lightning_logs"
    # The first is not of a fit, and the third no last one.
    newest_first = [
        runs / "repeat/seed_1/version_1/checkpoints/last.ckpt",
        runs / "version_0/checkpoints/last.ckpt",
        runs / "version_1/best",
        runs / "version_9/checkpoints/last.ckpt",
    ]
    for age, path in enumerate(newest_first):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
        modified = 2e9 - age
        os.utime(path, (modified, modified))
    trainer = L.Trainer(
        default_root_dir=tmp_path, accelerator="cpu", logger=TensorBoardLogger(tmp_path)
    )

    assert find_checkpoint("last", trainer) == runs / "version_0/checkpoints/last.ckpt"


@pytest.mark.fast_rows
@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("last", "no checkpoint below {}/runs"),
        ("{}/half.ckpt", "{}/half.ckpt cannot be read as a checkpoint"),
    ],
)
def test_ckpt_path_without_a_checkpoint_is_a_one_line_error(tmp_path, path, message, capsys):

    (tmp_path / "half.ckpt").write_bytes(b"PK\x03\x04half")
    status = run_command("fit", tmp_path / "runs", "--ckpt_path", path.format(tmp_path))

    assert status == 2

    error = capsys.readouterr().err
    expected = message.format(tmp_path)

    assert re.search(rf"^flsv: error: .*{expected}", error, flags=re.MULTILINE)
    assert "Traceback" not in error
    assert not list((tmp_path / "runs").rglob("*.csv"))


def fit_with_default_checkpoints(folder, module):
    fit(
        FederatedLoop(seed=0),
        folder,
        module,
        enable_checkpointing=True,
        callbacks=default_checkpoints([]),
    )
    trainer = plain_trainer(folder)
    last_checkpoint = torch.load(find_checkpoint("last", trainer), weights_only=True)
    assert last_checkpoint["epoch"] == 2
    return trainer


@pytest.mark.fast_rows
@pytest.mark.parametrize(
    ("name", "values", "best"),
    [
        ("val_accuracy", [0.1, 0.8, 0.5], 1),
        ("val_loss", [0.3, 0.9, 0.5], 0),
    ],
)
def test_best_checkpoint_is_chosen_by_val_accuracy_or_else_by_val_loss(
    tmp_path, name, values, best
):
    trainer = fit_with_default_checkpoints(tmp_path, LogsByRound(name, values))

    best_checkpoint = torch.load(find_checkpoint("best", trainer), weights_only=True)
    assert best_checkpoint["epoch"] == best


def test_run_that_logs_neither_accuracy_nor_loss_has_no_best_checkpoint(tmp_path):
    trainer = fit_with_default_checkpoints(tmp_path, LogsByRound(None, []))

    with refused("no .*best.ckpt, which a fit saves"):
        find_checkpoint("best", trainer)


@pytest.mark.fast_rows
@pytest.mark.parametrize("preload", [True, False])
def test_predictions_csv_names_line_client_and_patient_of_each_row(preload, tmp_path):
    draws = random.Random(0)

    def lines(first_patient, count):
        rows = ["patient,age,ill,ward"]
        values = [(draws.gauss(0, 1), draws.choice("AB")) for _ in range(count)]
        for patient, (age, ward) in enumerate(values, first_patient):
            rows.append(f"P{patient},{age:.2f},{int(age > 0)},{ward}")
        return rows

    (tmp_path / "train.csv").write_text("\n".join(lines(0, 60)))
    test_lines = lines(100, 12)
    test_lines[3] = "P102,0.5,,A"  # nothing to predict: the row is left out
    (tmp_path / "test.csv").write_text("\n".join(test_lines))
    data = {
        "labels": "ill",
        "groups": "ward",
        "dictionary": {"excluded": ["patient"]},
        "source": str(tmp_path / "train.csv"),
        "test": str(tmp_path / "test.csv"),
        "loader": {"preload": preload},
    }
    trainer = {"accelerator": "cpu", "default_root_dir": str(tmp_path / "runs"), "logger": False}
    file = tmp_path / "run.yaml"
    file.write_text(yaml.safe_dump({"data": data, "trainer": trainer}))

    assert main(["predict", "--config", str(file), "-q"]) == 0

    predictions = read_rows(next(tmp_path.rglob("predictions.csv")))
    expected = []
    for number, line in enumerate(test_lines[1:], 2):
        patient, _, label, ward = line.split(",")
        if label:
            expected.append((str(number), patient, ward))

    assert [(row["line"], row["patient"], row["client"]) for row in predictions] == expected
    assert list(predictions[0])[:5] == ["index", "line", "client", "patient", "prediction"]
