"""What the data have said reaches the record, the page, the shares and the verdict, for each kind of data warning."""

import json
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from flsv.cli import main
from flsv.data import FederatedDataModule, Splits
from flsv.federation.data_events import events_of_tables
from flsv.payment import Budget, write_report
from flsv.payment.shares import shares_of
from flsv.results import open_run
from flsv.results.text import MESSAGES
from helpers import warns
from helpers.pages import text_of_page
from helpers.runs import change_record, fit_by_command, make_game, read_rows, write_config

CLIENTS = ("Bilbao", "Lyon", "Turin")
BUDGET = Budget(900.0, by="sv")
#: As ``run.json`` has them.
EVENTS = {
    "column": {"column": "age", "text": "values are 12 times the others'"},
    "shared": {
        "column": "samples",
        "text": "120 of 120 are also samples of Lyon",
        "others": [1],
    },
    "validation": {
        "column": "samples",
        "kind": "validation",
        "text": "30 of 60 validation samples are also training samples",
    },
}

pytestmark = pytest.mark.filterwarnings("ignore:samples of Bilbao")


def make_run_with_data_warning(folder: Path, kind: str) -> Path:
    event = {"client": 0, "what": "data_warning", "first": 0, "last": 0, **EVENTS[kind]}
    run = make_game(folder, {"sv": [0.3, 0.2, 0.1]})
    return change_record(run, clients=list(CLIENTS), events=[event])


@pytest.mark.parametrize("kind", EVENTS)
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
    assert ("data_warnings" in reasons) == (kind == "column")
    assert ("shared_samples" in reasons) == (kind == "shared")
    assert ("validation_copies" in reasons) == (kind == "validation")
    assert ("amount" in row_of_bilbao) == (kind == "column")

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
    assert finding_of_bilbao == f"samples: {EVENTS['shared']['text']}"
    assert finding_of_lyon == "samples: some are also samples of Bilbao"
    assert finding_of_turin == ""


@pytest.mark.parametrize(
    ("entry", "sentence"),
    [
        ({"trained_on": 0}, "60 validation samples, which no partner trained on: val.csv."),
        ({"trained_on": 7}, "60 validation samples: val.csv. 7 of them have the same values as"),
        ({"trained_on": None}, "60 validation samples: val.csv. They were not compared with"),
        ({}, "60 validation samples: val.csv. They were not compared with"),
    ],
)
def test_page_says_whether_partners_trained_on_validation_samples(tmp_path, entry, sentence):
    run = make_game(tmp_path, {"sv": [0.3, 0.2, 0.1]})
    change_record(run, validation={"of": "val.csv", "rows": 60, **entry})

    assert f"It was evaluated on {sentence}" in text_of_page(write_report(run))


def make_table(seed: int) -> pd.DataFrame:
    ages = np.random.default_rng(seed).normal(50, 10, 120)
    return pd.DataFrame({"age": ages, "ill": np.where(ages > 50, "yes", "no")})


def test_another_unit_in_a_table_is_an_event_of_its_client():
    tables = {name: make_table(seed) for seed, name in enumerate(CLIENTS)}
    tables["Lyon"]["age"] *= 12
    data = FederatedDataModule(clients=tables, labels="ill", splits=Splits(server_val=0.0))
    with warns("The tables may contain errors"):
        data.setup("fit")

    (event,) = events_of_tables(data)

    assert (event.client, event.what, event.column) == (1, "data_warning", "age")


def write_tables_with_shared_rows(folder: Path):
    folder.mkdir()
    for name in CLIENTS:
        seed = 0 if name == "Turin" else 1  # Bilbao and Lyon have the same rows
        make_table(seed).to_csv(folder / f"{name}.csv", index=False)
    make_table(0).to_csv(folder / "val.csv", index=False)  # Turin's


@pytest.mark.slow
def test_a_fit_records_and_prints_its_data_warnings(tmp_path, capsys):
    write_tables_with_shared_rows(tmp_path / "clinics")
    config = write_config(
        tmp_path / "federation.yaml",
        seed_everything=0,
        data={
            "source": str(tmp_path / "clinics"),
            "labels": "ill",
        },
        trainer={"max_epochs": 1, "accelerator": "cpu", "enable_progress_bar": False},
        federation={
            "metrics": {"value": "ShadowShapley"},
            "reporting": {"figures": 0},
        },
    )

    with warns(
        "samples of Turin: 120 of 120 validation samples are also training samples, and 1 mo"
    ):
        run = fit_by_command(tmp_path, config)

    printed_text = " ".join(capsys.readouterr().out.split())
    assert "Bilbao and Lyon (" in printed_text
    assert "Turin (120 of 120 validation samples" in printed_text
    record = json.loads((run / "run.json").read_text())
    assert record["validation"]["trained_on"] == 120
    event_of_validation, event_of_copies = record["events"]
    assert event_of_validation["client"] == 2
    assert event_of_copies["what"] == "data_warning"
    assert [event_of_copies["client"], *event_of_copies["others"]] == [0, 1]
    verdict = shares_of(open_run(run), Budget(900.0)).verdict
    assert {"shared_samples", "validation_copies"} <= verdict.reasons.keys()
    assert verdict.forbids_payment

    command = ["retrain", str(run), "--trainings", "singles", "--seeds", "1"]
    assert main(command) == 0
    verdict = shares_of(open_run(run), Budget(900.0)).verdict
    assert "are also samples of Lyon" in verdict.reasons["shared_samples"]
    assert "Turin (120 of 120" in verdict.reasons["validation_copies"]
