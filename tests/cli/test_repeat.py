"""``flsv repeat``: runs of other seeds on the same data, and their means."""

import re
import statistics

import pytest
from pandas import read_csv
from scipy import stats

from flsv.cli import main, saved_run as repeat
from flsv.results import open_run, read_run
from flsv.results.basis import basis_of
from flsv.results.text import MESSAGES
from helpers.runs import fit_by_command, read_rows, write_config, write_table


@pytest.mark.slow
def test_repeat_prints_and_writes_means_over_seeds(tmp_path, capsys, monkeypatch):
    out = tmp_path / "out"
    # One metric to pay by, and one that is not.
    metrics = {"cssv": "ClassSpecificShapley", "sv": "CumulativeShapley"}
    federation = {"metrics": metrics, "reporting": {"figures": 0}}
    config = write_config(tmp_path / "federation.yaml", federation=federation)
    command = ["repeat", "3", f"--config={config}", f"--out={out}"]

    assert main(command) == 0

    printed = capsys.readouterr().out
    assert "Run 3 of 3: seed 2" in printed

    of_sv, of_cssv = re.split(r"\bc?s?sv, mean of 3 runs", printed)[1:]
    assert "share" in of_sv
    assert "share" not in of_cssv
    assert "Do not base payments on these values" in of_cssv
    assert MESSAGES["intervals"]["seeds"] in " ".join(of_cssv.split())

    runs = [open_run(path) for path in sorted(out.rglob("contributions.csv"))]
    assert [run.record["settings"]["federation_seed"] for run in runs] == [0, 1, 2]

    finals = [run.final("cssv") for run in runs]
    assert finals[0] != finals[2]  # another seed

    summary = read_rows(out / "repeat.csv")
    assert [row["metric"] for row in summary] == ["cssv"] * 3 + ["sv"] * 3

    rows_of_cssv = summary[:3]
    for client, row in enumerate(rows_of_cssv):
        values = [final[client] for final in finals]
        mean = statistics.fmean(values)
        low, high = stats.t.interval(0.9, 2, mean, stats.sem(values))
        expected = [3, mean, statistics.stdev(values), low, high]
        numbers = [float(row[key]) for key in ("runs", "mean", "std", "low", "high")]
        assert numbers == pytest.approx(expected)
        assert row["share"] == ""

    shares_of_sv = [float(row["share"]) for row in summary[3:]]
    assert sum(shares_of_sv) == pytest.approx(1)

    basis = basis_of(runs[1], "cssv")
    assert [*basis.values] == [float(row["mean"]) for row in rows_of_cssv]
    assert [*basis.estimates["low"]] == [float(row["low"]) for row in rows_of_cssv]

    def refuse(*arguments) -> None:
        pytest.fail("a run that is done was started again")

    monkeypatch.setattr(repeat, "_fit", refuse)
    # What changes no number is no other experiment.
    assert main([*command, "--trainer.log_every_n_steps=7", "-q"]) == 0
    assert capsys.readouterr().out == f"Summary: {out}/repeat.csv\n"
    assert read_rows(out / "repeat.csv") == summary
    # Fewer runs than there are: none is left out.
    fewer = ["repeat", "2", *command[2:]]
    assert main(fewer) == 0
    assert "The means are over all of them." in capsys.readouterr().out
    assert read_rows(out / "repeat.csv") == summary

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
    parts = {"metrics": {"value": metric}, "reporting": {"figures": 0}}
    config = write_config(tmp_path / "federation.yaml", federation=parts, seed_everything=0)
    folder = fit_by_command(tmp_path / "fit", config)
    repetitions = tmp_path / "repetitions"

    assert main(["repeat", "1", f"--config={config}", f"--out={repetitions}", "-q"]) == 0
    options = ["--trainings=both", "--seeds=1", "-q"]
    assert main(["retrain", str(folder), *options]) == 0

    last_values = read_run(folder / "contributions.csv").query("metric == 'value'")
    last_round = last_values["round"].max()
    of_run = last_values[last_values["round"] == last_round]
    expected = of_run[["value", "low", "high"]].to_numpy()
    for path in (repetitions, folder / "retrained"):
        table = read_csv(path / "repeat.csv").query("metric == 'value'")
        assert (table[["mean", "low", "high"]].to_numpy() == expected).all()
