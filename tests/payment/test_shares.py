"""Shares of a budget: by which values, to the last cent, with their intervals, on every page the same."""

import math
import re
from decimal import Decimal
from pathlib import Path

import pytest
import torch
from scipy import stats

from flsv import allocate
from flsv.cli import main
from flsv.payment import Budget, write_report
from flsv.payment.shares import shares_of
from flsv.results import open_run
from flsv.results.basis import basis_of
from flsv.results.text import MESSAGES, NO_NUMBER
from helpers import refused
from helpers.pages import text_of_page, words_in
from helpers.retrained import add_retrained_runs, make_trained
from helpers.runs import (
    add_intervals,
    make_fault_event,
    make_game,
    make_run,
    read_rows,
)

NAN = float("nan")


SHARED = [0.3, 0.25, -0.1]  # values of Boston, Lyon and Graz


def read_share_rows(folder: Path) -> list[dict[str, str]]:
    return read_rows(folder / "shares.csv")


def read_share_column(folder: Path, column: str) -> list[str]:
    return [row[column] for row in read_share_rows(folder)]


@pytest.mark.parametrize("rule", ["zero", "shift", "softmax"])
def test_amounts_sum_to_the_budget(tmp_path, rule):
    run = open_run(make_game(tmp_path, {"sv": SHARED}))

    table = shares_of(run, Budget(1000.01, "sv", rule)).table

    amounts = table["amount"].tolist()
    decimals = [Decimal(str(amount)) for amount in amounts]
    assert sum(decimals) == Decimal("1000.01")

    values = torch.tensor(run.final("sv"), dtype=torch.float64)
    allocated = allocate(values, 1000.01, rule, unit=0.01)
    assert amounts == allocated.tolist()


def test_pages_and_file_have_the_same_amounts(tmp_path, capsys):
    folder = make_game(tmp_path / "run", {"sv": SHARED})
    options = "--budget 1000.01 --rule shift --currency EUR"
    command = ["report", str(folder), *options.split()]

    assert main(command) == 0

    printed = words_in(capsys.readouterr().out)
    assert "with one reservation: No model was trained" in printed
    outcome = read_share_rows(folder)
    assert outcome[0]["verdict"] in printed

    budget = Budget(
        1000.01,
        by="sv",
        rule="shift",
        currency="EUR",
    )
    expected = shares_of(open_run(folder), budget)
    expected_amounts = expected.table["amount"].tolist()

    amounts = [float(row["amount"]) for row in outcome]
    assert amounts == expected_amounts
    assert {row["of"] for row in outcome} == {"seed 77123, 3 of 5 rounds"}

    shown = [f"{amount:,.2f} EUR" for amount in expected_amounts]
    text = text_of_page(folder / "report.html")

    expected_parts = [
        "Shares of 1,000.01 EUR",
        "sv; seed 77123, 3 of 5 rounds",
        *shown,
    ]
    for part in expected_parts:
        assert part in text
    assert main([*command, "--client", "1"]) == 0

    client_text = text_of_page(folder / "clients" / "Lyon" / "report.html")
    assert [amount in client_text for amount in shown] == [False, True, False]
    assert "Your share of 1,000.01 EUR" in client_text
    assert not list((folder / "clients").rglob("shares.csv"))


@pytest.mark.parametrize(
    ("facts", "values_name", "message"),
    [
        ({}, "cssv", r"Budget\(by='cssv'\): .* has values by sv"),
        ({}, "retrained", "flsv retrain RUN adds retrained"),
        ({"metrics": {}}, None, "no contribution was measured"),
    ],
)
def test_budget_without_a_basis_is_refused(tmp_path, facts, values_name, message):
    folder = make_game(tmp_path, {"sv": SHARED}, **facts)
    with refused(message):
        write_report(folder, budget=Budget(100.0, values_name))
    assert not [*folder.glob("report.*"), *folder.glob("shares.csv")]


def test_shares_use_retrained_values_first_and_name_their_rounds(tmp_path):
    folder = make_game(tmp_path, {"sv": SHARED})
    add_retrained_runs(
        folder,
        [0.3, 0.1, math.nan],
        seeds=[5, 6],
        rounds=1,
    )
    budget = Budget(100.0, currency="JPY")
    page = write_report(folder, budget=budget)
    text = text_of_page(page).replace("|  |", "| |")

    assert (
        "Source of the values: retraining, measured by accuracy; seeds 5 and 6, 1 of 5 rounds."
        in text
    )

    cell = re.search(
        r"\| Boston \| 0.300 \[0.286 to 0.314\] \| \| 75.0 % "
        r"\[([\d.]+) to ([\d.]+)\] \| 75 JPY \[72 to 78\] \|",
        text,
    )

    assert cell is not None
    # Two million draws of NumPy, with the scale of Student's t with 3 degrees of freedom.
    assert float(cell[1]) == pytest.approx(72.4, abs=0.1)
    assert float(cell[2]) == pytest.approx(77.7, abs=0.1)
    assert f"| Graz | {NO_NUMBER} | {NO_NUMBER} | {NO_NUMBER} | {NO_NUMBER} |" in text
    front, _, _ = text.partition("\nAppendix\n")
    assert MESSAGES["dash"] in front

    rows = read_share_rows(folder)
    assert [row["amount"] for row in rows] == ["75", "25", ""]
    assert [row["share"] for row in rows] == ["0.750000", "0.250000", ""]
    assert "finding" not in rows[0]

    client_page = write_report(folder, 2, budget=Budget(100.0))
    client_text = text_of_page(client_page)
    assert MESSAGES["dash"] in client_text
    basis = basis_of(open_run(folder), "sv")
    assert basis.key == "sv"  # unless another is asked for


