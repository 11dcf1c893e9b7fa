"""Pages of five hospitals: with rows of their own, with the same rows at two, and with rows in another unit at one."""

import csv
from decimal import Decimal
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from flsv.cli import main
from flsv.report import Budget, open_run
from flsv.report.shares import shares_of
from helpers.page_numbers import assert_numbers_are_of_files
from helpers.pages import text_of_page
from helpers.runs import fit_by_command, write_config

pytestmark = [pytest.mark.slow, pytest.mark.long]

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


def test_page_pays_for_rows_of_ones_own_and_its_numbers_are_those_of_its_files(
    tmp_path: Path,
) -> None:
    run = run_of(tmp_path, make_tables())

    front, _, _ = text_of_page(run / "report.html").partition("\nAppendix\n")
    assert "Do not pay" not in front
    amounts = [Decimal(row["amount"]) for row in rows_of_shares(run)]
    assert sum(amounts) == AMOUNT
    assert_numbers_are_of_files(run)


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
