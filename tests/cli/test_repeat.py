"""``flsv repeat``: runs of other seeds on the same data, and their means."""

import re

import numpy as np
import pytest
from pandas import read_csv
from scipy import stats

from flsv.cli import main, runs_with_seeds as repeat
from flsv.results import open_run, read_run
from flsv.results.basis import basis_of
from flsv.results.text import MESSAGES
from helpers.runs import fit_by_command, write_config, write_table


def test_the_command_that_a_fit_prints_repeats_its_run(tmp_path, capsys):
    config = write_config(tmp_path / "federation.yaml")
    run = fit_by_command(tmp_path, config)
    printed = capsys.readouterr().out
    (options,) = re.findall(r"Repeat:  flsv repeat 5 (.*?)  #", printed)
    out = tmp_path / "out"

    assert main(["repeat", "1", *options.split(), f"--out={out}"]) == 0

    (table_of_repetition,) = out.rglob("contributions.csv")
    assert table_of_repetition.read_text() == (run / "contributions.csv").read_text()


@pytest.mark.slow
def test_repeat_prints_and_writes_means_over_seeds(tmp_path, capsys, monkeypatch):
    out = tmp_path / "out"
    # One metric to pay by, and one that is not.
    metrics = {"cssv": "ClassSpecificShapley", "sv": "CumulativeShapley"}
    federation = {
        "metrics": metrics,
        "reporting": {"figures": 0},
    }
    config = write_config(
        tmp_path / "federation.yaml",
        federation=federation,
    )
    options = [f"--config={config}", f"--out={out}"]
    command = ["repeat", "3", *options]

    assert main(command) == 0

    printed = capsys.readouterr().out
    assert "Run 3 of 3: seed 2" in printed

    _, table_of_sv, table_of_cssv = re.split(r"\bc?s?sv, mean of 3 runs", printed)
    words_on_cssv = " ".join(table_of_cssv.split())
    assert "share" in table_of_sv
    assert "share" not in table_of_cssv
    assert "Do not base payments on these values" in words_on_cssv
    assert MESSAGES["intervals"]["seeds"] in words_on_cssv

    tables = sorted(out.rglob("contributions.csv"))
    runs = [open_run(path) for path in tables]
    for seed, run in enumerate(runs):
        settings = run.record["settings"]
        assert settings["federation_seed"] == seed

    values = np.array([run.final("cssv") for run in runs])
    assert (values[0] != values[2]).all()  # another seed

    file = out / "repeat.csv"
    content = file.read_bytes()
    summary = read_csv(file, index_col="metric")
    of_cssv = summary.loc["cssv"]
    means = values.mean(axis=0)
    low, high = stats.t.interval(
        0.9,
        df=2,
        loc=means,
        scale=stats.sem(values),
    )
    expected = {
        "mean": means,
        "std": values.std(axis=0, ddof=1),
        "low": low,
        "high": high,
    }
    for column, numbers in expected.items():
        assert of_cssv[column].to_list() == pytest.approx(numbers)
    assert (summary["runs"] == 3).all()
    assert of_cssv["share"].isna().all()
    shares_of_sv = summary.loc["sv", "share"]
    assert shares_of_sv.sum() == pytest.approx(1)

    basis = basis_of(open_run(out), "cssv")
    assert [*basis.values] == of_cssv["mean"].to_list()
    assert [*basis.estimates["low"]] == of_cssv["low"].to_list()

    def refuse(*arguments):
        pytest.fail("a run that is done was started again")

    monkeypatch.setattr(repeat, "_fit_with_seed", refuse)
    # What changes no number is no other experiment.
    assert main([*command, "--trainer.log_every_n_steps=7", "-q"]) == 0
    assert capsys.readouterr().out == f"Summary: {out}/repeat.csv\n"
    assert file.read_bytes() == content
    # Fewer runs than there are: none is left out.
    fewer_runs = ["repeat", "2", *options]
    assert main(fewer_runs) == 0
    assert "The means are over all of them." in capsys.readouterr().out
    assert file.read_bytes() == content

    assert main([*command, "--trainer.max_epochs=2"]) == 2
    assert "trainer.max_epochs is 2 and was 1" in capsys.readouterr().err


def test_repeat_refuses_to_continue_with_changed_data(tmp_path, capsys):
    file = tmp_path / "data.csv"
    table = [["clinic", "age", "ill"]]
    for clinic in "AB":
        for i in range(20):
            age = 20 + i * 7 % 31
            is_ill = "ny"[i % 2]
            table.append([clinic, str(age), is_ill])
    config = write_config(tmp_path / "federation.yaml", data=write_table(file, table))
    out = tmp_path / "out"
    options = ["--config", str(config), "--out", str(out)]
    assert main(["repeat", "2", *options, "-q"]) == 0
    means = (out / "repeat.csv").read_bytes()

    table[-1][1] = "33"
    write_table(file, table)
    assert main(["repeat", "3", *options]) == 2

    assert "samples of" in capsys.readouterr().err
    assert (out / "repeat.csv").read_bytes() == means
    assert not (out / "seed_2").exists()


@pytest.mark.slow
def test_a_run_its_repetition_and_its_retraining_give_the_same_values_and_brackets(tmp_path):
    """All of them train the same coalitions with one seed."""
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
    folder = fit_by_command(tmp_path / "fit", config)
    repetitions = tmp_path / "repetitions"

    repeat_once = ["repeat", "1", f"--config={config}", f"--out={repetitions}"]
    assert main([*repeat_once, "-q"]) == 0
    retrain = ["retrain", str(folder), "--trainings=both", "--seeds=1", "-q"]
    assert main(retrain) == 0

    rows_of_run = read_run(folder).query("metric == 'value'")
    last_round = rows_of_run["round"].max()
    last_rows = rows_of_run.query(f"round == {last_round}")
    estimates = basis_of(open_run(folder), "value").estimates
    expected = estimates[["value", "low", "high"]].to_numpy()
    assert estimates["value"].to_list() == last_rows["value"].to_list()
    # Other validation samples are a further source of errors.
    assert (estimates["low"].to_numpy() < last_rows["low_over_seeds"].to_numpy()).all()
    for path in (repetitions, folder / "retrained"):
        table = read_csv(path / "repeat.csv").query("metric == 'value'")
        repeated = table[["mean", "low", "high"]].to_numpy()
        assert (repeated == expected).all()
