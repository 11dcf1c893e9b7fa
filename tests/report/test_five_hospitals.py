"""The page of five hospitals."""

from decimal import Decimal
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from flsv.cli import main
from helpers.page_numbers import assert_numbers_are_of_files
from helpers.pages import text_of_page
from helpers.runs import fit_by_command, read_rows, write_config

pytestmark = [pytest.mark.slow, pytest.mark.long]

HOSPITALS = ("Bilbao", "Évora", "Graz", "Lyon", "Turin")
NUM_ROWS = 300
NUM_VALIDATION_ROWS = 800
AMOUNT = 100_000


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


def test_page_pays_for_rows_of_ones_own_and_its_numbers_are_those_of_its_files(
    tmp_path: Path,
) -> None:
    data_folder = tmp_path / "hospitals"
    data_folder.mkdir(parents=True)
    for name, table in make_tables().items():
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
        tmp_path / "federation.yaml",
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
    run = fit_by_command(tmp_path, config)
    assert main(["retrain", str(run), "-q", "--seeds", "2"]) == 0
    command = ["report", str(run), "--budget", str(AMOUNT), "--currency", "EUR"]
    assert main(command) == 0

    front, _, _ = text_of_page(run / "report.html").partition("\nAppendix\n")
    assert "Do not pay" not in front
    amounts = [Decimal(row["amount"]) for row in read_rows(run / "shares.csv")]
    assert sum(amounts) == AMOUNT
    assert_numbers_are_of_files(run)
