"""``flsv retrain``: a run's coalitions, trained after the fact."""

import os
import shutil
from pathlib import Path

import pandas
import pytest
import torch
from torch.testing import assert_close

from flsv.cli import main
from flsv.cli.retrain_saved_run import checkpoint_or_reason, retrain
from flsv.results import open_run
from flsv.results.basis import basis_by_retraining
from flsv.results.text import MESSAGES
from flsv.retraining.copied_fits import CopiedFits
from helpers import refused
from helpers.pages import text_of_page
from helpers.retrained import record_fits, retrained_rows
from helpers.runs import fit_by_command, read_output, read_rows, write_config_of_two_rounds

SEED = 3
ROUNDS = 2


@pytest.fixture(scope="module")
def trained_run(tmp_path_factory):
    """A run of two rounds on the data that write_config names."""
    folder = tmp_path_factory.mktemp("retrained")
    metrics = {"cssv": "ClassSpecificShapley"}
    config = write_config_of_two_rounds(folder / "federation.yaml", metrics)
    aggregator = "--federation.aggregator={class_path: ShapFedWA, init_args: {metric: cssv}}"
    return fit_by_command(folder, config, aggregator)


@pytest.fixture
def copied_run(trained_run):
    yield trained_run
    for file in trained_run.glob("retrained*"):
        shutil.rmtree(file) if file.is_dir() else file.unlink()


def test_retrain_trains_each_coalition_once_and_without_validations(copied_run, monkeypatch):
    all_jobs = []
    train = CopiedFits.train

    def record(fits, jobs):
        all_jobs.extend(jobs)
        return train(fits, jobs)

    monkeypatch.setattr(CopiedFits, "train", record)

    retrain(copied_run, "singles", metric="negative_loss", seeds=1)

    # The first rounds of all clients come to the run's own model, which shows that none needs validations.
    trained = [job.members for job in all_jobs]
    all_clients = (0, 1, 2)
    assert trained == [(0,), (1,), (2,), all_clients]
    assert not any(job.validates for job in all_jobs)


def test_retrain_refuses_scores_that_give_no_single_value(tmp_path):
    with refused("use balanced_accuracy"):
        retrain(tmp_path, metric="per_class_accuracy")


@pytest.mark.slow
def test_retrain_trains_all_coalitions_with_two_seeds_and_none_again(
    copied_run, monkeypatch, capsys
):
    """By another score, too, of which the shares stand beside the first."""
    assert main(["retrain", str(copied_run), "--rounds", "1", "--seeds", "2"]) == 0

    message = read_output(capsys)
    assert f"1 of {ROUNDS} rounds" not in message  # one was planned
    assert f"seeds {SEED} and {SEED + 1}, 1 of 1 rounds" in message

    by_accuracy = retrained_rows(copied_run)
    assert {row["runs"] for row in by_accuracy} == {"2"}
    values = {row["mean"] for row in by_accuracy}
    assert len(values) == 3  # each coalition was trained by its own clients
    for seed in (SEED, SEED + 1):
        assert coalitions_of(copied_run, seed) == {"0", "1", "2", "0+1", "0+2", "1+2"}

    page_path = copied_run / "all.html"
    assert main(["report", str(copied_run), "--out", str(page_path), "--budget", "100"]) == 0

    page = text_of_page(page_path)
    assert MESSAGES["intervals"]["seeds_and_samples"] in page
    for basis in ("by balanced accuracy", "by loss"):
        assert f" % {basis}" in page

    errors_of_seeds, errors_of_cases = basis_by_retraining(open_run(copied_run)).inputs.errors
    for errors in (errors_of_seeds, errors_of_cases):
        covariance = errors.covariance
        assert_close(covariance, covariance.T)
        assert torch.linalg.eigvalsh(covariance).min() > -1e-9
        assert covariance.diagonal().min() > 0

    by_loss = retrained_rows(copied_run, metric="by_negative_loss")
    trained = record_fits(monkeypatch)
    retrain(copied_run, metric="negative_loss", rounds=1, seeds=2)

    assert trained == {(0, 1, 2)}  # the run's first rounds once more
    for row, row_beside_accuracy in zip(retrained_rows(copied_run), by_loss):
        assert row["share"] == row_beside_accuracy["share"]


@pytest.mark.slow
def test_retrain_tells_the_trainings_and_settings_that_were_asked_for(copied_run, capsys):
    command = ["retrain", str(copied_run), "--rounds", "1", "--trainings", "singles"]
    command += ["--seeds", "1", "--federation.optimizer_state=persist"]

    assert main(command) == 0

    output = read_output(capsys)
    changed = "federation.optimizer_state 'persist' instead of 'reset'"
    assert f"not compared with the run's own weights: {changed}" in output
    assert f"each client alone, seed {SEED}, 1 of 1 rounds, {changed}" in output
    assert coalitions_of(copied_run, SEED) == {"0", "1", "2"}


