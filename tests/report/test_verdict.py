"""One verdict on whether to pay by values: on pages, in the file, in the terminal and in Python."""

import contextlib
import io
from pathlib import Path

import pytest

from flsv.cli import main
from flsv.report import Budget, open_run
from flsv.report.shares import shares_of
from flsv.results.text import WORDS
from flsv.results.verdict import Verdict
from helpers.pages import text_of_page
from helpers.runs import fit_by_command, read_rows, write_config

#: What the terminal says of a run's own values, whose line on retraining answers the others.
NOT_AFTER_A_FIT = ("one_seed", "alone")


@pytest.fixture(scope="module")
def trained_run(tmp_path_factory):
    """A run that has trained each client alone, and what it printed."""
    folder = tmp_path_factory.mktemp("verdict")
    trainer = {
        "max_epochs": 1,
        "accelerator": "cpu",
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    federation = {"metrics": {"value": "ShadowShapley"}, "reporting": {"figures": 0}}
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


def words_in(text: str) -> str:
    return " ".join(text.split())


def test_verdict_on_a_run_is_the_same_after_the_fit_and_in_reports(trained_run, capsys):
    run, fit_output = trained_run
    budget = Budget(100.0, by="value")
    verdict = shares_of(open_run(run), budget).verdict
    assert {"alone", "best_alone", "one_seed"} <= verdict.reasons.keys()

    assert_says(verdict.without(NOT_AFTER_A_FIT), fit_output)
    assert_reports_say(verdict, run, "value", capsys)


@pytest.mark.slow
def test_verdict_on_a_run_is_the_same_after_retraining_and_in_reports(trained_run, capsys):
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
):
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


def assert_says(verdict: Verdict, text: str):
    """A text has the verdict's sentences, and no other reason."""
    for name, sentence in WORDS["against"].items():
        reason = verdict.reasons.get(name, sentence)
        is_told = words_in(reason) in text
        assert is_told == (name in verdict.reasons), name
    if verdict.reasons:
        assert verdict.title in text
