"""flsv report of several runs: scores, values and shares side by side, paired by seed."""

import numpy as np
import pandas
import pytest
from scipy import stats

from flsv.cli import main
from flsv.payment.compare import compare_runs
from helpers import refused
from helpers.pages import text_of_page
from helpers.retrained import add_retrained_runs
from helpers.runs import change_record, make_game, make_repeated_runs, make_run

#: A row per seed, a column per client.
VALUES = np.array([[0.4, 0.3, 0.05], [0.2, 0.4, 0.05], [0.1, 0.5, 0.05]])
OTHER_VALUES = VALUES + np.array([[0.02, 0.0, 0.01], [0.03, 0.01, -0.03], [0.01, 0.0, 0.0]])
OF_BOSTON = "what == 'value by sv accuracy' and client == 'Boston'"


def make_two_repeats(folder):
    paths = [folder / "a", folder / "b"]
    for path, values in zip(paths, (VALUES, OTHER_VALUES)):
        make_repeated_runs(path, *values.tolist())
    return paths


def test_differences_are_paired_by_seed_with_intervals_of_students_t(tmp_path):
    comparison = compare_runs(make_two_repeats(tmp_path))

    differences = OTHER_VALUES[:, 0] - VALUES[:, 0]
    low, high = stats.t.interval(0.9, df=2, loc=differences.mean(), scale=stats.sem(differences))
    of_first, of_other = comparison.query(OF_BOSTON).to_dict("records")
    assert of_first["mean"] == pytest.approx(VALUES[:, 0].mean())
    assert of_other["mean"] == pytest.approx(OTHER_VALUES[:, 0].mean())
    expected = [differences.mean(), low, high]
    assert [of_other[name] for name in ("value", "low", "high")] == pytest.approx(expected)


def test_shares_and_scores_are_compared_too(tmp_path):
    comparison = compare_runs(make_two_repeats(tmp_path))

    shares = VALUES / VALUES.sum(axis=1, keepdims=True)
    of_first = comparison[comparison["run"] == str(tmp_path / "a")].set_index(["what", "client"])
    assert of_first.loc["share by sv accuracy"]["mean"].to_list() == pytest.approx(shares.mean(0))
    # From 0.25 by the sum of each seed's values.
    score = of_first.loc["accuracy"]["mean"].item()
    assert score == pytest.approx(0.25 + VALUES.sum(1).mean())


def test_runs_with_one_common_seed_have_a_difference_without_an_interval(tmp_path):
    repeat, _ = make_two_repeats(tmp_path)
    run = make_game(tmp_path / "c", {"sv": [0.5, 0.2, 0.1]}, settings={"federation_seed": 1})

    _, row = compare_runs([repeat, run]).query(OF_BOSTON).to_dict("records")

    assert row["value"] == pytest.approx(0.5 - VALUES[1, 0])
    assert np.isnan([row["low"], row["high"]]).all()


def test_runs_without_a_common_seed_have_means_alone(tmp_path):
    repeat, _ = make_two_repeats(tmp_path)
    run = make_game(tmp_path / "c", {"sv": [0.5, 0.2, 0.1]}, settings={"federation_seed": 7})

    _, row = compare_runs([repeat, run]).query(OF_BOSTON).to_dict("records")

    assert row["mean"] == pytest.approx(0.5)
    assert np.isnan(row["value"])


def test_values_by_other_scores_are_not_subtracted(tmp_path):
    paths = [tmp_path / "a", tmp_path / "b"]
    for path, measure in zip(paths, ("accuracy", "auroc")):
        make_game(path, {"sv": [0.3, 0.2, 0.1]}, measure=measure)

    comparison = compare_runs(paths)

    of_values = comparison[comparison["what"].str.startswith("value by sv")]
    assert set(of_values["what"]) == {"value by sv accuracy", "value by sv auroc"}
    assert of_values["value"].to_list().count(0.0) == 3  # each of the first from itself


def test_a_client_of_one_run_alone_is_not_subtracted(tmp_path):
    paths = [tmp_path / "a", tmp_path / "b"]
    for path in paths:
        make_game(path, {"sv": [0.3, 0.2, 0.1]})
    change_record(paths[1], clients=["Boston", "Lyon", "Turin"])

    comparison = compare_runs(paths)

    of_turin = comparison[comparison["client"] == "Turin"]
    assert of_turin["value"].isna().all()
    assert of_turin["mean"].notna().sum() == 2  # value and share in the second run


def test_values_by_retraining_are_compared_where_there_are_any(tmp_path):
    paths = [tmp_path / "a", tmp_path / "b"]
    for path, value in zip(paths, (0.3, 0.25)):
        make_game(path, {"sv": [0.1, 0.1, 0.1]})
        add_retrained_runs(path, [value, 0.2, 0.1])

    comparison = compare_runs(paths)

    _, row = comparison.query("what == 'value by value accuracy' and client == 'Boston'").to_dict(
        "records"
    )
    assert row["value"] == pytest.approx(-0.05)


def test_command_prints_and_writes_one_table(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    make_two_repeats(tmp_path)

    assert main(["report", "a", "b"]) == 0

    printed = capsys.readouterr().out
    page = text_of_page(tmp_path / "a" / "compare.html")
    table = pandas.read_csv(tmp_path / "a" / "compare.csv")
    columns = ["what", "client", "run", "mean", "difference", "low", "high"]
    assert list(table) == columns
    for text in (printed, page):
        assert "0.0200 [0.0031 to 0.0369]" in text  # Boston's
        assert "value by sv accuracy" in text
    assert "Report: a/compare.html, a/compare.csv" in printed
    assert 'class="bar"' in (tmp_path / "a" / "compare.html").read_text()


def test_command_writes_beside_the_page_that_was_named(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    make_two_repeats(tmp_path)

    assert main(["report", "a", "b", "--out", "both.html"]) == 0

    assert {path.name for path in tmp_path.iterdir()} == {"a", "b", "both.html", "both.csv"}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--client", "1"], "for the report of one run"),
        (["--budget", "100"], "for the report of one run"),
        (["--out", "both.csv"], "expected a file that ends with .html"),
    ],
)
def test_command_refuses_options_of_one_run(tmp_path, monkeypatch, capsys, options, message):
    monkeypatch.chdir(tmp_path)
    make_two_repeats(tmp_path)

    with pytest.raises(SystemExit) as end:
        raise SystemExit(main(["report", "a", "b", *options]))

    assert end.value.code == 2
    assert message in capsys.readouterr().err
    assert not list(tmp_path.rglob("*.csv.html")) + list(tmp_path.glob("both*"))


def test_a_folder_without_a_run_is_refused(tmp_path):
    run = make_run(tmp_path / "a")
    with refused("does not exist|there is no"):
        compare_runs([run, tmp_path / "b"])
