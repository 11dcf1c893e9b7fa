"""``flsv retrain``: a run's coalitions, trained after the fact."""

import json
import os
import shutil
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path

import pandas
import pytest
import torch
import yaml
from torch.testing import assert_close

from flsv.cli import main
from flsv.cli.retrain_saved_run import checkpoint_or_reason, retrain
from flsv.results import open_run
from flsv.results.basis import basis_by_retraining
from flsv.results.text import MESSAGES
from flsv.retraining.copied_fits import CopiedFits
from helpers import refused
from helpers.pages import text_of_page, words_in
from helpers.retrained import record_fits, retrained_rows
from helpers.runs import fit_by_command, make_run, read_rows, write_config_of_two_rounds

SEED = 3
SINGLES = {"0", "1", "2"}
PAIRS = {"0+1", "0+2", "1+2"}
ALL_CLIENTS = (0, 1, 2)


def coalitions_of(run, seed=SEED):
    """Return the coalitions in the table of a seed, without those of the run itself."""
    table = pandas.read_csv(run / "retrained" / f"seed_{seed}" / "coalitions.csv")
    return {*table["coalition"]} - {"no clients", "0+1+2"}


@pytest.fixture(scope="module")
def trained_run(tmp_path_factory):
    """A run of two rounds, which no test changes."""
    folder = tmp_path_factory.mktemp("trained")
    metrics = {"cssv": "ClassSpecificShapley"}
    config = write_config_of_two_rounds(folder / "federation.yaml", metrics)
    aggregator = "--federation.aggregator={class_path: ShapFedWA, init_args: {metric: cssv}}"
    return fit_by_command(folder, config, aggregator)


#: Stands for the value of an option that a configuration does not name.
ABSENT = object()


def record_seeds(monkeypatch):
    """The seeds with which coalitions are trained from now on."""
    seeds = set()
    train = CopiedFits.train

    def record_and_train(fits, jobs):
        # All clients are trained to be compared with the run.
        seeds.update(job.seed for job in jobs if job.members != ALL_CLIENTS)
        return train(fits, jobs)

    monkeypatch.setattr(CopiedFits, "train", record_and_train)
    return seeds


def copy_run(run, folder):
    shutil.copytree(run, folder / "run")
    return folder / "run"


@pytest.fixture
def run(trained_run, tmp_path):
    """A run to retrain."""
    return copy_run(trained_run, tmp_path)


def retrain_one_round(run, *options):
    """Retrain by the command, and return what it prints."""
    printed = StringIO()
    with redirect_stdout(printed):
        assert main(["retrain", str(run), "--rounds", "1", *options]) == 0
    return printed.getvalue()


@pytest.mark.slow
def test_retrain_trains_each_coalition_once_and_without_validations(run, monkeypatch):
    jobs_of_all_calls = []
    train = CopiedFits.train

    def record_and_train(fits, jobs):
        jobs_of_all_calls.extend(jobs)
        return train(fits, jobs)

    monkeypatch.setattr(CopiedFits, "train", record_and_train)

    retrain(run, "singles", metric="negative_loss", seeds=1)

    # The first rounds of all clients come to the run's own model, which shows that none needs validations.
    trained = [job.members for job in jobs_of_all_calls]
    assert trained == [(0,), (1,), (2,), ALL_CLIENTS]
    assert not any(job.validates for job in jobs_of_all_calls)


def test_retrain_refuses_scores_that_give_no_single_value(tmp_path):
    with refused("use balanced_accuracy"):
        retrain(tmp_path, metric="per_class_accuracy")


def test_retrain_of_rounds_of_another_framework_names_the_missing_configuration(tmp_path):
    run = make_run(tmp_path / "run")
    record = json.loads((run / "run.json").read_text())
    record["settings"] = {}  # such rounds have no seed
    (run / "run.json").write_text(json.dumps(record))

    with refused(r"has no config\.yaml, because the run was started from Python"):
        retrain(run)


def test_retrain_of_a_folder_without_a_run_asks_for_one_of_fit(tmp_path):
    with refused("name the folder of a run of flsv fit"):
        retrain(tmp_path)


# ---- all coalitions, with two seeds


@pytest.fixture(scope="module")
def retrained_twice(trained_run, tmp_path_factory):
    """A run whose coalitions are all trained with two seeds for one round, and what was printed."""
    run = copy_run(trained_run, tmp_path_factory.mktemp("two_seeds"))
    printed = retrain_one_round(run, "--seeds", "2")
    return run, words_in(printed)


@pytest.mark.slow
def test_retrain_trains_all_coalitions_with_each_seed(retrained_twice):
    run, printed = retrained_twice

    assert f"seeds {SEED} and {SEED + 1}, 1 of 1 rounds" in printed
    for seed in (SEED, SEED + 1):
        assert coalitions_of(run, seed) == SINGLES | PAIRS
    rows = retrained_rows(run)
    assert {row["runs"] for row in rows} == {"2"}
    assert len({row["mean"] for row in rows}) == 3


