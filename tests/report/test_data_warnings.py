"""What the data have said reaches the record, the page, the shares and the verdict, for each kind of data warning."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch

from flsv.cli import main
from flsv.data import FederatedDataModule, Splits
from flsv.federation.data_events import events_of_copies, events_of_tables
from flsv.report import Budget, write_report
from flsv.report.shares import shares_of
from flsv.results import open_run
from flsv.results.text import MESSAGES
from helpers import warns
from helpers.pages import text_of_page
from helpers.runs import change_record, fit_by_command, make_game, read_rows, write_config

NUM_ROWS = 120
CLIENTS = ("Bilbao", "Lyon", "Turin")
BUDGET = Budget(900.0, by="sv")

pytestmark = pytest.mark.filterwarnings("ignore:samples of Bilbao")

Tables = dict[str, pd.DataFrame]


def make_tables() -> Tables:
    tables = {}
    for seed, name in enumerate(CLIENTS):
        generator = np.random.default_rng(seed)
        tables[name] = pd.DataFrame(
            {
                "age": generator.normal(50, 10, NUM_ROWS),
                "temperature": generator.normal(37, 0.5, NUM_ROWS),
                "died": np.resize(["no", "yes"], NUM_ROWS),
            }
        )
    return tables


def remove_half_of_ages(tables: Tables):
    tables["Bilbao"].loc[::2, "age"] = np.nan


def count_age_in_months(tables: Tables):
    tables["Bilbao"]["age"] *= 12


def repeat_rows(tables: Tables):
    table = tables["Bilbao"]
    tables["Bilbao"] = pd.concat([table, table[:30]])


def copy_lyons_rows(tables: Tables):
    table_of_lyon = tables["Lyon"]
    tables["Bilbao"] = table_of_lyon.sample(frac=1, random_state=0)


FAULTS = {
    "missing": remove_half_of_ages,
    "unit": count_age_in_months,
    "repeated": repeat_rows,
    "shared": copy_lyons_rows,
}


def make_data(tables: Tables) -> FederatedDataModule:
    """The tables' numbers as arrays."""
    clients = {}
    for name, table in tables.items():
        numbers = table.select_dtypes("number").to_numpy()
        features = torch.tensor(numbers, dtype=torch.float32)
        labels = torch.zeros(len(features), dtype=torch.long)
        clients[name] = (features, labels)

    validation_features = torch.zeros(2, 3)
    validation_labels = torch.tensor([0, 1])
    validation = (validation_features, validation_labels)
    data = FederatedDataModule(clients=clients, val=validation, splits=Splits())
    data.setup("fit")
    return data


def events_of_fault(kind: str) -> list[dict[str, Any]]:
    """The events of the one data warning about tables."""
    tables = make_tables()
    FAULTS[kind](tables)
    if kind in ("repeated", "shared"):
        data = make_data(tables)
        return [asdict(event) for event in events_of_copies(data)]

    data = FederatedDataModule(
        clients=tables,
        labels="died",
        splits=Splits(server_val=0.0),
    )
    with warns("The tables may contain errors"):
        data.setup("fit")
    events = [asdict(event) for event in events_of_tables(data)]
    assert len(events) == 1
    return events


def make_run_with_data_warning(folder: Path, kind: str) -> Path:
    run = make_game(folder, {"sv": [0.3, 0.2, 0.1]})
    return change_record(run, clients=list(CLIENTS), events=events_of_fault(kind))


@pytest.mark.fast_rows
@pytest.mark.parametrize("kind", FAULTS)
def test_each_data_warning_is_on_the_page_in_the_shares_and_without_names_on_pages_of_one_client(
    tmp_path, kind
):
    folder = make_run_with_data_warning(tmp_path, kind)
    (data_warning,) = open_run(folder).record["events"]

    page = text_of_page(write_report(folder, budget=BUDGET))
    row_of_bilbao, *_ = read_rows(folder / "shares.csv")
    verdict = shares_of(open_run(folder), BUDGET).verdict
    reasons = verdict.reasons

    assert data_warning.text in page
    assert data_warning.text in row_of_bilbao["finding"]
    for reason in reasons.values():
        assert reason in page
        assert reason in row_of_bilbao["verdict"]
    assert ("data_warnings" in reasons) == (kind != "shared")
    assert ("shared_samples" in reasons) == (kind == "shared")
    assert ("amount" in row_of_bilbao) == (kind != "shared")

    sentences_for_one = MESSAGES["against_for_one"]
    for client in CLIENTS:
        page = text_of_page(write_report(folder, client=client, budget=BUDGET))

        assert verdict.title in page
        assert data_warning.text not in page
        for name, text in reasons.items():
            assert sentences_for_one.get(name, text) in page, name
        for other_client in set(CLIENTS) - {client}:
            assert other_client not in page


def test_both_partners_with_the_same_rows_are_named(tmp_path):
    folder = make_run_with_data_warning(tmp_path, "shared")

    shares = shares_of(open_run(folder), BUDGET)

    first_reason = next(iter(shares.verdict.reasons))
    assert first_reason == "shared_samples"  # it forbids a payment
    assert "Bilbao and Lyon (" in shares.verdict.reasons["shared_samples"]
    finding_of_bilbao, finding_of_lyon, finding_of_turin = shares.table["finding"]
    assert finding_of_bilbao == f"samples: {NUM_ROWS} of {NUM_ROWS} are also samples of Lyon"
    assert finding_of_lyon == "samples: some are also samples of Bilbao"
    assert finding_of_turin == ""


def write_table_with_shared_samples(folder: Path):
    folder.mkdir()
    tables = make_tables()
    copy_lyons_rows(tables)
    for name, table in tables.items():
        is_old = table["age"] > 50
        table["ill"] = np.where(is_old, "yes", "no")
        table.to_csv(folder / f"{name}.csv", index=False)


@pytest.mark.slow
def test_a_fit_records_and_prints_its_data_warnings(tmp_path, capsys):
    write_table_with_shared_samples(tmp_path / "clinics")
    config = write_config(
        tmp_path / "federation.yaml",
        seed_everything=0,
        data={
            "source": str(tmp_path / "clinics"),
            "labels": "ill",
            "splits": {"server_val": 0.3},
        },
        trainer={"max_epochs": 1, "accelerator": "cpu", "enable_progress_bar": False},
        federation={
            "metrics": {"value": "ShadowShapley"},
            "reporting": {"figures": 0},
        },
    )

    with warns("are also samples of Lyon"):
        run = fit_by_command(tmp_path, config)

    printed_words = capsys.readouterr().out.split()
    assert "Bilbao and Lyon (" in " ".join(printed_words)
    record = json.loads((run / "run.json").read_text())
    (event,) = record["events"]
    assert event["what"] == "data_warning"
    assert event["kind"] == "shared"
    assert [event["client"], *event["others"]] == [0, 1]
    verdict = shares_of(open_run(run), Budget(900.0)).verdict
    assert "shared_samples" in verdict.reasons
    assert verdict.forbids_payment

    command = ["retrain", str(run), "--trainings", "singles", "--seeds", "1"]
    assert main(command) == 0
    verdict = shares_of(open_run(run), Budget(900.0)).verdict
    assert "are also samples of Lyon" in verdict.reasons["shared_samples"]
