"""What two people do who have never seen flsv, from the first command to what they came for, as the pages say it,
with nothing shortened: a data scientist with CSV files, a teacher with TensorBoard."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from pandas import read_csv

from flsv.results import open_run, preferred_basis
from helpers import pages
from helpers.retrained import retrained_rows
from helpers.runs import read_rows

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys, "argv", ["flsv"])
    return tmp_path


def commands_of(page):
    return [
        words
        for block in pages.blocks_of_page(page.read_text())
        if block.language == "bash"
        for words in pages.split_commands(block.text)
    ]


@pytest.mark.long
def test_hospitals_tutorial_leads_from_four_csv_files_to_a_signed_report_with_payments(
    folder, monkeypatch
):
    ssh_keygen = shutil.which("ssh-keygen")
    if ssh_keygen is not None:
        monkeypatch.setenv("HOME", str(folder))
        Path(".ssh").mkdir()
        options = ["-q", "-t", "ed25519", "-N", "", "-f", ".ssh/id_ed25519"]
        subprocess.run([ssh_keygen, *options], check=True)

    page = ROOT / "docs" / "tutorials" / "hospitals.md"
    text = page.read_text()

    num_blocks = pages.run_page(text)

    assert num_blocks == text.count("```") // 2

    shares = read_rows(Path("shares.csv"))
    amounts = {}
    for row in shares:
        assert row["by"] == "retraining, measured by average precision of yes"
        amounts[row["client_name"]] = float(row["amount"])

    assert abs(sum(amounts.values()) - 10_000) < 1e-6
    assert set(amounts) == {"Boston", "Lyon", "Osaka", "Quito"}

    report = Path("report.html").read_text()
    for amount in amounts.values():
        assert f"{amount:,.2f}" in report
    assert "evaluated on 1,000 validation samples" in report

    if ssh_keygen is not None:
        signature = Path("report.html.sig").read_text()
        assert signature.startswith("-----BEGIN SSH SIGNATURE-----")

    names = sorted(path.name for path in Path("data").iterdir())
    assert names == ["columns.csv", "data_warnings.csv", "samples.csv"]

    run = open_run("lightning_logs/version_0")
    stored = read_csv(ROOT / "docs" / "results" / "hospitals.csv")
    stored_values = stored[stored["what"] == "value"].set_index("client_name")["number"]
    values_of_run = dict(zip(run.client_names, run.final("value")))
    assert values_of_run == pytest.approx(stored_values.to_dict(), abs=0.02)

    # The table that the page shows is what its commands print.
    retrained = {}
    for row in retrained_rows(Path("lightning_logs/version_0")):
        retrained[row["client_name"]] = float(row["share"])

    shown = {}
    pattern = r"^\| (\w+) \| [\d.]+ % \| ([\d.]+) % \|"
    for name, share in re.findall(pattern, text, flags=re.MULTILINE):
        shown[name] = float(share) / 100

    assert shown == pytest.approx(retrained, abs=0.02)


def test_readme_quickstart_prints_the_shown_table_below_the_folder_of_tensorboard(capsys):
    """The README's first commands."""
    readme = ROOT / "README.md"
    fit_command = first_command(readme, "flsv", "fit")
    pages.run_command(fit_command)
    printed_rows = values_printed(capsys.readouterr().out)
    shown_rows = values_printed(readme.read_text())

    assert len(shown_rows) == 5
    assert_equal_to_last_digit(shown_rows, printed_rows)

    run_folder = Path("lightning_logs/version_0")
    run = open_run(run_folder)
    game = run.record["paid_in"]["value"]
    basis = preferred_basis(run)
    assert basis is not None
    estimates = basis.estimates
    numbers = {
        "value": run.final("value"),
        "low": estimates["low"].tolist(),
        "high": estimates["high"].tolist(),
        "accuracy at the start": [game["start"]],
        "accuracy at the end": [game["end"]],
    }
    stored = read_csv(ROOT / "docs" / "results" / "quickstart.csv").sort_values("client")

    for name, expected in numbers.items():
        stored_numbers = stored[stored["what"] == name]["number"].to_list()
        assert stored_numbers == pytest.approx(expected, abs=0.02)

    board_command = first_command(readme, "tensorboard")
    logdir = board_command[board_command.index("--logdir") + 1]
    assert run_folder.is_relative_to(logdir)


@pytest.mark.long
def test_lightning_tutorial_computes_the_same_values_in_python_and_from_its_yaml(folder, capsys):
    text = (ROOT / "docs" / "tutorials" / "lightning.md").read_text()
    blocks = pages.blocks_of_page(text)
    for block in blocks:
        if block.title is not None:
            Path(block.title).write_text(block.text)
    project, federation, measure, *_ = [
        block.text for block in blocks if block.language == "python"
    ]
    exec(project + federation + measure, {"__name__": "project"})
    capsys.readouterr()

    pages.run_command(["flsv", "fit", "--config", "federation.yaml"])

    shown_rows = values_printed(text)
    assert len(shown_rows) == 5
    assert_equal_to_last_digit(shown_rows, values_printed(capsys.readouterr().out))
    in_python = read_rows(Path("lightning_logs/version_1/contributions.csv"))
    from_yaml = read_rows(Path("lightning_logs/version_2/contributions.csv"))
    assert from_yaml == in_python


def first_command(page, *beginning):
    for words in commands_of(page):
        if words[: len(beginning)] == [*beginning]:
            return words
    raise AssertionError(f"{page} has no {beginning}")


def assert_equal_to_last_digit(shown_rows, printed_rows):
    """Compare rows of client, samples, value, both ends of its interval and share. Another machine may round the last
    digit in another way."""
    tolerances = [0, 0, 0.001, 0.001, 0.001, 0.1]
    differences = np.abs(np.subtract(shown_rows, printed_rows))
    rounding_of_float64 = 1e-9
    assert (differences <= np.array(tolerances) + rounding_of_float64).all(), printed_rows


def values_printed(text):
    """The numbers of each client's row of a table."""
    row = re.compile(r"^\d +\d+ +[\d.]+ \[-?[\d.]+, [\d.]+\] +[\d.]+ %", flags=re.MULTILINE)
    numbers = []
    for line in row.findall(text):
        numbers.append([float(number) for number in re.findall(r"-?[\d.]+", line)])
    return numbers
