"""``flsv repeat``: runs of other seeds on the same data, and their means."""

import re
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
from pandas import read_csv
from scipy import stats

from flsv.cli import main, runs_with_seeds as repeat
from flsv.results import open_run, read_run
from flsv.results.basis import basis_of
from flsv.results.text import MESSAGES
from helpers import refused
from helpers.retrained import choose_differently_with_each_seed, make_trained
from helpers.runs import fit_by_command, make_game, write_config, write_table


@pytest.mark.slow
def test_command_that_a_fit_prints_repeats_its_run(tmp_path, capsys):
    config = write_config(tmp_path / "federation.yaml")
    run = fit_by_command(tmp_path, config)
    printed = capsys.readouterr().out
    (options,) = re.findall(r"Repeat:  flsv repeat 5 (.*?)  #", printed)
    out = tmp_path / "out"

    command = ["repeat", "1", *options.split()]
    assert main([*command, f"--out={out}"]) == 0

    (table_of_repetition,) = out.rglob("contributions.csv")
    table_of_run = run / "contributions.csv"
    assert table_of_repetition.read_text() == table_of_run.read_text()


#: A metric to pay by, and two that are not, of which one has intervals of its own.
METRICS = {
    "cssv": "ClassSpecificShapley",
    "sv": "CumulativeShapley",
    "boot": "cli.own_metrics.Bootstrapped",
}
NUM_RUNS = 3


class Repeated(NamedTuple):
    options: list[str]
    folder: Path
    printed: str


@pytest.fixture(scope="module")
def repeated(tmp_path_factory):
    """The options and the folder of three repetitions, and what the command has printed."""
    folder = tmp_path_factory.mktemp("repeated")
    federation = {"metrics": METRICS, "reporting": {"figures": 0}}
    config = write_config(folder / "federation.yaml", federation=federation)
    options = [f"--config={config}", f"--out={folder}/out"]
    printed = StringIO()
    with redirect_stdout(printed):
        assert main(["repeat", str(NUM_RUNS), *options]) == 0
    return Repeated(options, folder / "out", printed.getvalue())


@pytest.mark.slow
def test_repeat_prints_means_with_shares_of_metrics_to_pay_by_only(repeated):
    assert "Run 3 of 3: seed 2" in repeated.printed
    _, *parts = re.split(r"(\w+), mean of 3 runs", repeated.printed)
    tables = dict(zip(parts[::2], parts[1::2]))
    assert "share" in tables["sv"]
    assert "share" not in tables["cssv"]

    text_on_cssv = " ".join(tables["cssv"].split())
    assert "Do not base payments on these values" in text_on_cssv
    assert MESSAGES["intervals"]["seeds"] in text_on_cssv


def runs_in(folder):
    return [open_run(table) for table in sorted(folder.rglob("contributions.csv"))]


@pytest.mark.slow
@pytest.mark.parametrize("metric", ["cssv", "boot"])
def test_repeat_writes_means_and_students_t_intervals_over_seeds(repeated, metric):
    runs = runs_in(repeated.folder)
    seeds = [run.record["settings"]["federation_seed"] for run in runs]
    assert seeds == [0, 1, 2]
    values = np.array([run.final(metric) for run in runs])
    assert (values[0] != values[2]).all()

    means = values.mean(axis=0)
    low, high = stats.t.interval(
        0.9,
        df=NUM_RUNS - 1,
        loc=means,
        scale=stats.sem(values),
    )
    expected = {
        "mean": means,
        "std": values.std(axis=0, ddof=1),
        "low": low,
        "high": high,
    }
    summary = read_csv(repeated.folder / "repeat.csv", index_col="metric")
    rows_of_metric = summary.loc[metric]
    for column, expected_numbers in expected.items():
        assert rows_of_metric[column].to_list() == pytest.approx(expected_numbers)
    assert (summary["runs"] == NUM_RUNS).all()


@pytest.mark.slow
def test_run_records_that_a_metric_computes_ends_of_its_own(repeated):
    run = runs_in(repeated.folder)[0]
    assert run.record["intervals"] == {"boot": "ends"}
    basis = basis_of(run, "boot")

    values = np.array(basis.values)
    assert basis.estimates["low"].to_list() == pytest.approx(values - 0.01)
    assert basis.estimates["high"].to_list() == pytest.approx(values + 0.03)
    assert basis.sentence_on_intervals == MESSAGES["intervals"]["ends"]

    basis_of_all = basis_of(open_run(repeated.folder), "boot")
    assert basis_of_all.sentence_on_intervals == MESSAGES["intervals"]["seeds"]
    (errors,) = basis_of_all.inputs.errors
    assert errors.freedom == NUM_RUNS - 1


@pytest.mark.slow
def test_repeat_writes_shares_of_metrics_to_pay_by_only(repeated):
    summary = read_csv(repeated.folder / "repeat.csv", index_col="metric")
    assert summary.loc["cssv", "share"].isna().all()
    shares = summary.loc["sv", "share"]
    assert shares.sum() == pytest.approx(1)


@pytest.mark.slow
def test_basis_of_repetitions_has_the_means_and_intervals_of_the_table(repeated):
    basis = basis_of(open_run(repeated.folder), "cssv")

    rows = read_csv(repeated.folder / "repeat.csv").query("metric == 'cssv'")
    assert [*basis.values] == rows["mean"].to_list()
    assert [*basis.estimates["low"]] == rows["low"].to_list()


