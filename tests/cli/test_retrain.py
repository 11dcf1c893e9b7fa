"""``flsv retrain``: a run's coalitions, trained after the fact."""

import os
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import numpy
import pytest
import torch
import yaml

from flsv import ClassifierClient, FederatedDataModule, FederatedLoop, Reporting
from flsv.aggregation import ShapFedWA
from flsv.cli import main
from flsv.cli.retrain import retrain
from flsv.data import SizePartitioner, Splits
from flsv.functional import exact_shapley
from flsv.metrics import (
    ClassSpecificShapley,
)
from flsv.retraining.copied_fits import CopiedFits
from flsv.scores.performance import CLASSIFICATION
from flsv.utilities.errors import ConfigurationError
from helpers.coalitions_by_hand import GameByFits
from helpers.fits import trainer_for
from helpers.pages import text_of_page
from helpers.runs import fit_by_command, read_output, read_rows, write_config

SEED = 3
ROUNDS = 2


@pytest.fixture(scope="module")
def trained_run(tmp_path_factory):
    """A run of two rounds on the data that write_config names."""
    folder = tmp_path_factory.mktemp("retrained")
    federation = {
        "aggregator": {
            "class_path": "ShapFedWA",
            "init_args": {"metric": "cssv"},
        },
        "metrics": {"cssv": "ClassSpecificShapley"},
        "reporting": {"table": False, "figures": 0},
    }
    trainer = {
        "max_epochs": ROUNDS,
        "accelerator": "cpu",
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    config = write_config(
        folder / "federation.yaml",
        seed_everything=SEED,
        trainer=trainer,
        federation=federation,
    )

    return fit_by_command(folder, config)


@pytest.fixture
def copied_run(trained_run):
    yield trained_run
    for file in trained_run.glob("retrained*"):
        shutil.rmtree(file) if file.is_dir() else file.unlink()


def test_all_coalitions_give_the_exact_values_of_the_game_by_hand(copied_run):
    table, path = retrain(copied_run, "all", metric="negative_loss", seeds=1)
    # By hand, the configuration of the run.
    data = FederatedDataModule(
        "digits",
        SizePartitioner([1, 2, 4], seed=0),
        batch_size=64,
        splits=Splits(server_val=0.2, seed=0),
    )

    def make_trainer(cohort: Any) -> L.Trainer:
        loop = FederatedLoop(
            ShapFedWA("cssv"),
            {"cssv": ClassSpecificShapley()},
            sampler=cohort,
            seed=SEED,
            reporting=Reporting(table=False, figures=0, files=False),
        )
        return trainer_for(loop, copied_run, ROUNDS, limit_val_batches=0)

    L.seed_everything(SEED, verbose=False)
    sgd = partial(torch.optim.SGD, lr=0.1)
    module = ClassifierClient("softmax", num_classes=10, input_shape=(1, 8, 8), optimizer=sgd)
    game = GameByFits(make_trainer, module, data)

    expected = exact_shapley(game, 3).values
    torch.testing.assert_close(torch.tensor(table["value"]), expected, rtol=0, atol=1e-7)

    stored = read_rows(path)
    assert [row["client"] for row in stored] == ["0", "1", "2"]
    assert float(stored[2]["value"]) == table["value"][2]


def test_retrain_trains_each_coalition_once_and_without_validations(
    copied_run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    all_orders: list[Any] = []
    train = CopiedFits.train

    def record(fits: CopiedFits, orders: Any) -> Any:
        all_orders.extend(orders)
        return train(fits, orders)

    monkeypatch.setattr(CopiedFits, "train", record)

    retrain(copied_run, "singles", metric="negative_loss", seeds=1)

    # That of all clients comes to the run's own model, which shows that none needs validations.
    trained = [order.members for order in all_orders]
    all_clients = (0, 1, 2)
    assert trained == [all_clients, (0,), (1,), (2,)]
    assert not any(order.is_whole for order in all_orders)


def test_retrain_without_a_client_saves_the_module_of_a_run_of_the_others(
    copied_run, tmp_path, capsys
):
    assert main(["retrain", str(copied_run), "--without", "1"]) == 0

    output = read_output(capsys)
    assert "without_1.ckpt" in output
    assert "without 1: accuracy 0." in output

    config = yaml.safe_load((copied_run / "config.yaml").read_text())
    config["federation"]["sampler"] = {
        "class_path": "FixedCohort",
        "init_args": {"clients": [0, 2]},
    }
    (tmp_path / "others.yaml").write_text(yaml.safe_dump(config))
    run_of_others = fit_by_command(tmp_path, tmp_path / "others.yaml")
    checkpoint = run_of_others / "checkpoints" / "last.ckpt"
    expected = torch.load(checkpoint, weights_only=False)["state_dict"]
    state = ClassifierClient.load_from_checkpoint(copied_run / "without_1.ckpt").state_dict()

    assert state.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(state[name], value)
    assert not (copied_run / "retrained.csv").exists()


@pytest.mark.parametrize("names", ["Lyon", "0 1 2"])
def test_retrain_without_nobody_that_there_is_or_without_all_is_refused(copied_run, capsys, names):
    assert main(["retrain", str(copied_run), "--without", *names.split()]) == 2

    message = f"--without {names}: expected some of 0, 1, 2, not all"
    assert message in capsys.readouterr().err


def test_retrain_refuses_scores_that_give_no_single_value(
    tmp_path,
):
    with pytest.raises(ConfigurationError, match="use balanced_accuracy"):
        retrain(tmp_path, metric="per_class_accuracy")


def test_retrain_trains_all_coalitions_with_three_seeds_and_none_again(copied_run, capsys):
    """By another score and without one of the seeds, too: these shares stand beside the first."""
    assert main(["retrain", str(copied_run), "--rounds", "1"]) == 0

    message = read_output(capsys)
    outcome = read_rows(copied_run / "retrained.csv")

    seeds = [SEED, SEED + 1, SEED + 2]
    for row in outcome:
        assert row["trainings"] == "all"  # of three clients each alone and all but one are all
        assert row["seeds"] == " ".join(map(str, seeds))
        assert row["rounds"] == "1"
        assert row["share by accuracy"] == row["share"]
    stored_text = (copied_run / "retrained_scores.csv").read_text()
    settings, header, *scores = stored_text.splitlines()
    assert len(scores) == 2**3 * len(seeds)
    values = {row["value"] for row in outcome}
    assert len(values) == 3  # each coalition was trained by its own clients
    assert f"1 of {ROUNDS} rounds" in message
    shares_by_score = [name for name in outcome[0] if name.startswith("share ")]
    assert shares_by_score == [f"share by {score}" for score in CLASSIFICATION]

    page_path = copied_run / "all.html"
    assert main(["report", str(copied_run), "--out", str(page_path), "--budget", "100"]) == 0

    page = text_of_page(page_path)
    assert "Brackets are for other cases, other seeds." in page

    for kind in ("seeds", "cases"):
        cells = [row[f"covariance of {kind}"].lstrip("'") for row in outcome]
        covariance = numpy.array([cell.split() for cell in cells], float)
        assert covariance == pytest.approx(covariance.T)
        assert numpy.linalg.eigvalsh(covariance).min() > -1e-9
        assert covariance.diagonal().min() > 0

    for basis in ("by balanced accuracy", "by loss"):
        assert f" % {basis}" in page

    whole, _ = retrain(copied_run, rounds=1)
    by_loss, _ = retrain(copied_run, metric="negative_loss", rounds=1)

    assert by_loss["share"].tolist() == whole["share by negative_loss"].tolist()

    two_seeds, _ = retrain(copied_run, rounds=1, seeds=2)
    assert two_seeds["share"].tolist() != whole["share"].tolist()
    assert (copied_run / "retrained_scores.csv").read_text() == stored_text


def test_retrain_tells_the_trainings_seeds_and_settings_that_were_asked_for(copied_run, capsys):
    command = [
        "retrain",
        str(copied_run),
        "--rounds",
        "1",
        "--trainings",
        "singles",
        "--seeds",
        "2",
    ]
    changed = "federation.optimizer_state 'persist' instead of 'reset'"

    assert main([*command, "--federation.optimizer_state=persist"]) == 0

    seeds = [SEED, SEED + 1]
    for row in read_rows(copied_run / "retrained.csv"):
        assert row["trainings"] == "singles"
        assert row["seeds"] == " ".join(map(str, seeds))
        assert row["changed"] == changed
    settings, header, *scores = (copied_run / "retrained_scores.csv").read_text().splitlines()
    assert settings.startswith("#")
    assert header.startswith("seed,")
    num_coalitions = 2 + 3  # of no client, of all, of each alone
    assert len(scores) == num_coalitions * len(seeds)
    assert changed in read_output(capsys)


def test_retrain_of_single_clients_says_so_and_its_trainings_are_reused(
    copied_run, monkeypatch, capsys
):
    monkeypatch.setenv("COLUMNS", "80")
    command = [
        "retrain",
        str(copied_run),
        "--rounds",
        "1",
        "--seeds",
        "1",
        "--trainings",
    ]

    assert main([*command, "singles"]) == 0
    output, _, _path = capsys.readouterr().out.partition("Retrained: ")
    text = output[output.index("accuracy, by retraining") :]
    assert "Only each partner alone and all together were trained." in " ".join(text.split())
    assert max(map(len, text.splitlines())) <= 80
    assert "\n%" not in text

    page = copied_run / "shares.html"
    assert (
        main(
            [
                "report",
                str(copied_run),
                "--out",
                str(page),
                "--budget",
                "100",
            ]
        )
        == 0
    )
    assert "Only each partner alone and all together were trained." in text_of_page(page)
    assert {row["source"] for row in read_rows(copied_run / "retrained.csv")} == {"outputs"}
    assert sum(float(row["amount"]) for row in read_rows(copied_run / "shares_shares.csv")) == 100
    assert (
        main(
            [
                "report",
                str(copied_run),
                "--out",
                str(page),
                "--budget",
                "100",
                "--by",
                "cssv",
            ]
        )
        == 0
    )
    assert "| partner | cssv | retrained |" in text_of_page(page)
    assert "amount" not in read_rows(copied_run / "shares_shares.csv")[0]
    # Trainings of other settings are not mixed; of more of the same game what is known is not trained again.
    assert (
        main(
            [
                *command,
                "both",
                "--federation.local_epochs",
                "2",
            ]
        )
        == 2
    )

    earlier_lines = (copied_run / "retrained_scores.csv").read_text().splitlines()
    capsys.readouterr()

    assert main([*command, "both"]) == 0
    assert "A single seed was used, and another gives other amounts" in read_output(capsys)
    assert {*earlier_lines} < {*(copied_run / "retrained_scores.csv").read_text().splitlines()}

    outcome = read_rows(copied_run / "retrained.csv")
    assert sum(float(row["share"]) for row in outcome) == pytest.approx(1)
    assert all(float(row["low"]) < float(row["value"]) < float(row["high"]) for row in outcome)

    capsys.readouterr()
    # Trainings from which outputs are not predicted only rank.
    assert main([*command, "leave-one-out"]) == 0
    assert "so these values only rank" in read_output(capsys)
    assert {row["share"] for row in read_rows(copied_run / "retrained.csv")} == {""}


class Hostile:
    def __reduce__(self) -> Any:
        return os.mkdir, ("hostile",)


def test_nothing_in_a_runs_checkpoint_is_executed(copied_run, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    shutil.copytree(copied_run, "run")
    path = Path("run/checkpoints/last.ckpt")
    torch.save({**torch.load(path, weights_only=True), "hyper_parameters": Hostile()}, path)

    assert main(["retrain", "run", "--seeds", "1", "--trainings", "singles"]) == 0
    assert "last.ckpt holds objects that may run code" in read_output(capsys)
    assert not Path("hostile").exists()


@pytest.fixture
def run_with_other_weights(copied_run, tmp_path):
    """A copy of the run, whose checkpoint is not what its configuration gives."""
    folder = tmp_path / "run"
    shutil.copytree(copied_run, folder)
    path = folder / "checkpoints" / "last.ckpt"
    checkpoint = torch.load(path, weights_only=True)
    name, weight = next(iter(checkpoint["state_dict"].items()))
    checkpoint["state_dict"][name] = weight + 0.01
    torch.save(checkpoint, path)
    return folder


def test_retrain_trains_the_same_halves_with_each_seed(copied_run, capsys):
    command = ["retrain", str(copied_run), "--rounds", "1", "--seeds", "2"]

    assert main([*command, "--trainings", "halves"]) == 0

    output = read_output(capsys)
    assert "each client alone and halves of unlike clients" in output
    assert "Only each partner alone, halves, and all together were trained." in output
    coalitions_by_seed = {}
    _settings, _columns, *lines = (copied_run / "retrained_scores.csv").read_text().splitlines()
    for line in lines:
        seed, coalition, _scores = line.split(",", 2)
        coalitions_by_seed.setdefault(seed, set()).add(coalition)
    of_one_seed, of_other_seed = coalitions_by_seed.values()
    assert of_one_seed == of_other_seed
    # Of three clients the other half is a client alone.
    (pair,) = of_one_seed - {"'-", "0", "1", "2", "0+1+2"}
    assert pair in {"0+1", "0+2", "1+2"}


def retrain_singles(folder, *options):
    return main(["retrain", str(folder), "--trainings", "singles", "--seeds", "1", *options])


def test_retrain_refuses_if_the_full_coalition_differs_from_the_checkpoint(
    run_with_other_weights, capsys
):
    assert retrain_singles(run_with_other_weights) == 2

    output = " ".join("".join(capsys.readouterr()).split())
    assert (
        "there are no values: the coalition of all clients, trained again from the run's configuration"
        in output
    )
    assert not list(run_with_other_weights.glob("retrained*"))


@pytest.mark.slow
def test_retrain_of_other_rounds_is_not_compared_with_the_checkpoint(run_with_other_weights):
    assert retrain_singles(run_with_other_weights, "--rounds", "1") == 0


@pytest.mark.slow
def test_retrain_says_that_there_is_no_checkpoint_to_compare_with(run_with_other_weights, capsys):
    shutil.rmtree(run_with_other_weights / "checkpoints")

    assert retrain_singles(run_with_other_weights) == 0

    assert "not compared with the run's own weights" in read_output(capsys)


def test_jobs_option_with_the_dask_backend_is_refused(tmp_path, capsys):
    assert main(["retrain", str(tmp_path), "--jobs", "2", "--backend", "dask"]) == 2
    assert "--jobs" in capsys.readouterr().err