def coalitions_of(run, seed):
    """The coalitions in the table of a seed, without those of the run itself."""
    table = pandas.read_csv(run / "retrained" / f"seed_{seed}" / "coalitions.csv")
    return {*table["coalition"]} - {"no clients", "0+1+2"}


#: The beginning of a reservation.
ALONE = "Models were trained for each partner alone and for all partners together"


@pytest.mark.slow
def test_retrain_of_single_clients_says_so_and_its_trainings_are_taken_over(
    copied_run, monkeypatch, capsys
):
    monkeypatch.setenv("COLUMNS", "80")
    command = ["retrain", str(copied_run), "--rounds", "1", "--seeds", "1", "--trainings"]

    assert main([*command, "singles"]) == 0
    output, _, _path = capsys.readouterr().out.partition("Retrained: ")
    text = output[output.index("accuracy, by retraining") :]
    assert ALONE in " ".join(text.split())
    assert max(map(len, text.splitlines())) <= 80
    assert "\n%" not in text

    page = copied_run / "shares.html"
    report = ["report", str(copied_run), "--out", str(page), "--budget", "100"]
    assert main(report) == 0
    assert ALONE in text_of_page(page)
    repeated = f"flsv retrain {copied_run} --rounds 1 --seeds 1 --trainings singles"
    assert repeated in text_of_page(page)
    assert sum(float(row["amount"]) for row in read_rows(copied_run / "shares_shares.csv")) == 100
    assert main([*report, "--by", "cssv"]) == 0
    assert "cssv does not measure" in text_of_page(page)
    assert "amount" not in read_rows(copied_run / "shares_shares.csv")[0]
    # Trainings of other settings are not mixed; of other coalitions what is known is not trained again.
    assert main([*command, "both", "--federation.local_epochs", "2"]) == 2

    trained = record_fits(monkeypatch)
    capsys.readouterr()

    assert main([*command, "both"]) == 0
    assert "Only one random seed was used" in read_output(capsys)
    assert trained == {(0, 1), (0, 2), (1, 2), (0, 1, 2)}
    assert coalitions_of(copied_run, SEED) == {"0", "1", "2", "0+1", "0+2", "1+2"}

    outcome = retrained_rows(copied_run)
    assert sum(float(row["share"]) for row in outcome) == pytest.approx(1)
    assert all(float(row["low"]) < float(row["mean"]) < float(row["high"]) for row in outcome)

    trained.clear()
    capsys.readouterr()
    # Trainings from which outputs are not predicted only rank.
    assert main([*command, "leave-one-out"]) == 0
    assert trained == {(0, 1, 2)}
    assert "so these values only rank" in read_output(capsys)
    assert {row["share"] for row in retrained_rows(copied_run)} == {""}


class Hostile:
    def __reduce__(self):
        return os.mkdir, ("hostile",)


@pytest.mark.parametrize(
    ("checkpoint", "rounds", "reason"),
    [
        (None, 2, "has no last.ckpt"),
        ({"epoch": 1}, 1, "last.ckpt was saved after 2 rounds, and they have 1"),
        ({"epoch": 1, "hyper_parameters": Hostile()}, 2, "holds objects that may run code"),
        ({"epoch": 1}, 2, ""),
    ],
)
def test_trainings_are_compared_with_a_checkpoint_of_as_many_rounds_that_runs_no_code(
    checkpoint, rounds, reason, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "checkpoints" / "last.ckpt"
    path.parent.mkdir()
    if checkpoint is not None:
        torch.save(checkpoint, path)

    compared_path, why_not = checkpoint_or_reason(tmp_path, rounds)

    assert reason in why_not
    assert compared_path == (None if reason else str(path))
    assert not Path("hostile").exists()


@pytest.mark.slow
def test_retrain_refuses_if_the_full_coalition_differs_from_the_checkpoint(
    copied_run, tmp_path, capsys
):
    run = tmp_path / "run"
    shutil.copytree(copied_run, run)
    path = run / "checkpoints" / "last.ckpt"
    checkpoint = torch.load(path, weights_only=True)
    name, weight = next(iter(checkpoint["state_dict"].items()))
    checkpoint["state_dict"][name] = weight + 0.01
    torch.save(checkpoint, path)

    assert main(["retrain", str(run), "--trainings", "singles", "--seeds", "1"]) == 2

    output = " ".join("".join(capsys.readouterr()).split())
    assert "there are no values: the run, trained again from its configuration" in output
    assert not list(run.glob("retrained/seed_*/*"))
    assert main(["report", str(run)]) == 0  # with the run's own values


def test_jobs_option_with_the_dask_backend_is_refused(tmp_path, capsys):
    assert main(["retrain", str(tmp_path), "--jobs", "2", "--backend", "dask"]) == 2
    assert "--jobs" in capsys.readouterr().err
