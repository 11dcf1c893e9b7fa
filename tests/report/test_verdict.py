"""One verdict on whether to pay by values: on pages, in the file, in the terminal and in Python."""

import contextlib
import io
import re
from pathlib import Path

import numpy as np
import pytest

from flsv.cli import main
from flsv.report import Budget, open_run
from flsv.report.shares import shares_of
from flsv.results.text import WORDS
from flsv.results.verdict import Verdict
from helpers.pages import text_of_page
from helpers.runs import fit_by_command, read_rows, write_config, write_table

#: What the terminal says of a run's own values, whose line on retraining answers the others.
NOT_AFTER_A_FIT = ("one_seed", "alone")


@pytest.fixture(scope="module")
def trained_run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A run that has trained each client alone, and what it printed."""
    folder = tmp_path_factory.mktemp("verdict")
    trainer = {
        "max_epochs": 1,
        "accelerator": "cpu",
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    federation = {
        "metrics": {"value": "ShadowShapley"},
        "reporting": {"figures": 0},
    }
    config = write_config(
        folder / "federation.yaml",
        seed_everything=3,
        trainer=trainer,
        federation=federation,
    )
    output = io.StringIO()

    with contextlib.redirect_stdout(output):
        run = fit_by_command(folder, config)
    return run, words_in(output.getvalue())


def write_noise_table(path: Path) -> dict[str, str]:
    """A table of five clinics whose labels say nothing about the columns."""
    generator = np.random.default_rng(5)
    table = [["clinic", "age", "weight", "ill"]]
    for _ in range(300):
        clinic, label = generator.integers(0, [5, 3])
        age, weight = generator.normal(size=2)
        table.append([f"clinic {clinic}", f"{age:.3f}", f"{weight:.3f}", "abc"[label]])

    return write_table(path, table)


def test_where_the_model_stays_at_chance_nobody_has_an_amount(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = {
        **write_noise_table(tmp_path / "noise.csv"),
        "partitioner": {"class_path": "flsv.data.GroupPartitioner"},
        "splits": {"server_val": 0.3},
        "batch_size": 16,
    }
    config = write_config(
        tmp_path / "federation.yaml",
        seed_everything=0,
        data=data,
        trainer={"max_epochs": 2, "accelerator": "cpu", "enable_progress_bar": False},
        federation={"metrics": {"value": "ShadowShapley"}, "reporting": {"figures": 0}},
    )
    run = fit_by_command(tmp_path, config)
    fit_output = capsys.readouterr().out

    command = ["report", str(run), "--budget", "10000", "--currency", "EUR"]
    assert main(command) == 0

    report_output = capsys.readouterr().out

    shares = shares_of(open_run(run), Budget(10_000.0, currency="EUR"))
    assert shares.verdict.reasons == {"no_gain": WORDS["against"]["no_gain"]}
    assert shares.table[["share", "amount"]].isna().all(axis=None)

    page = text_of_page(run / "report.html")
    for text in (fit_output, report_output, page):
        assert words_in(shares.verdict.text) in words_in(text)
        assert "EUR" not in text
    assert "client samples value\n" in re.sub(" +", " ", fit_output)  # and no column of shares
    rows = read_rows(run / "shares.csv")
    assert {row["verdict"] for row in rows} == {shares.verdict.text}
    columns = rows[0].keys()
    assert "share" not in columns
    assert "amount" not in columns


def words_in(text: str) -> str:
    return " ".join(text.split())


def test_verdict_on_a_run_is_the_same_after_the_fit_and_in_reports(
    trained_run: tuple[Path, str], capsys: pytest.CaptureFixture[str]
) -> None:
    run, fit_output = trained_run
    budget = Budget(100.0, by="value")
    verdict = shares_of(open_run(run), budget).verdict
    assert {"alone", "best_alone", "one_seed"} <= verdict.reasons.keys()

    assert_says(verdict.without(NOT_AFTER_A_FIT), fit_output)
    assert_reports_say(verdict, run, "value", capsys)


def test_verdict_on_a_run_is_the_same_after_retraining_and_in_reports(
    trained_run: tuple[Path, str],
    capsys: pytest.CaptureFixture[str],
) -> None:
    run, _ = trained_run
    command = ["retrain", str(run), "--trainings", "singles", "--seeds", "1"]
    assert main(command) == 0
    retrain_output = words_in(capsys.readouterr().out)

    budget = Budget(100.0, by="retrained")
    verdict = shares_of(open_run(run), budget).verdict
    assert {"alone", "best_alone", "one_seed"} <= verdict.reasons.keys()

    assert_says(verdict, retrain_output)
    assert_reports_say(verdict, run, "retrained", capsys)


def assert_reports_say(
    verdict: Verdict,
    run: Path,
    values_name: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """In the terminal, in the table of shares, and on the pages of all clients and of one."""
    command = ["report", str(run), "--budget", "100", "--by", values_name]
    assert main(command) == 0
    assert_says(verdict, words_in(capsys.readouterr().out))
    rows = read_rows(run / "shares.csv")
    assert {row["verdict"] for row in rows} == {verdict.text}

    assert main([*command, "--client", "1"]) == 0
    for folder in (run, run / "clients" / "1"):
        page = text_of_page(folder / "report.html")
        assert_says(verdict, words_in(page))


def assert_says(verdict: Verdict, text: str) -> None:
    """A text has the verdict's sentences, and no other reason."""
    for name, sentence in WORDS["against"].items():
        reason = verdict.reasons.get(name, sentence)
        is_told = words_in(reason) in text
        assert is_told == (name in verdict.reasons), name
    if verdict.reasons:
        assert verdict.title in text
