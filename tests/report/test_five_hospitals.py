"""Pages of five hospitals: with rows of their own, with the same rows at two, and with rows in another unit at one."""

import csv
import json
import re
from collections.abc import Sequence
from decimal import Decimal
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

import flsv
from flsv.cli import main
from flsv.report import Budget, open_run
from flsv.report.shares import shares_of
from helpers.pages import text_of_page
from helpers.runs import fit_by_command, write_config

pytestmark = [pytest.mark.slow, pytest.mark.long]

WORDS_FILE = Path(flsv.__file__).parent / "results/words.yaml"
HOSPITALS = ("Bilbao", "Évora", "Graz", "Lyon", "Turin")
NUM_ROWS = 300
NUM_VALIDATION_ROWS = 800
AMOUNT = 100_000
#: Creatinine in µmol/l for 1 mg/dl, and the number of rows that a hospital has in that unit.
MICROMOLES = 88.4
NUM_OF_OTHER_UNIT = 15


def make_table(num_rows: int, seed: int) -> pd.DataFrame:
    generator = np.random.default_rng(seed)
    age = generator.normal(62, 14, num_rows)
    pressure = generator.normal(128, 18, num_rows)
    creatinine = generator.lognormal(0, 0.4, num_rows)
    risk = 0.24 * (age - 62)
    risk -= 0.08 * (pressure - 128)
    risk += 4 * np.log(creatinine)
    probability = 1 / (1 + np.exp(-risk))
    has_died = generator.random(num_rows) < probability
    return pd.DataFrame(
        {
            "age": age.round(1),
            "pressure": pressure.round(1),
            "creatinine": creatinine.round(2),
            "died": np.where(has_died, "yes", "no"),
        }
    )


def make_tables() -> dict[str, pd.DataFrame]:
    tables = {}
    for seed, name in enumerate(HOSPITALS):
        tables[name] = make_table(NUM_ROWS, seed)
    tables["val"] = make_table(NUM_VALIDATION_ROWS, seed=100)
    return tables


def run_of(folder: Path, tables: dict[str, pd.DataFrame], retrains: bool = True) -> Path:
    """Train these hospitals, retrain them if asked, and write the page with a budget."""
    data_folder = folder / "hospitals"
    data_folder.mkdir(parents=True)
    for name, table in tables.items():
        table.to_csv(data_folder / f"{name}.csv", index=False)
    metric = {
        "class_path": "ShadowShapley",
        "init_args": {"performance": "average_precision"},
    }
    data = {
        "source": str(data_folder),
        "labels": "died",
        "pos_label": "yes",
        "batch_size": 32,
    }
    config = write_config(
        folder / "federation.yaml",
        seed_everything=0,
        data=data,
        trainer={
            "max_epochs": 3,
            "accelerator": "cpu",
            "enable_progress_bar": False,
            "enable_model_summary": False,
        },
        federation={"metrics": {"value": metric}, "reporting": {"figures": 0, "table": False}},
    )
    run = fit_by_command(folder, config)
    if retrains:
        assert main(["retrain", str(run), "-q", "--seeds", "2"]) == 0
    command = ["report", str(run), "--budget", str(AMOUNT), "--currency", "EUR"]
    assert main(command) == 0
    return run


def rows_of_shares(run: Path) -> list[dict[str, str]]:
    with (run / "shares.csv").open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def test_page_refuses_to_pay_for_the_same_rows_at_two_hospitals(tmp_path: Path) -> None:
    tables = make_tables()
    tables["Évora"] = tables["Bilbao"].sample(frac=1, random_state=7)

    run = run_of(tmp_path, tables)

    front, _, _ = text_of_page(run / "report.html").partition("\nAppendix\n")
    assert "Do not pay by these values:" in front
    assert f"Bilbao and Évora ({NUM_ROWS} of {NUM_ROWS} rows are rows of Évora, too)" in front
    assert "EUR" not in front
    for row in rows_of_shares(run):
        assert "Bilbao and Évora" in row["verdict"]
        assert "amount" not in row
        assert bool(row["finding"]) == (row["client_name"] in ("Bilbao", "Évora"))
    retrained = pd.read_csv(run / "retrained.csv", index_col="client_name")
    assert "rows are rows of Évora, too" in retrained.loc["Bilbao", "finding"]


def numbers_of(text: str) -> list[str]:
    """The numbers in a text that are no part of a word, as they stand there."""
    return re.findall(r"(?<![\w.])-?\d[\d,]*(?:\.\d+)?(?!\w)", text)


def assert_shows(line: str, numbers_of_files: Sequence[float]) -> None:
    """Each number of a line is that of the files in its place, rounded to the decimals of the line."""
    shown = [number.rstrip(",").replace(",", "") for number in numbers_of(line)]
    assert len(shown) == len(numbers_of_files), line
    for number, number_of_file in zip(shown, numbers_of_files):
        _, _, decimals = number.partition(".")
        assert float(number) == pytest.approx(number_of_file, abs=0.501 * 10 ** -len(decimals)), (
            line
        )


def fraction_moved(shares_without_seed: np.ndarray) -> float:
    """The jackknife of the page on certainty, for shares ``[2, n]`` without each of two seeds."""
    errors = np.abs(np.diff(shares_without_seed, axis=0)) / 2
    bias_of_two_seeds = np.sqrt(2 / np.pi)
    return float(errors.sum() / np.sqrt(np.pi) / bias_of_two_seeds)


