"""flsv report of several runs: scores, values and shares side by side, paired by seed."""

import numpy as np
import pandas
import pytest
from scipy import stats

from flsv.cli import main
from flsv.payment.compare import compare_runs
from flsv.results.text import design_in_words, design_of
from helpers import refused
from helpers.pages import text_of_page
from helpers.retrained import add_retrained_runs, make_trained
from helpers.runs import change_record, make_game, make_repeated_runs, make_run

#: A row per seed, a column per client.
VALUES = np.array(
    [
        [0.4, 0.3, 0.05],
        [0.2, 0.4, 0.05],
        [0.1, 0.5, 0.05],
    ]
)
DIFFERENCES = np.array(
    [
        [0.02, 0.0, 0.01],
        [0.03, 0.01, -0.03],
        [0.01, 0.0, 0.0],
    ]
)


def make_two_repeats(folder):
    first_run = folder / "a"
    second_run = folder / "b"
    other_values = VALUES + DIFFERENCES
    make_repeated_runs(first_run, *VALUES.tolist())
    make_repeated_runs(second_run, *other_values.tolist())
    return [first_run, second_run]


def rows_of_boston(comparison, metric="sv"):
    """The first client's value in each run."""
    rows = comparison[comparison["client"] == "Boston"]
    is_value = rows["what"] == f"value by {metric} accuracy"
    return rows[is_value].to_dict("records")


def test_differences_are_paired_by_seed_with_intervals_of_students_t(tmp_path):
    comparison = compare_runs(make_two_repeats(tmp_path))

    first_row, second_row = rows_of_boston(comparison)
    values = VALUES[:, 0]
    differences = DIFFERENCES[:, 0]
    mean = differences.mean()
    low, high = stats.t.interval(
        0.9,
        df=2,
        loc=mean,
        scale=stats.sem(differences),
    )
    assert first_row["mean"] == pytest.approx(values.mean())
    assert second_row["mean"] == pytest.approx(values.mean() + mean)
    assert second_row["value"] == pytest.approx(mean)
    assert second_row["low"] == pytest.approx(low)
    assert second_row["high"] == pytest.approx(high)


def test_shares_and_scores_are_compared_too(tmp_path):
    comparison = compare_runs(make_two_repeats(tmp_path))

    is_first = comparison["run"] == str(tmp_path / "a")
    first_run = comparison[is_first].set_index("what")
    sums = VALUES.sum(axis=1)
    shares = VALUES / sums[:, None]
    mean_shares = first_run.loc["share by sv accuracy"]["mean"]
    assert mean_shares.to_list() == pytest.approx(shares.mean(0))
    # From 0.25 by the sum of each seed's values.
    score = first_run.loc["accuracy"]["mean"]
    assert score == pytest.approx(0.25 + sums.mean())


def make_run_with_seed(folder, seed):
    values = {"sv": [0.5, 0.2, 0.1]}
    return make_game(folder, values, settings={"federation_seed": seed})


def test_runs_with_one_common_seed_have_a_difference_without_an_interval(tmp_path):
    repeat, _ = make_two_repeats(tmp_path)
    run = make_run_with_seed(tmp_path / "c", seed=1)

    _, row = rows_of_boston(compare_runs([repeat, run]))

    assert row["value"] == pytest.approx(0.5 - VALUES[1, 0])
    assert np.isnan(row["low"])
    assert np.isnan(row["high"])


def test_runs_without_a_common_seed_have_means_alone(tmp_path):
    repeat, _ = make_two_repeats(tmp_path)
    run = make_run_with_seed(tmp_path / "c", seed=7)

    _, row = rows_of_boston(compare_runs([repeat, run]))

    assert row["mean"] == pytest.approx(0.5)
    assert np.isnan(row["value"])


def test_values_by_other_scores_are_not_subtracted(tmp_path):
    values = {"sv": [0.3, 0.2, 0.1]}
    by_accuracy = make_game(tmp_path / "a", values, measure="accuracy")
    by_auroc = make_game(tmp_path / "b", values, measure="auroc")

    comparison = compare_runs([by_accuracy, by_auroc])

    measures = comparison["what"]
    rows = comparison[measures.str.startswith("value by sv")]
    assert set(rows["what"]) == {"value by sv accuracy", "value by sv auroc"}
    assert rows["value"].to_list().count(0.0) == 3  # each of the first from itself


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
    paths = []
    for name, value in (("a", 0.3), ("b", 0.25)):
        run = make_game(tmp_path / name, {"sv": [0.1, 0.1, 0.1]})
        add_retrained_runs(run, [value, 0.2, 0.1])
        paths.append(run)

    comparison = compare_runs(paths)

    _, row = rows_of_boston(comparison, metric="value")
    assert row["value"] == pytest.approx(-0.05)


ALL = {"trainings": "all"}
SINGLES = {"trainings": "singles"}


@pytest.mark.parametrize("are_retrained", [False, True])
@pytest.mark.parametrize(
    ("design", "other_design", "commands"),
    [
        (ALL, SINGLES, "flsv retrain a --trainings singles --seeds"),
        (ALL, {"trainings": "halves", "halvings": 2}, "--trainings halves --halvings 2 --seeds"),
        (
            {"trainings": "", "listed": [[0, 1]]},
            {"trainings": "", "listed": [[0, 2]]},
            "--trainings both",
        ),
    ],
)
def test_values_by_other_designs_are_named_and_not_subtracted(
    tmp_path, monkeypatch, capsys, design, other_design, commands, are_retrained
):
    monkeypatch.chdir(tmp_path)
    for name, facts in (("a", design), ("b", other_design), ("c", design)):
        run = make_game(tmp_path / name, {"value": [0.3, 0.2, 0.1]})
        if are_retrained:
            add_retrained_runs(run, [0.3, 0.2, 0.1], **facts)
        else:
            make_trained(run, **facts)
        (run / "config.yaml").touch()

    assert main(["report", "a", "b"]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    page = text_of_page(tmp_path / "a" / "compare.html")
    table = pandas.read_csv(tmp_path / "a" / "compare.csv", keep_default_na=False)
    values = table[table["client"] != ""]
    assert set(values["difference"][values["run"] == "b"]) == {""}
    assert set(values["design"]) == {design_of(design), design_of(other_design)}
    for text in (printed, page):
        for design_of_run in (design, other_design):
            assert design_in_words(design_of(design_of_run)) in text
        assert commands in text
        assert "flsv report a b" in text

    assert main(["report", "a", "c"]) == 0
    assert "not subtracted" not in capsys.readouterr().out
    table = pandas.read_csv(tmp_path / "a" / "compare.csv")
    assert (table["difference"] == 0).all()


def test_command_prints_and_writes_one_table(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    make_two_repeats(tmp_path)

    assert main(["report", "a", "b"]) == 0

    printed = capsys.readouterr().out
    page = text_of_page(tmp_path / "a" / "compare.html")
    table = pandas.read_csv(tmp_path / "a" / "compare.csv")
    columns = ["what", "client", "run", "design", "mean", "difference", "low", "high"]
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
