"""What two people do who have never seen flsv, from the first command to what they came for, as the pages say it,
with nothing shortened: a data scientist with CSV files, a teacher with TensorBoard."""

import csv
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from pandas import read_csv
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from flsv.report import open_run
from helpers import pages

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys, "argv", ["flsv"])
    return tmp_path


def commands_of(page: Path) -> list[list[str]]:
    return [
        words
        for block in pages.blocks(page.read_text())
        if block.language == "bash"
        for words in pages.commands(block.text)
    ]


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
    shares = rows_of("shares.csv")
    amounts = {}
    for row in shares:
        assert row["by"] == "retraining, measured by average precision of yes"
        amounts[row["client_name"]] = float(row["amount"])
    assert abs(sum(amounts.values()) - 10_000) < 1e-6
    assert set(amounts) == {"Boston", "Lyon", "Osaka", "Quito"}

    report = Path("report.html").read_text()
    for amount in amounts.values():
        assert f"{amount:,.2f}" in report
    assert "evaluated on 1,000 cases" in report
    if ssh_keygen is not None:
        signature = Path("report.html.sig").read_text()
        assert signature.startswith("-----BEGIN SSH SIGNATURE-----")
    names = sorted(path.name for path in Path("data").iterdir())
    assert names == ["columns.csv", "doubts.csv", "samples.csv", "summary.csv"]

    # The table that the page shows is what its commands print.
    retrained = {}
    for row in rows_of("lightning_logs/version_0/retrained.csv"):
        retrained[row["client_name"]] = float(row["share"])
    shown = {}
    pattern = r"^\| (\w+) \| [\d.]+ % \| ([\d.]+) % \|"
    for name, share in re.findall(pattern, text, flags=re.MULTILINE):
        shown[name] = float(share) / 100
    assert shown == pytest.approx(retrained, abs=0.02)


def rows_of(path):
    text = Path(path).read_text()
    return list(csv.DictReader(text.splitlines()))


def test_readme_quickstart_prints_the_shown_table_and_logs_its_csv_to_tensorboard(capsys):
    """The README's first commands; the curves that a class sees are the values in the table."""
    commands = [
        words for words in commands_of(ROOT / "README.md") if words[0] in ("flsv", "tensorboard")
    ]
    fit = next(words for words in commands if words[:2] == ["flsv", "fit"])
    board = next(words for words in commands if words[0] == "tensorboard")
    pages.run_command(fit)
    run = Path("lightning_logs/version_0")
    row = re.compile(r"^\d +\d+ +[\d.]+ \[[\d.]+, [\d.]+\] +[\d.]+ %", flags=re.MULTILINE)
    shown, printed = (
        row.findall(text) for text in ((ROOT / "README.md").read_text(), capsys.readouterr().out)
    )
    assert len(shown) == 5
    for one, other in zip(shown, printed, strict=True):
        numbers = [[float(each) for each in re.findall(r"[\d.]+", line)] for line in (one, other)]
        assert numbers[0] == pytest.approx(numbers[1], abs=0.02, rel=0.05)
    stored = read_csv(ROOT / "docs" / "results" / "quickstart.csv").sort_values("client")
    told, game = open_run(run), open_run(run).record["paid_in"]["value"]
    known = dict(zip(("value", "low", "high"), (told.final("value"), *told.ends("value"))))
    for what, numbers in {
        **known,
        **{f"accuracy at the {x}": [game[x]] for x in ("start", "end")},
    }.items():
        assert stored[stored["what"] == what]["number"].to_list() == pytest.approx(
            numbers, abs=0.02
        )
    assert run.is_relative_to(board[board.index("--logdir") + 1])
    rows = [
        row
        for row in csv.DictReader((run / "contributions.csv").read_text().splitlines())
        if row["class"] == ""
    ]
    clients = [
        path for path in run.iterdir() if path.is_dir() and any(path.glob("events.out.tfevents.*"))
    ]
    assert len(clients) == 5
    for path in clients:
        events = EventAccumulator(str(path)).Reload()
        tag = next(tag for tag in events.Tags()["scalars"] if tag.endswith("cssv"))
        seen = [event.value for event in events.Scalars(tag)]
        told = [
            float(r["value"])
            for r in rows
            if r["metric"] == "cssv" and f"client {r['client_name']}" == path.name
        ]
        assert len(told) == 20
        assert seen == pytest.approx(told, abs=1e-5)
