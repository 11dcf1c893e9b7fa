"""``flsv data``: what each client has, before training."""

import re
import warnings
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import yaml

from flsv.cli import main
from flsv.data import IIDPartitioner
from flsv.results import open_run
from flsv.retraining.price import PriceList
from flsv.tables.checks import notes_on_table
from flsv.tables.command import notes_on_data
from helpers import pages, warns
from helpers.data import set_up_data
from helpers.runs import fit_by_command

DICTIONARY = {
    "excluded": ["insurer", "patient", "admitted"],
    "columns": {"discharged": {"kind": "days since admitted"}},
}


def read_tutorial(title):
    """The text of a file that the tutorial shows."""
    page = Path(__file__).parents[2] / "docs/tutorials/hospitals.md"
    blocks = pages.blocks_of_page(page.read_text())
    (file,) = [block for block in blocks if block.title == title]
    return file.text


@pytest.fixture
def clinics(tmp_path, monkeypatch):
    """The tables of the tutorial's clinics by name, whose script writes clinics/Boston.csv and others."""
    monkeypatch.chdir(tmp_path)
    exec(read_tutorial("clinics.py"))
    return {name: pd.read_csv(f"clinics/{name}.csv") for name in CLINICS}


CLINICS = ("Boston", "Lyon", "Osaka", "Quito")
CONFIG_OF_CLINICS = "data:\n  source: clinics\n  labels: died\n"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("terminal_width", "names"), [("80", list(CLINICS)), ("50", ["least", "most"])]
)
def test_data_command_prints_and_writes_what_each_clinic_has(
    terminal_width, names, clinics, monkeypatch, capsys
):
    monkeypatch.setenv("COLUMNS", terminal_width)
    config = f"{CONFIG_OF_CLINICS}  dictionary: {DICTIONARY}\n"
    Path("federation.yaml").write_text(config)
    assert main(["data", "--config", "federation.yaml", "--out", "cards"]) == 0
    printed = capsys.readouterr().out

    columns = pd.read_csv("cards/columns.csv", index_col="column")
    for name, table in clinics.items():
        percent_died = 100 * (table["died"] == "yes").mean()
        printed_percent = re.search(rf"^{name} .* (\S+) \S+$", printed, re.MULTILINE)[1]
        assert float(printed_percent) == pytest.approx(percent_died, abs=0.06)
        for column in ("pressure", "creatinine", "age"):
            share_missing = table[column].isna().mean()
            assert columns.loc[column, name] == pytest.approx(share_missing, abs=1e-6)
    assert pd.read_csv("cards/samples.csv")["client"].tolist() == list(CLINICS)
    assert columns.loc["discharged", "is read as"] == "days since admitted"
    assert "The server validates on the validation part of clinics, 1,000 samples." in printed
    assert "Rare: yes (" in printed
    assert "creatinine Osaka 100 % of the values are missing" in printed

    assert_fits_terminal(printed, int(terminal_width), names)


def assert_fits_terminal(printed, terminal_width, names):
    """Assert that the table of columns has these heads and unbroken rows."""
    _title, _, begins_with_table = printed.partition("share of values that are missing\n\n")
    table, _, _ = begins_with_table.partition("\n\n")
    heads, _name_of_index, *rows = table.splitlines()
    columns_read = [row.split()[0] for row in rows]

    assert heads.split() == ["is", "read", "as", *names]
    assert columns_read == ["discharged", "age", "sex", "pressure", "creatinine"]
    assert max(map(len, table.splitlines())) <= terminal_width


def test_tables_of_data_fit_a_terminal_of_80_columns(monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "80")

    assert main(["data", "--config", "digits"]) == 0

    table, _, _ = capsys.readouterr().out.partition("The server")
    assert table.count("samples") == 2  # in the title and in the first part
    assert max(map(len, table.splitlines())) <= 80


def write_visits():
    """A table whose names and cells could be formulas."""
    table = pd.DataFrame({"=1+1": range(40), "clinic": ["=A1", "@A1"] * 20, "ill": ["n", "y"] * 20})
    table.to_csv("visits.csv", index=False)