@pytest.mark.slow
def test_report_of_retrained_run_names_both_scores_and_the_intervals(retrained_twice, tmp_path):
    run, _ = retrained_twice
    page_path = tmp_path / "all.html"

    assert main(["report", str(run), "--out", str(page_path), "--budget", "100"]) == 0

    page = text_of_page(page_path)
    assert MESSAGES["intervals"]["seeds_and_samples"] in page
    assert " % by balanced accuracy" in page
    assert " % by loss" in page


@pytest.mark.slow
def test_errors_over_seeds_and_samples_have_covariance_matrices(retrained_twice):
    run, _ = retrained_twice
    errors_over_seeds, errors_over_samples = basis_by_retraining(open_run(run)).inputs.errors

    for errors in (errors_over_seeds, errors_over_samples):
        covariance = errors.covariance
        assert_close(covariance, covariance.T)
        assert torch.linalg.eigvalsh(covariance).min() > -1e-9
        assert covariance.diagonal().min() > 0


# ---- coalitions of one client


@pytest.mark.slow
def test_retrain_with_a_changed_setting_says_so(run):
    changed_option = "--federation.optimizer_state=persist"
    printed = retrain_one_round(run, "--trainings", "singles", "--seeds", "1", changed_option)

    words = words_in(printed)
    change = "federation.optimizer_state 'persist' instead of 'reset'"
    assert f"not compared with the run's own weights: {change}" in words
    assert f"each client alone, seed {SEED}, 1 of 1 rounds, {change}" in words
    assert coalitions_of(run) == SINGLES


RESERVATION_OF_SINGLES = "Models were trained for each partner alone and for all partners together"


