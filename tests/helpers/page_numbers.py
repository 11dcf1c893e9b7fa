"""Finds each number of a retrained run's page in the files of the run, in the row of its partner.

The run has one metric, ``value``, and was retrained with two seeds. What no rule names has no number, or is a text of
``words.yaml`` or ``run.json``.
"""

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pandas as pd

import flsv
from helpers.pages import text_of_page

WORDS_FILE = Path(flsv.__file__).parent / "results/words.yaml"
#: Of a page: texts and numbers by what begins its lines.
Numbers = dict[str, list[float]]

INTERVAL = ["value", "low", "high"]
SHARES = ["share", "share_low", "share_high"]
AMOUNTS = ["amount", "amount_low", "amount_high"]
#: Headings below which partners' rows have other numbers, in their order.
SECTIONS = (
    "Who took part",
    "Training samples of each class",
    "All values",
    "How to read the values",
    "Settings",
)


def numbers_of(text: str) -> list[str]:
    """The numbers in a text that are no part of a word, without commas."""
    numbers = re.findall(r"(?<![\w.])-?\d[\d,]*(?:\.\d+)?(?!\w)", text)
    return [number.replace(",", "") for number in numbers]


def assert_shows(line: str, numbers_of_files: Sequence[float]) -> None:
    """Each number of a line is that of the files in its place, rounded to the decimals of the line."""
    numbers = numbers_of(line)
    assert len(numbers) == len(numbers_of_files), line
    for number, number_of_file in zip(numbers, numbers_of_files):
        _, _, decimals = number.partition(".")
        half_a_digit = 0.501 * 10 ** -len(decimals)
        assert abs(float(number) - number_of_file) <= half_a_digit, line


class FilesOfRun:
    """The numbers that the page of a run may show."""

    def __init__(self, run: Path) -> None:
        self.command = f"To repeat the run: flsv fit --config {run / 'config.yaml'}"
        record_file = run / "run.json"
        self.record = json.loads(record_file.read_text("utf-8"))
        self.shares = pd.read_csv(run / "shares.csv", index_col="client_name")
        contributions = pd.read_csv(run / "contributions.csv")
        is_of_all_classes = contributions["class"].isna()
        self.contributions = contributions[is_of_all_classes]

    def history(self, metric: str, column: str = "value") -> pd.DataFrame:
        """A metric's numbers, a row per round and a column per partner. A round without a row is as that before."""
        is_of_metric = self.contributions["metric"] == metric
        rows = self.contributions[is_of_metric]
        table = rows.pivot(index="round", columns="client_name", values=column)
        rounds = range(self.record["rounds_done"])
        return table.reindex(rounds).ffill()

    def of_partner(self, client: int, name: str) -> Numbers:
        """A partner's numbers by section. The first page has the section ""."""
        record = self.record
        shares = self.shares.loc[name]
        shares_in_percent = 100 * shares[SHARES]
        values = []
        for column in INTERVAL:
            history = self.history("value", column)
            values.append(history[name].iloc[-1])
        weights = self.history("weight")[name].tolist()
        num_samples = record["samples"][client]
        num_rounds = record["rounds_done"]
        return {
            "": [*shares[INTERVAL], *shares_in_percent, *shares[AMOUNTS]],
            "Who took part": [num_samples, num_rounds, num_rounds, weights[-1]],
            "Training samples of each class": record["class_counts"][client],
            "All values": values,
        }

    def of_sentences(self) -> Numbers:
        """The numbers of sentences, by their beginnings."""
        record = self.record
        num_rounds = record["rounds_done"]
        date, _, _ = record["started"].partition("T")
        year, month, day = map(int, date.split("-"))
        performance = record["paid_in"]["value"]
        num_clients = len(record["clients"])
        return {
            f"{num_clients} partners": [num_clients, num_rounds, year, month, day],
            "Shares of ": [self.shares["amount"].sum()],
            "The model's average precision": [performance["start"], performance["end"]],
            "It was evaluated on ": [record["validation"]["rows"]],
        }

    def numbers_of_settings(self) -> Numbers:
        """The numbers of rows in the section Settings that show a rounded number."""
        numbers = {}
        for name, number in self.record["logged"].items():
            numbers[f"last {name}"] = [number]
        dictionary = self.record["dictionary"] or {"columns": {}}
        for name, column in dictionary["columns"].items():
            numbers[name] = [column["mean"], column["scale"]]
        return numbers

    def texts_of_settings(self) -> dict[str, Any]:
        """The texts of the other rows in the section Settings."""
        texts = dict(self.record["settings"])
        for package, version in self.record["packages"].items():
            texts[f"package {package}"] = version
        hashes = self.record["hashes"]
        texts["the server"] = hashes["server"]
        for client, name in enumerate(self.record["clients"]):
            texts[name] = hashes[str(client)]
        return texts

    def fixed_text(self) -> str:
        """Texts that are the same on each page, and what the run's record says in words."""
        words = WORDS_FILE.read_text("utf-8")
        words_in_one_line = " ".join(words.split())
        shares = self.shares.iloc[0]
        source = f"{shares['by']}; {shares['of']}"
        return " ".join([words_in_one_line, json.dumps(self.record), source, self.command])


def assert_numbers_are_of_files(run: Path) -> None:
    """Each number of the run's page is in its files."""
    files = FilesOfRun(run)
    numbers_by_name = {}
    for client, name in enumerate(files.record["clients"]):
        numbers_by_name[name] = files.of_partner(client, name)
    numbers_of_sentences = files.of_sentences()
    numbers_of_settings = files.numbers_of_settings()
    texts_of_settings = files.texts_of_settings()
    fixed_text = files.fixed_text()

    section = ""
    num_found = 0
    for line in text_of_page(run / "report.html").splitlines():
        if line in SECTIONS:
            section = line
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        name = cells[0]
        numbers_of_partner = numbers_by_name.get(name, {})
        beginnings = list(filter(line.startswith, numbers_of_sentences))

        if section in numbers_of_partner:
            assert_shows(line.partition(name)[2], numbers_of_partner[section])
        elif section == "Settings" and name in numbers_of_settings:
            assert_shows(cells[1], numbers_of_settings[name])
        elif section == "Settings" and name in texts_of_settings:
            assert cells[1] == str(texts_of_settings[name])
        elif beginnings:
            assert_shows(line, numbers_of_sentences[beginnings[0]])
        else:
            assert_is_fixed(line, cells, fixed_text)
            continue
        num_found += 1

    num_lines = len(numbers_of_sentences) + len(numbers_of_settings) + len(texts_of_settings)
    for numbers_of_partner in numbers_by_name.values():
        num_lines += len(numbers_of_partner)
    assert num_found == num_lines


def assert_is_fixed(line: str, cells: Sequence[str], fixed_text: str) -> None:
    """A line that no rule names has a number only in a fixed text."""
    parts = cells
    if not line.startswith("|"):
        text = line.removeprefix("Source of the values: ")
        parts = text.split(". ")
    for part in parts:
        is_fixed = part.strip(". ") in fixed_text
        assert is_fixed or not numbers_of(part), line