def test_outliers_are_reported_without_changing_amounts(tmp_path):
    plain = make_game(tmp_path / "plain", {"sv": SHARED})
    events = [make_fault_event(2, 1, 2)]
    suspicious = make_game(tmp_path / "found", {"sv": SHARED}, events=events)

    for folder in (plain, suspicious):
        write_report(folder, budget=Budget(100.0))

    amounts = read_share_column(suspicious, "amount")
    assert amounts == read_share_column(plain, "amount")

    finding = "updates far too large in 1 of 2 rounds: averaged into the model, but not measured"
    findings = read_share_column(suspicious, "finding")
    assert findings == ["", "", finding]
    assert "finding" not in read_share_rows(plain)[0]

    text = text_of_page(suspicious / "report.html")
    front, _, _ = text.partition("\nAppendix\n")
    for sentence in (finding, MESSAGES["findings"]):
        assert sentence in front


def test_intervals_of_shares_come_from_joint_draws_of_all_values(tmp_path):
    game = make_game(tmp_path, {"sv": [3.0, 1.0]})
    folder = add_intervals(make_trained(game), "sv", 1)

    outcome = shares_of(open_run(folder), Budget(100.0))
    low = outcome.table["share_low"]
    high = outcome.table["share_high"]
    low_of_boston, low_of_lyon = low
    high_of_boston, high_of_lyon = high

    assert low_of_boston < 0.75 < high_of_boston
    # What one client has the other has not.
    assert low_of_boston == pytest.approx(1 - high_of_lyon, abs=1e-4)
    assert high_of_boston == pytest.approx(1 - low_of_lyon, abs=1e-4)

    low_amounts = outcome.table["amount_low"].tolist()
    assert low_amounts == [round(100 * share, 2) for share in low]

    game_of_boston = make_game(tmp_path / "alone", {"sv": [3.0, NAN]})
    alone = shares_of(open_run(game_of_boston), Budget(100.0))

    assert alone.missing == [1]
    intervals = alone.table[["share_low", "share_high"]]
    assert intervals.isna().all(axis=None)


@pytest.mark.parametrize(
    ("kind", "quantile"),
    [(None, stats.norm.ppf(0.95)), (4.0, stats.t.ppf(0.95, df=4)), ("ends", math.inf)],
)
def test_shares_have_intervals_only_if_those_of_values_tell_standard_errors(
    tmp_path, kind, quantile
):
    game = make_game(tmp_path, {"sv": [3.0, 1.0]}, intervals={"sv": kind})
    folder = add_intervals(make_trained(game), "sv", 1)
    # Those of a bootstrap are no normal intervals, even if they are symmetric.
    has_standard_errors = math.isfinite(quantile)

    basis = basis_of(open_run(folder))
    assert basis.estimates["low"].to_list() == [2, 0]
    (errors,) = basis.inputs.errors
    if has_standard_errors:
        assert errors.covariance.diag().sqrt().tolist() == pytest.approx([1 / quantile] * 2)

    page = write_report(folder, budget=Budget(100.0))
    rows = read_share_rows(folder)
    assert [row["amount"] for row in rows] == ["75.00", "25.00"]
    assert ("share_low" in rows[0]) == has_standard_errors
    text = words_in(text_of_page(page))
    for name, is_shown in {"ends": not has_standard_errors, "shares": has_standard_errors}.items():
        assert (words_in(MESSAGES["intervals"][name]) in text) == is_shown


def test_what_the_verdict_forbids_stands_nowhere(tmp_path, capsys):
    folder = make_run(tmp_path)  # its only metric is unsuitable
    (folder / "shares.csv").write_text("client,amount\n1,100.00\n")  # of an earlier report

    assert main(["report", str(folder), "--budget", "100"]) == 0

    sentence = MESSAGES["against"]["unsuitable"].format("cssv")
    verdict = f"Do not pay by these values: {sentence}"
    assert verdict in words_in(capsys.readouterr().out)
    rows = read_share_rows(folder)
    assert {row["verdict"] for row in rows} == {verdict}
    assert not {"share", "amount"} & rows[0].keys()

    budget = Budget(100.0)
    outcome = shares_of(open_run(folder), budget)
    assert outcome.table["amount"].isna().all()

    for client in (None, 1):
        page = write_report(folder, client, budget=budget)
        front, _, _ = text_of_page(page).partition("\nAppendix\n")
        assert sentence in front
        assert "amount" not in front
        assert "Shares of" not in front


def test_page_with_a_name_of_its_own_overwrites_no_other_file(tmp_path):
    folder = make_game(tmp_path, {"sv": [0.4, 0.1]})
    write_report(folder, budget=Budget(100.0))
    paths = list(folder.glob("*.csv"))
    tables = {path: path.read_bytes() for path in paths}

    for name in ("march", "contributions"):
        write_report(folder, out=folder / f"{name}.html", budget=Budget(500.0))

    tables_afterwards = {path: path.read_bytes() for path in paths}
    assert tables_afterwards == tables

    names = {path.name for path in folder.glob("march*")}
    assert names == {"march.html", "march_shares.csv"}


@pytest.mark.parametrize(
    ("currency", "text"),
    [
        ("", "1,234.50"),
        ("EUR", "1,234.50 EUR"),
        ("jpy", "1,234 jpy"),
        ("KWD", "1,234.500 KWD"),
    ],
)
def test_amounts_have_the_decimals_of_their_currency(currency, text):
    assert Budget(5.0, currency=currency).text(1234.5) == text


@pytest.mark.parametrize(
    ("amount", "currency", "decimals"),
    [
        (10.5, "JPY", 0),
        (10.005, "EUR", 2),
    ],
)
def test_budget_with_more_decimals_than_its_currency_is_refused(amount, currency, decimals):
    with refused(f"expected {decimals} decimals at most"):
        Budget(amount, currency=currency)