@pytest.fixture(scope="module")
def retrained_singles(trained_run, tmp_path_factory):
    """A run whose single clients are trained, and what was printed in a terminal of 80 columns."""
    run = copy_run(trained_run, tmp_path_factory.mktemp("singles"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("COLUMNS", "80")
        printed = retrain_one_round(run, "--seeds", "1", "--trainings", "singles")
    return run, printed


@pytest.mark.slow
def test_retrain_by_another_score_trains_no_coalition_again(
    retrained_singles, tmp_path, monkeypatch
):
    run = copy_run(retrained_singles[0], tmp_path)
    shares_beside_accuracy = [row["share"] for row in retrained_rows(run, "by_negative_loss")]
    trained = record_fits(monkeypatch)

    retrain(run, "singles", metric="negative_loss", rounds=1, seeds=1)

    # The run's first round is trained to be compared with the run.
    assert trained == {ALL_CLIENTS}
    assert [row["share"] for row in retrained_rows(run)] == shares_beside_accuracy


@pytest.mark.by_turn
@pytest.mark.slow
@pytest.mark.parametrize(
    ("option", "value"), [("max_fits", 1.0), ("per_class", ABSENT), ("mode", "max")]
)
def test_retraining_that_another_version_has_begun_is_continued(
    retrained_singles, tmp_path, monkeypatch, option, value
):
    run = copy_run(retrained_singles[0], tmp_path)
    for path in (run / "retrained").rglob("config.yaml"):
        config = yaml.safe_load(path.read_text())
        arguments = config["federation"]["metrics"]["value"]["init_args"]
        del arguments[option]
        if value is not ABSENT:
            arguments[option] = value
        path.write_text(yaml.safe_dump(config))
    tables = [*(run / "retrained").rglob("contributions.csv")]
    times_before = [path.stat().st_mtime_ns for path in tables]
    trained_seeds = record_seeds(monkeypatch)

    retrain(run, "singles", rounds=1, seeds=2)

    assert {row["runs"] for row in retrained_rows(run)} == {"2"}
    assert trained_seeds == {SEED + 1}
    are_kept = [path.stat().st_mtime_ns for path in tables] == times_before
    assert are_kept == (option != "mode")


@pytest.mark.slow
def test_retrain_of_singles_prints_its_reservation_within_80_columns(retrained_singles):
    _, printed = retrained_singles
    result, _, _path = printed.partition("Retrained: ")
    text = result[result.index("accuracy, by retraining") :]

    assert RESERVATION_OF_SINGLES in words_in(text)
    assert max(map(len, text.splitlines())) <= 80
    assert "\n%" not in text


def report_shares(run, folder, *options):
    """Return the text of the page with shares of 100, and the rows of its table."""
    page = folder / "page.html"
    assert main(["report", str(run), "--out", str(page), "--budget", "100", *options]) == 0
    return text_of_page(page), read_rows(folder / "page_shares.csv")


@pytest.mark.slow
def test_report_of_retrained_singles_pays_with_a_reservation(retrained_singles, tmp_path):
    run, _ = retrained_singles

    page, rows = report_shares(run, tmp_path)

    assert RESERVATION_OF_SINGLES in page
    assert f"flsv retrain {run} --rounds 1 --seeds 1 --trainings singles" in page
    assert sum(float(row["amount"]) for row in rows) == 100


@pytest.mark.slow
def test_report_by_a_metric_of_no_performance_pays_nobody(retrained_singles, tmp_path):
    page, rows = report_shares(retrained_singles[0], tmp_path, "--by", "cssv")

    assert "cssv does not measure" in page
    assert "amount" not in rows[0]


@pytest.mark.slow
def test_retrain_refuses_to_add_trainings_of_other_settings(retrained_singles):
    command = ["retrain", str(retrained_singles[0]), "--rounds", "1", "--seeds", "1"]
    assert main([*command, "--trainings", "both", "--federation.local_epochs", "2"]) == 2


@pytest.mark.slow
def test_retrain_of_more_coalitions_trains_only_the_missing_ones(
    retrained_singles, tmp_path, monkeypatch
):
    run = copy_run(retrained_singles[0], tmp_path)
    trained = record_fits(monkeypatch)

    printed = retrain_one_round(run, "--seeds", "1", "--trainings", "both")

    assert trained == {(0, 1), (0, 2), (1, 2), ALL_CLIENTS}
    assert coalitions_of(run) == SINGLES | PAIRS
    assert "Only one random seed was used" in words_in(printed)
    rows = retrained_rows(run)
    assert sum(float(row["share"]) for row in rows) == pytest.approx(1)
    assert all(float(row["low"]) < float(row["mean"]) < float(row["high"]) for row in rows)


@pytest.mark.slow
def test_retrain_whose_trainings_predict_no_outputs_has_no_shares(run):
    printed = retrain_one_round(run, "--seeds", "1", "--trainings", "leave-one-out")

    assert "so these values only rank" in words_in(printed)
    assert {row["share"] for row in retrained_rows(run)} == {""}


# ---- the comparison with the run's last checkpoint


class MakesAFolderWhenUnpickled:
    def __reduce__(self):
        return os.mkdir, ("hostile",)


@pytest.mark.slow
def test_retrain_of_a_run_with_values_of_samples_trains_without_them(tmp_path, monkeypatch):
    config = write_config_of_two_rounds(tmp_path / "federation.yaml", {"in_run": "InRunShapley"})
    algorithm = "--federation.client_algorithm=InRunValues"
    metric = "--federation.metrics.value"
    options = [algorithm, f"{metric}=ShadowShapley", f"{metric}.coalitions=singles"]
    run = fit_by_command(tmp_path, config, *options)
    trained = record_fits(monkeypatch)
    printed = StringIO()
    with redirect_stdout(printed):
        assert main(["retrain", str(run), "--seeds", "1", "--trainings", "singles"]) == 0

    assert "not compared" not in printed.getvalue()  # with the run's last checkpoint
    assert trained == {ALL_CLIENTS}  # the run has trained the others
    basis = basis_by_retraining(open_run(run))
    assert basis.estimates["value"].notna().all()


@pytest.mark.parametrize(
    ("content", "num_rounds", "expected_reason"),
    [
        ({"epoch": 1}, 2, ""),
        (None, 2, "has no last.ckpt"),
        ({"epoch": 1}, 1, "last.ckpt was saved after 2 rounds, and they have 1"),
        ({"epoch": 1, "own": MakesAFolderWhenUnpickled()}, 2, "holds objects that may run code"),
    ],
    ids=["of as many rounds", "missing", "of other rounds", "that may run code"],
)
def test_checkpoint_is_compared_or_the_reason_is_named(
    content, num_rounds, expected_reason, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "checkpoints" / "last.ckpt"
    path.parent.mkdir()
    if content is not None:
        torch.save(content, path)

    compared_path, reason = checkpoint_or_reason(tmp_path, num_rounds)

    assert compared_path == (None if expected_reason else str(path))
    assert expected_reason in reason
    assert not Path("hostile").exists()


@pytest.mark.slow
def test_retrain_refuses_if_the_full_coalition_differs_from_the_checkpoint(run, capsys):
    path = run / "checkpoints" / "last.ckpt"
    checkpoint = torch.load(path, weights_only=True)
    name, weight = next(iter(checkpoint["state_dict"].items()))
    checkpoint["state_dict"][name] = weight + 0.01
    torch.save(checkpoint, path)

    assert main(["retrain", str(run), "--trainings", "singles", "--seeds", "1"]) == 2

    output = words_in("".join(capsys.readouterr()))
    assert "there are no values: the run, trained again from its configuration" in output
    assert not list(run.glob("retrained/seed_*/*"))
    assert main(["report", str(run)]) == 0


def test_jobs_option_with_the_dask_backend_is_refused(tmp_path, capsys):
    assert main(["retrain", str(tmp_path), "--jobs", "2", "--backend", "dask"]) == 2
    assert "--jobs" in capsys.readouterr().err