@pytest.mark.parametrize(
    "data",
    [
        "{source: visits.csv, labels: ill, groups: clinic, files: {root: .}}",
        "{source: [visits.csv, visits.csv], labels: ill, files: {root: .}}",
    ],
)
def test_data_command_runs_no_module_beside_a_table(tmp_path, monkeypatch, data):
    monkeypatch.chdir(tmp_path)
    write_visits()
    Path("visits.py").write_text("open('it ran', 'w')\n")
    Path("federation.yaml").write_text(f"data: {data}\n")

    assert main(["data", "--config", "federation.yaml"]) == 0

    assert not Path("it ran").exists()


def test_data_notes_name_a_class_that_is_missing_at_a_client(clinics):
    boston = clinics["Boston"][["age", "died"]]
    lyon = clinics["Lyon"][["age", "died"]].assign(died="no")

    data = set_up_data(clients={"Boston": boston, "Lyon": lyon}, labels="died")

    assert "No training sample has the class yes at Lyon." in notes_on_data(data)


def make_ward(seed, outcomes):
    """Forty patients: three columns say nothing of their outcomes, one has one value, and one alone tells these."""
    generator = np.random.default_rng(seed)
    outcome = np.arange(40) % len(outcomes)
    return pd.DataFrame(
        {
            "age": generator.normal(60, 9, 40).round(1),
            "sex": generator.choice(["f", "m"], 40),
            "lab": generator.normal(5, 1, 40).round(2),
            "study": 7,
            "ward left to": np.array(["home", "icu", "morgue"])[outcome],
            "outcome": np.array(outcomes)[outcome],
        }
    )


@pytest.mark.parametrize("outcomes", [["well", "ill"], ["well", "ill", "dead"]])
def test_notes_on_a_table_name_rows_twice_columns_of_one_value_and_columns_that_tell_the_label(
    outcomes,
):
    boston = make_ward(0, outcomes)
    lyon = make_ward(1, outcomes).assign(sex="f")
    osaka = make_ward(2, outcomes)
    number_of_outcome = osaka["outcome"].map(outcomes.index)
    osaka["lab"] = osaka["lab"] / 100 + number_of_outcome
    clients = {"Boston": pd.concat([boston, boston[:3]]), "Lyon": lyon, "Osaka": osaka}

    data = set_up_data(clients=clients, labels="outcome", server_val=0.0)

    assert notes_on_table(data) == [
        "Rows that repeat another one of the same client in all columns that are used: 3 of 43 at Boston.",
        "Columns with one value: sex at Lyon, study.",
        "Columns that alone tell the label: lab at Osaka, ward left to. Exclude those that are not known before the "
        "label.",
    ]


def test_data_without_a_table_and_a_column_that_tells_few_rows_have_no_notes():
    arrays = np.zeros((20, 2)), np.arange(20) % 2
    few_rows = make_ward(0, ["well", "ill"])[:9].drop(columns="study")

    assert notes_on_table(set_up_data(arrays, IIDPartitioner(2), server_val=0.0)) == []
    assert notes_on_table(set_up_data(few_rows, IIDPartitioner(2), labels="outcome")) == []


@pytest.mark.slow
def test_questions_are_answered_in_the_written_dictionary(clinics, capsys):
    Path("federation.yaml").write_text(CONFIG_OF_CLINICS)
    command = ["data", "--config", "federation.yaml"]
    assert main(command) == 2
    assert "meaning of some columns is not clear" in capsys.readouterr().err

    assert main([*command, "--write", "dictionary.yaml"]) == 0
    assert re.search("[?] admitted: .* has dates, such as", capsys.readouterr().out)

    command_with_dictionary = [*command, "--data.dictionary=dictionary.yaml"]
    assert main(command_with_dictionary) == 2

    text_with_questions = Path("dictionary.yaml").read_text()
    Path("dictionary.yaml").write_text(text_with_questions.replace('"? ', '"excluded: '))
    assert main(command_with_dictionary) == 0


