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
from helpers.runs import QUIET, write_config


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


@pytest.mark.slow
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


def labels_of_digits_test():
    data = FederatedDataModule("digits", IIDPartitioner(2))
    data.setup("test")
    return torch.cat([labels for _inputs, labels in data.test_dataloader()]).numpy()


@pytest.mark.slow
def test_predictions_are_as_good_as_the_accuracy_that_lightning_prints(trained_run, capfd):
    assert run_command("predict", trained_run, "--ckpt_path", "best") == 0
    assert "predictions.csv (360 samples)" in capfd.readouterr().out.replace("'", "")
    assert run_command("test", trained_run, "--ckpt_path", "best") == 0
    accuracy = printed_accuracy(capfd.readouterr().out)

    table = pd.read_csv(trained_run / "lightning_logs/version_0/predictions.csv")
    class_names = [str(label) for label in range(10)]
    probabilities = table[class_names].to_numpy()
    assert table["index"].tolist() == list(range(360))
    np.testing.assert_allclose(probabilities.sum(axis=1), 1, atol=1e-4)
    assert table["prediction"].tolist() == probabilities.argmax(1).tolist()
    is_right = table["prediction"] == labels_of_digits_test()
    assert accuracy == pytest.approx(is_right.mean(), abs=1e-6)


def touch_at(path, timestamp):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.touch()
    os.utime(path, (timestamp, timestamp))


def test_ckpt_path_last_is_the_newest_last_checkpoint_of_a_fit(tmp_path):
    runs = tmp_path / "lightning_logs"
    newest_of_fit = runs / "version_0/checkpoints/last.ckpt"
    touch_at(runs / "repeat/seed_1/version_1/checkpoints/last.ckpt", 2e9 + 2)
    touch_at(runs / "version_1/best", 2e9 + 1)
    touch_at(newest_of_fit, 2e9)
    touch_at(runs / "version_9/checkpoints/last.ckpt", 2e9 - 1)
    trainer = L.Trainer(
        default_root_dir=tmp_path, accelerator="cpu", logger=TensorBoardLogger(tmp_path)
    )

    assert find_checkpoint("last", trainer) == newest_of_fit


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

    assert run_command("fit", tmp_path / "runs", "--ckpt_path", path.format(tmp_path)) == 2

    error = capsys.readouterr().err
    expected_message = message.format(tmp_path)
    assert re.search(rf"^flsv: error: .*{expected_message}", error, flags=re.MULTILINE)
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
    ("name", "values", "best_round"),
    [
        ("val_accuracy", [0.1, 0.8, 0.5], 1),
        ("val_loss", [0.3, 0.9, 0.5], 0),
    ],
)
def test_best_checkpoint_is_chosen_by_val_accuracy_or_else_by_val_loss(
    tmp_path, name, values, best_round
):
    trainer = fit_with_default_checkpoints(tmp_path, LogsByRound(name, values))

    best_checkpoint = torch.load(find_checkpoint("best", trainer), weights_only=True)
    assert best_checkpoint["epoch"] == best_round


def test_run_that_logs_neither_accuracy_nor_loss_has_no_best_checkpoint(tmp_path):
    trainer = fit_with_default_checkpoints(tmp_path, LogsByRound(None, []))

    with refused("no .*best.ckpt, which a fit saves"):
        find_checkpoint("best", trainer)


COLUMNS_OF_WARDS = "patient,age,ill,ward\n"
#: P102 has no label.
TEST_ROWS = "P100,-0.5,0,A\nP101,0.7,1,B\nP102,0.5,,A\nP103,1.5,1,B\n"


def write_training_table(path):
    draws = random.Random(0)
    rows = []
    for patient in range(60):
        age = draws.gauss(0, 1)
        ward = draws.choice("AB")
        rows.append(f"P{patient},{age:.2f},{int(age > 0)},{ward}\n")
    path.write_text(COLUMNS_OF_WARDS + "".join(rows))


@pytest.mark.fast_rows
@pytest.mark.parametrize("preload", [True, False])
def test_predictions_csv_names_line_client_and_patient_of_each_labelled_row(preload, tmp_path):
    write_training_table(tmp_path / "train.csv")
    (tmp_path / "test.csv").write_text(COLUMNS_OF_WARDS + TEST_ROWS)
    data = {
        "labels": "ill",
        "groups": "ward",
        "dictionary": {"excluded": ["patient"]},
        "source": str(tmp_path / "train.csv"),
        "test": str(tmp_path / "test.csv"),
        "loader": {"preload": preload},
    }
    trainer = {"accelerator": "cpu", "default_root_dir": str(tmp_path / "runs"), "logger": False}
    config = tmp_path / "run.yaml"
    config.write_text(yaml.safe_dump({"data": data, "trainer": trainer}))

    assert main(["predict", "--config", str(config), "-q"]) == 0

    table = pd.read_csv(next(tmp_path.rglob("predictions.csv")))
    assert list(table)[:5] == ["index", "line", "client", "patient", "prediction"]
    assert table["line"].tolist() == [2, 3, 5]
    assert table["client"].tolist() == ["A", "B", "B"]
    assert table["patient"].tolist() == ["P100", "P101", "P103"]