def refuse_to_fit(*arguments):
    pytest.fail("a run that has ended was started again")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("num_runs", "options", "message"),
    [
        ("3", ["--trainer.log_every_n_steps=7"], "Summary: "),
        ("2", [], "The means are over all of them."),
    ],
    ids=["option that changes no number", "fewer runs"],
)
def test_repeat_trains_no_run_again(repeated, num_runs, options, message, monkeypatch, capsys):
    monkeypatch.setattr(repeat, "_fit_with_seed", refuse_to_fit)
    summary = (repeated.folder / "repeat.csv").read_bytes()

    command = ["repeat", num_runs, *repeated.options]
    assert main([*command, *options]) == 0

    assert message in capsys.readouterr().out
    assert (repeated.folder / "repeat.csv").read_bytes() == summary


@pytest.mark.slow
def test_repeat_refuses_to_continue_with_changed_options(repeated, capsys):
    command = ["repeat", "3", *repeated.options]
    assert main([*command, "--trainer.max_epochs=2"]) == 2
    assert "trainer.max_epochs is 2 and was 1" in capsys.readouterr().err


@pytest.mark.slow
def test_repeat_refuses_to_continue_with_changed_data(tmp_path, capsys):
    file = tmp_path / "data.csv"
    table = [["clinic", "age", "ill"]]
    for clinic in "AB":
        for patient in range(20):
            age = 20 + patient * 7 % 31
            is_ill = ["n", "y"][patient % 2]
            table.append([clinic, str(age), is_ill])
    data = write_table(file, table)
    config = write_config(tmp_path / "federation.yaml", data=data)
    out = tmp_path / "out"
    options = ["--config", str(config), "--out", str(out)]
    assert main(["repeat", "2", *options, "-q"]) == 0
    means = (out / "repeat.csv").read_bytes()

    *_, last_row = table
    last_row[1] = "33"
    write_table(file, table)
    assert main(["repeat", "3", *options]) == 2

    assert "samples of" in capsys.readouterr().err
    assert (out / "repeat.csv").read_bytes() == means
    assert not (out / "seed_2").exists()


@pytest.mark.by_turn
@pytest.mark.slow
@pytest.mark.parametrize("retrains", [False, True])
def test_all_seeds_train_the_coalitions_that_the_first_one_has_chosen(
    tmp_path, monkeypatch, retrains
):
    federation = {"metrics": {"value": "ShadowShapley"}, "reporting": {"figures": 0}}
    config = write_config(tmp_path / "federation.yaml", federation=federation)
    out = tmp_path / "out"
    command = ["repeat", f"--config={config}", f"--out={out}", "-q"]
    if retrains:
        without_metrics = {**federation, "metrics": {}}
        config = write_config(tmp_path / "federation.yaml", federation=without_metrics)
        run = fit_by_command(tmp_path / "fit", config)
        out = run / "retrained"
        command = ["retrain", str(run), "-q"]
    choose_differently_with_each_seed(monkeypatch)

    if retrains:
        assert main([*command, "--seeds=1"]) == 0
        assert main([*command, "--seeds=2"]) == 0
    else:
        assert main([command[0], "2", *command[1:]]) == 0

    repetitions = open_run(out)
    assert [run.design("value") for run in repetitions.runs] == ["all", "all"]
    assert set(read_csv(out / "repeat.csv")["design"]) == {"all"}
    assert "all coalitions" in basis_of(repetitions, "value").origin


def test_runs_by_several_designs_have_no_means(tmp_path):
    designs = ("all", "singles")
    for seed, design in enumerate(designs):
        run = make_game(
            tmp_path / f"seed_{seed}", {"value": [0.3, 0.2]}, settings={"federation_seed": seed}
        )
        make_trained(run, trainings=design)
    (tmp_path / "runs.csv").write_text("run,folder\n0,seed_0\n1,seed_1\n")

    with refused("its value trained each client alone, and not all coalitions"):
        open_run(tmp_path)


@pytest.mark.slow
@pytest.mark.long
def test_run_repetition_and_retraining_with_one_seed_have_the_same_values_and_intervals(tmp_path):
    metric = {"class_path": "ShadowShapley", "init_args": {"coalitions": "both"}}
    federation = {
        "metrics": {"value": metric},
        "reporting": {"figures": 0},
    }
    config = write_config(
        tmp_path / "federation.yaml",
        federation=federation,
        seed_everything=0,
    )
    run = fit_by_command(tmp_path / "fit", config)
    repetitions = tmp_path / "repetitions"
    repeat_once = ["repeat", "1", f"--config={config}", f"--out={repetitions}", "-q"]
    assert main(repeat_once) == 0
    retrain_once = ["retrain", str(run), "--trainings=both", "--seeds=1", "-q"]
    assert main(retrain_once) == 0

    estimates = basis_of(open_run(run), "value").estimates
    expected = estimates[["value", "low", "high"]].to_numpy()
    for folder in (repetitions, run / "retrained"):
        rows = read_csv(folder / "repeat.csv").query("metric == 'value'")
        numbers = rows[["mean", "low", "high"]].to_numpy()
        assert (numbers == expected).all()

    rows = read_run(run).query("metric == 'value'")
    last_round = rows["round"].max()
    last_rows = rows[rows["round"] == last_round]
    assert estimates["value"].to_list() == last_rows["value"].to_list()
    # Intervals of a basis also allow for other validation samples.
    low = estimates["low"].to_numpy()
    low_over_seeds = last_rows["low_over_seeds"].to_numpy()
    assert (low < low_over_seeds).all()