def make_hospital(seed, num_rows):
    generator = np.random.default_rng(seed)
    columns = {
        "case": 100_000 * (seed + 1) + generator.permutation(num_rows),
        "age": generator.normal(64, 13, num_rows).round(),
        "creatinine": generator.lognormal(0, 0.4, num_rows).round(2),
        "sex": generator.choice(["f", "m"], num_rows),
        "died": generator.choice(["no", "no", "yes"], num_rows),
    }
    return pd.DataFrame(columns)


@pytest.fixture
def options_of_hospitals(tmp_path, monkeypatch):
    """Options that name three hospitals, of which one has rows twice and one has another unit."""
    monkeypatch.chdir(tmp_path)
    aachen = make_hospital(seed=0, num_rows=300)
    bonn = make_hospital(seed=1, num_rows=250)
    celle = make_hospital(seed=2, num_rows=200)

    first_rows_of_bonn = bonn.iloc[:60]
    bonn_with_rows_twice = pd.concat([bonn, first_rows_of_bonn])
    celle["creatinine"] *= 88.4  # µmol/l instead of mg/dl
    Path("hospitals").mkdir()
    for name, table in {"Aachen": aachen, "Bonn": bonn_with_rows_twice, "Celle": celle}.items():
        table.to_csv(f"hospitals/{name}.csv", index=False)
    return ["--data.source=hospitals", "--data.labels=died"]


def test_data_command_asks_about_a_column_of_identifiers(options_of_hospitals, capsys):
    assert main(["data", *options_of_hospitals]) == 2

    assert "case: hospitals/Aachen.csv has 300 different values" in capsys.readouterr().err


def test_data_command_warns_of_other_units_and_repeated_rows(options_of_hospitals, capsys):
    dictionary = "--data.dictionary={excluded: [case]}"

    assert main(["data", *options_of_hospitals, dictionary, "--out=cards"]) == 0

    data_warnings = pd.read_csv("cards/data_warnings.csv").set_index(["site", "column"])
    (of_unit,) = data_warnings.loc[[("Celle", "creatinine")], "data_warning"]
    of_validation, of_rows = data_warnings.loc[[("Bonn", "samples")], "data_warning"]
    assert re.search(r"values are \d+\.?\d* times those elsewhere: are they in another", of_unit)
    assert re.search(r"\d+ of 81 validation samples are also training samples", of_validation)
    assert re.search(r"\d+ of \d+ occur more than once", of_rows)
    printed = capsys.readouterr().out
    assert "occur more than once" in printed
    assert "Rows that repeat another one of the same client" in printed


def test_warnings_to_users_are_printed_in_one_line(tmp_path):
    file = tmp_path / "t.csv"
    columns = {"age": range(60), "ill": ["", *[0, 1] * 29, 0]}
    pd.DataFrame(columns).to_csv(file, index=False)

    with warns("are excluded") as records:
        assert main(["data", f"--data.source={file}", "--data.labels=ill"]) == 0

    # Old packages warn of newer ones, too.
    (record,) = [record for record in records if "are excluded" in str(record.message)]
    printed = warnings.formatwarning(
        record.message, record.category, record.filename, record.lineno
    )
    message = "1 of 60 rows have no value in the target 'ill' (labels) and are excluded."
    assert printed == f"warning: {file}: {message}\n"


@pytest.mark.slow
def test_tutorials_coalitions_train_at_once_with_their_own_class_weights(clinics, monkeypatch):
    config = yaml.safe_load(read_tutorial("federation.yaml"))
    config["federation"]["metrics"]["value"]["init_args"]["coalitions"] = "leave-one-out"
    config["trainer"]["max_epochs"] = 1
    Path("federation.yaml").write_text(yaml.safe_dump(config))
    values = []
    for price in (0.0, float("inf")):  # of training at once
        monkeypatch.setattr(PriceList, "at_once", lambda prices, masks, price=price: price)
        run = open_run(fit_by_command(Path(f"price {price}"), "federation.yaml"))
        is_at_once = "are trained at once" in "".join(run.record["coalitions"])
        assert is_at_once == (price == 0), run.record["coalitions"]
        values.append(run.final("value"))

    at_once, one_by_one = values
    assert at_once == pytest.approx(one_by_one, abs=1e-3)
