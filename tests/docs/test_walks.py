"""What two people do who have never seen flsv, from the first command to what they came for, as the pages say it, with
nothing shortened: a data scientist with CSV files, a researcher with a metric of her own."""

from __future__ import annotations

import csv
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import snippets

from flsv.cli import main

ROOT = Path(__file__).parents[2]
NUMBERS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten")
pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys, "argv", ["flsv"])
    monkeypatch.setenv("PL_GLOBAL_SEED", "0")  # to be restored: seed_everything sets it
    return tmp_path


def commands_of(page: Path) -> list[list[str]]:
    return [
        words
        for block in snippets.blocks(page.read_text())
        if block.language == "bash"
        for words in snippets.commands(block.text)
    ]


def test_a_data_scientist_goes_from_four_csv_files_to_a_signed_report() -> None:
    page = ROOT / "docs" / "tutorials" / "hospitals.md"
    said = re.search(r"(\w+) commands, ten minutes", page.read_text())
    assert said is not None
    assert len(commands_of(page)) + 1 == NUMBERS.index(said[1].lower())  # one is shown with what it refuses
    snippets.run_page(page.read_text())

    shares = [*csv.DictReader(Path("shares.csv").read_text().splitlines())]
    amounts = {row["client_name"]: float(row["amount"]) for row in shares}
    assert {row["by"] for row in shares} == {"value, mean of 5 runs"}
    assert sum(amounts.values()) == pytest.approx(10_000, abs=1e-6)
    assert set(amounts) == {"Boston", "Lyon", "Osaka", "Quito"}
    report = Path("report.html").read_text()
    assert all(f"{amount:,.2f}" in report for amount in amounts.values())
    assert "evaluated on 500 cases" in report
    assert sorted(path.name for path in Path("data").iterdir()) == ["columns.csv", "samples.csv", "summary.csv"]
    # The table that the page shows is what its commands print.
    repeated = {
        row["client_name"]: float(row["share"])
        for row in csv.DictReader(Path("runs/repeat/repeat.csv").read_text().splitlines())
        if row["metric"] == "value"
    }
    shown = {
        name: float(share) / 100
        for name, share in re.findall(r"^\| (\w+) \| [\d.]+ % \| ([\d.]+) %", page.read_text(), flags=re.MULTILINE)
    }
    assert shown == pytest.approx(repeated, abs=0.02)


WARDS = """
title: three wards of the digits
set: tuning
rounds: 2
data:
  source: digits
  splits: {max_samples: 300, server_val: 0.2, seed: 0}
  partitioner: {class_path: flsv.data.SizePartitioner, init_args: {proportions: [1, 2, 4], seed: 0}}
model:
  class_path: flsv.ClassifierClient
  init_args: {network: softmax, optimizer: {class_path: torch.optim.SGD, init_args: {lr: 0.1}}}
"""


def test_a_researcher_scores_a_metric_of_her_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """The page's commands, the bench's on a federation of her own, whose coalitions she trains first."""
    page = ROOT / "docs" / "howto" / "own_metric.md"
    for words in commands_of(page):
        if words[:2] == ["flsv", "new"]:
            assert main(words[1:]) == 0
    passed = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "update_length"],
        env={**os.environ, "PYTHONPATH": f"{Path('update_length').absolute()}:{ROOT}"},
        capture_output=True,
        text=True,
    )
    assert passed.returncode == 0, passed.stdout[-2000:]

    bench = re.search(r"^flsv (bench .*) my_package\.MeanNorm$", page.read_text(), flags=re.MULTILINE)
    assert bench is not None
    monkeypatch.syspath_prepend(str(Path("update_length").absolute()))
    Path("wards.yaml").write_text(WARDS)
    given = [*bench[1].split(), "update_length.UpdateLength", "--federations", "wards.yaml"]
    assert main([*given, "--truth-seeds", "2"]) == 0
    rows = list(csv.DictReader(Path("runs/benchmark/values.csv").read_text().splitlines()))
    assert {row["metric"] for row in rows} == {"UpdateLength", "size", "training_loss", "cgsv", "fedsv_samples"}