def assert_all_numbers_are_of_files(run: Path) -> None:
    """Each number of a page is in the files of its run, in the row of its partner, or in a fixed text."""
    record = json.loads((run / "run.json").read_text("utf-8"))
    shares = pd.read_csv(run / "shares.csv", index_col="client_name")
    retrained = pd.read_csv(run / "retrained.csv", index_col="client_name")
    contributions = pd.read_csv(run / "contributions.csv")
    contributions = contributions[contributions["class"].isna()]
    last_round = contributions.drop_duplicates(["metric", "client_name"], keep="last")
    last_by_metric = dict(iter(last_round.set_index("client_name").groupby("metric")))
    shares_by_seed = retrained[["share without seed 0", "share without seed 1"]].to_numpy().T
    ((performance),) = record["paid_in"].values()

    numbers_by_section: dict[str, dict[str, list[float]]] = {}
    for client, name in enumerate(record["clients"]):
        share = shares.loc[name]
        in_percent = 100 * share[["share", "share_low", "share_high"]]
        amounts = share[["amount", "amount_low", "amount_high"]]
        interval = ["value", "low", "high"]
        num_rounds = [record["rounds_done"]] * 2
        value = last_by_metric["value"].loc[name, interval]
        weight = last_by_metric["weight"].loc[name, "value"]
        numbers = {
            "front": [*share[interval], *in_percent, *amounts],
            "Who took part": [record["samples"][client], *num_rounds, weight],
            "Training samples of each class": record["class_counts"][client],
            "All values": [*value, *retrained.loc[name, interval]],
        }
        for metric in ("value", "weight"):
            rows = contributions[contributions["metric"] == metric]
            history = rows.pivot(index="round", columns="client_name", values="value")
            numbers[metric] = history.reindex(range(record["rounds_done"])).ffill()[name].tolist()
        for section, numbers_of_client in numbers.items():
            numbers_by_section.setdefault(section, {})[name] = numbers_of_client

    date, _, _ = record["started"].partition("T")
    of_sentences = {
        "5 partners, ": [len(HOSPITALS), record["rounds_done"], *map(int, date.split("-"))],
        "Shares of ": [shares["amount"].sum()],
        "Estimated part of a payment": [100 * fraction_moved(shares_by_seed)],
        "The model's average precision": [performance["start"], performance["end"]],
        "It was evaluated on ": [record["validation"]["rows"]],
        "| round | ": range(1, record["rounds_done"] + 1),
    }
    texts = {
        **record["settings"],
        **{f"package {key}": text for key, text in record["packages"].items()},
    }
    texts |= dict(zip(record["clients"], list(record["hashes"].values())[1:]))
    texts["the server"] = record["hashes"]["server"]
    numbers_of_settings = {f"last {key}": [number] for key, number in record["logged"].items()}
    for column, coding in record["encoder"]["columns"].items():
        numbers_of_settings[column] = [coding["mean"], coding["scale"]]
    fixed_text = " ".join(WORDS_FILE.read_text("utf-8").split()) + json.dumps(record)
    source = f"{shares['by'].iloc[0]}; {shares['of'].iloc[0]}."

    section = "front"
    checked_lines = 0
    for line in text_of_page(run / "report.html").splitlines():
        if line in numbers_by_section or line in ("How to read the values", "Settings"):
            section = line
        cells = [cell.strip() for cell in line.strip("| ").split(" | ")]
        beginnings = [text for text in of_sentences if line.startswith(text)]
        if line.startswith("|") and cells[0] in numbers_by_section.get(section, {}):
            assert_shows(line.partition(cells[0])[2], numbers_by_section[section][cells[0]])
        elif section == "Settings" and cells[0] in numbers_of_settings:
            assert_shows(cells[1], numbers_of_settings[cells[0]])
        elif section == "Settings" and line.startswith("| ") and cells[0] in texts:
            assert cells[1] == str(texts[cells[0]])
        elif beginnings:
            assert_shows(line, of_sentences[beginnings[0]])
        else:
            remaining_text = line.replace(source, "")
            sentences = cells if line.startswith("|") else remaining_text.split(". ")
            for sentence in sentences:
                assert not numbers_of(sentence) or sentence.strip(". ") in fixed_text, line
            continue
        checked_lines += 1
    num_lines_by_client = len(numbers_by_section) + 1  # and its hash
    assert checked_lines >= num_lines_by_client * len(HOSPITALS) + len(of_sentences)


def test_page_pays_for_rows_of_ones_own_and_its_numbers_are_those_of_its_files(
    tmp_path: Path,
) -> None:
    run = run_of(tmp_path, make_tables())

    front, _, _ = text_of_page(run / "report.html").partition("\nAppendix\n")
    assert "Do not pay" not in front
    rows = rows_of_shares(run)
    assert sum(Decimal(row["amount"]) for row in rows) == AMOUNT
    assert_all_numbers_are_of_files(run)


def test_some_rows_in_another_unit_are_a_sentence_of_the_verdict(tmp_path: Path) -> None:
    tables = make_tables()
    tables["Graz"].loc[: NUM_OF_OTHER_UNIT - 1, "creatinine"] *= MICROMOLES

    run = run_of(tmp_path, tables, retrains=False)

    reasons = shares_of(open_run(run), Budget(AMOUNT)).verdict.reasons
    assert "Graz, creatinine (15 of 300 values are " in reasons["doubts"]
    assert reasons["doubts"] in text_of_page(run / "report.html")
    findings = {row["client_name"]: row["finding"] for row in rows_of_shares(run)}
    assert findings.pop("Graz").startswith("creatinine: 15 of 300 values are ")
    assert set(findings.values()) == {""}
