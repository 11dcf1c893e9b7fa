"""``flsv data``: what each client has, before training."""

import csv
import re
import warnings
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from flsv.cli import main
from flsv.data import FederatedDataModule
from flsv.tables.command import notes_on_data
from helpers import pages, warns
from helpers.runs import write_table

DICTIONARY = {
    "excluded": ["insurer", "patient", "admitted"],
    "columns": {"discharged": {"kind": "days since admitted"}},
}


@pytest.fixture
def folder_with_clinics(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_clinics_as_in_the_tutorial()
    return tmp_path


def write_clinics_as_in_the_tutorial():
    """Its script writes clinics/Boston.csv and others into the working folder."""
    page = Path(__file__).parents[2] / "docs/tutorials/hospitals.md"
    blocks = pages.blocks_of_page(page.read_text())
    (script,) = [block for block in blocks if block.title == "clinics.py"]
    exec(script.text)


def test_data_tables_show_the_class_shares_and_missing_values_of_the_files(
    folder_with_clinics, capsys
):
    Path("federation.yaml").write_text(
        f"data:\n  source: clinics\n  labels: died\n  dictionary: {DICTIONARY}\ntrainer:\n  max_epochs: 3\n"
    )

    assert main(["data", "--config", "federation.yaml", "--out", "cards"]) == 0

    printed = capsys.readouterr().out
    names = ("Boston", "Lyon", "Osaka", "Quito")
    frames = {name: pd.read_csv(f"clinics/{name}.csv") for name in names}

    for name, frame in frames.items():
        share = (frame["died"] == "yes").mean()
        (line,) = (line for line in printed.splitlines() if line.split()[:1] == [name])
        printed_share = float(line.split()[-2])
        assert printed_share == pytest.approx(100 * share, abs=0.06)

    assert "The server validates on the validation part of clinics, 1,000 samples." in printed
    assert "Rare: yes (" in printed
    assert "creatinine Osaka 100 % of the values are missing" in printed

    lines = Path("cards/columns.csv").read_text().splitlines()
    rows = {row["column"]: row for row in csv.DictReader(lines)}
    for column in ("pressure", "creatinine", "age"):
        for name, frame in frames.items():
            missing = frame[column].isna().mean()
            assert float(rows[column][name]) == pytest.approx(missing, abs=1e-6)

    assert rows["discharged"]["is read as"] == "days since admitted"
    assert "patient" not in rows

    assert pd.read_csv("cards/samples.csv")["client"].tolist() == list(frames)


def test_tables_of_data_fit_a_terminal_of_80_columns(monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "80")

    assert main(["data", "--config", "digits"]) == 0

    table, _, _ = capsys.readouterr().out.partition("The server")
    assert table.count("samples") == 2  # in the title and in the first part
    assert max(map(len, table.splitlines())) <= 80


def write_visits():
    """A table whose names and cells could be formulas."""
    lines = ["=1+1,clinic,ill"]
    for number in range(0, 40, 2):
        lines.append(f"{number},=A1,n")
        lines.append(f"{number + 1},@A1,y")
    Path("visits.csv").write_text("\n".join([*lines, ""]))


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


def test_data_notes_name_a_class_that_is_missing_at_a_client(folder_with_clinics):
    frames = {}
    for name in ("Boston", "Lyon"):
        clinic = pd.read_csv(folder_with_clinics / "clinics" / f"{name}.csv")
        frames[name] = clinic[["age", "died"]]
    frames["Lyon"]["died"] = "no"

    data = FederatedDataModule(clients=frames, labels="died")
    data.setup("fit")
    notes = notes_on_data(data)

    assert "No training sample has the class yes at Lyon." in notes


@pytest.mark.slow
def test_questions_are_answered_in_the_written_dictionary(folder_with_clinics, capsys):
    Path("federation.yaml").write_text("data:\n  source: clinics\n  labels: died\n")
    assert main(["data", "--config", "federation.yaml"]) == 2
    assert "meaning of some columns is not clear" in capsys.readouterr().err

    command = ["data", "--config", "federation.yaml", "--write", "dictionary.yaml"]
    assert main(command) == 0
    printed = capsys.readouterr().out
    assert re.search("[?] admitted: .* has dates, such as", printed)
    by_file = ["data", "--config", "federation.yaml", "--data.dictionary=dictionary.yaml"]
    assert main(by_file) == 2
    text = Path("dictionary.yaml").read_text().replace('"? ', '"excluded: ')
    Path("dictionary.yaml").write_text(text)
    assert main(by_file) == 0


def write_hospitals(folder):
    """Three hospitals with the faults of real exports: other units, rows twice, a number of the case as a feature."""
    folder.mkdir()
    for place_in_list, (name, rows) in enumerate(
        {"Aachen": 300, "Bonn": 250, "Celle": 200}.items()
    ):
        draw = np.random.default_rng(place_in_list)
        table = pd.DataFrame(
            {
                "case": 100_000 * (place_in_list + 1) + draw.permutation(rows),
                "age": draw.normal(64, 13, rows).round(),
                "creatinine": draw.lognormal(0, 0.4, rows).round(2),
                "sex": draw.choice(["f", "m"], rows),
                "died": draw.choice(["no", "no", "yes"], rows),
            }
        )
        if name == "Celle":
            table["creatinine"] *= 88.4  # µmol/l instead of mg/dl
        if name == "Bonn":
            table = pd.concat([table, table.iloc[:60]])
        table.to_csv(folder / f"{name}.csv", index=False)

    return folder


def test_data_names_other_units_repeated_rows_and_an_identifier(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    write_hospitals(tmp_path / "hospitals")
    options = ["--data.source=hospitals", "--data.labels=died"]

    assert main(["data", *options]) == 2
    assert "case: hospitals/Aachen.csv has 300 different values" in capsys.readouterr().err
    dictionary = "--data.dictionary={excluded: [case]}"
    assert main(["data", *options, dictionary, "--out=cards"]) == 0

    data_warnings = pd.read_csv("cards/data_warnings.csv")
    named_columns = [(row.site, row.column) for row in data_warnings.itertuples()]

    assert ("Celle", "creatinine") in named_columns
    assert ("Bonn", "samples") in named_columns
    texts = "; ".join(data_warnings["data_warning"])
    assert re.search(r"values are \d+\.?\d* times those elsewhere: are they in another unit", texts)
    assert re.search(r"\d+ of \d+ occur more than once", texts)
    assert "occur more than once" in capsys.readouterr().out


def test_warnings_to_users_are_printed_in_one_line(tmp_path):
    rows = [("clinic", "age", "ill")]
    for number in range(60):
        label = str(number % 2) if number else ""
        rows.append((f"c{number % 3}", str(number), label))

    file = tmp_path / "t.csv"
    options = [f"--data.{key}={value}" for key, value in write_table(file, rows).items()]

    with warns("are excluded") as records:
        assert main(["data", *options]) == 0

    # Old packages warn of newer ones, too.
    (record,) = [record for record in records if "are excluded" in str(record.message)]
    # As Python prints it.
    printed = warnings.formatwarning(
        record.message, record.category, record.filename, record.lineno
    )
    message = "1 of 60 rows have no value in the target 'ill' (labels) and are excluded."
    assert printed == f"warning: {file}: {message}\n"
