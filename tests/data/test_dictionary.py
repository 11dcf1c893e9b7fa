"""A data dictionary: its draft, what it refuses, and that features stay what they were."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
import yaml

from flsv.cli import main
from flsv.data import Columns, FederatedDataModule, Splits
from flsv.data.sources.agreed import AgreedEncoder
from flsv.data.sources.dictionary import wide_range
from flsv.utilities.errors import ConfigurationError
from helpers.hospitals import make_hospital_tables

EXCLUDED = ["patient", "insurer"]
#: A column of each kind, with gaps where they are allowed.
ROWS = {
    "age": ["61", "44", "57", "38"],
    "lab": ["1.5", "-999", "2.5", "3.5"],
    "ward": ["A", "B", "A", "B"],
    "died": ["no", "yes", "no", "yes"],
}
DICTIONARY = """
target: "died"
classes: ["yes", "no"]
positive: "yes"
columns:
  age: {low: 0, high: 120, unit: "years", mean: 60, scale: 15, gaps: false}
  lab: {low: 0, high: 100, mean: 2, scale: 1, gaps: [-999]}
  ward: {categories: ["A", "B"]}
excluded: {patient: "a number of the case"}
"""


def make_dictionary(**changes: Any) -> dict[str, Any]:
    return yaml.safe_load(DICTIONARY) | changes


def read_clinics(folder: Path, dictionary: dict[str, Any], **cells: list[str]) -> Any:
    """Read two clinics' files, of which Lyon's has other cells."""
    paths = {}
    for name, rows in (("Boston", ROWS), ("Lyon", ROWS | cells)):
        paths[name] = str(folder / f"{name}.csv")
        pd.DataFrame(rows).to_csv(paths[name], index=False)
    data = FederatedDataModule(
        clients=paths,
        labels="died",
        columns={"encoder": dictionary},
        splits=Splits(server_val=0.0),
    )
    data.setup("fit")
    return data


def test_dictionary_encodes_by_its_means_and_reads_its_gaps_and_positive_class(
    tmp_path: Path,
) -> None:
    data = read_clinics(tmp_path, make_dictionary())

    assert data.class_names == ("no", "yes")
    assert data._source.encoder.feature_names == (
        "age",
        "lab",
        "ward=A",
        "ward=B",
        "lab missing",
        "ward missing",
    )
    inputs, labels = data._data.tensors()
    second_row = [(44 - 60) / 15, 0, 0, 1, 1, 0]
    assert inputs[1].tolist() == pytest.approx(second_row)
    assert labels.tolist() == [0, 1, 0, 1] * 2
    assert data.describe()["encoder"] == AgreedEncoder.from_plain(make_dictionary()).hash


@pytest.mark.parametrize(
    ("cells", "message"),
    [
        pytest.param(
            {"age": ["61", "732", "57", "38"]},
            r"(?s)^Cells that do not fit.*: 1\n.*Lyon.csv, line 3: 732.0 in 'age', expected 0 to 120 years",
            id="a value outside the range",
        ),
        pytest.param(
            {"age": ["61", "", "57", "38"]},
            r"Lyon.csv, line 3: a missing value in 'age', expected a value",
            id="a gap where none is allowed",
        ),
        pytest.param(
            {"ward": ["A", "B", "C", "D"]},
            r"(?s)^Cells that do not fit.*: 2\n.*line 4: 'C' in 'ward', expected one of 'A', 'B'\n.*line 5: 'D'",
            id="words that are no categories",
        ),
        pytest.param(
            {"died": ["no", "yes", "dead", "yes"]},
            r"Lyon.csv, line 4: 'dead' in target 'died' is none of the 2 classes",
            id="an unknown class",
        ),
        pytest.param(
            {"age": ["61", "44", "57", "old"]},
            r"Lyon.csv, line 5: 'old' in 'age' is not a valid number",
            id="a word among numbers",
        ),
    ],
)
def test_cell_that_does_not_fit_is_refused_by_file_line_and_column(
    tmp_path: Path, cells: dict[str, list[str]], message: str
) -> None:
    with pytest.raises(ConfigurationError, match=message):
        read_clinics(tmp_path, make_dictionary(), **cells)


def test_whole_numbers_are_refused_where_they_are_not(tmp_path: Path) -> None:
    dictionary = make_dictionary()
    dictionary["columns"]["age"]["kind"] = "whole numbers"
    data = read_clinics(tmp_path, dictionary)
    inputs, _ = data._data.tensors()
    assert inputs[0, 0] == pytest.approx((61 - 60) / 15)

    message = r"(?s): 1\n.*Lyon.csv, line 3: 44.5 in 'age', expected a whole number\n"
    with pytest.raises(ConfigurationError, match=message):
        read_clinics(tmp_path, dictionary, age=["61", "44.5", "57.0", "38"])


def test_ten_cells_and_the_number_of_all_are_told(tmp_path: Path) -> None:
    ages = [str(age) for age in range(200, 240)]
    rows = {name: [*cells] * 10 for name, cells in ROWS.items()}
    rows["age"] = ages

    with pytest.raises(ConfigurationError) as error:
        read_clinics(tmp_path, make_dictionary(), **rows)

    lines = str(error.value).splitlines()
    assert lines[0].endswith(": 40")
    assert len(lines) == 12  # a summary, ten cells, and what to do


def test_share_of_cells_outside_the_range_is_tolerated_as_the_dictionary_says(
    tmp_path: Path,
) -> None:
    ages = {"age": ["61", "121", "57", "38"]}  # one of eight cells

    with pytest.raises(ConfigurationError, match="line 3: 121.0 in 'age'"):
        read_clinics(tmp_path, make_dictionary(tolerance=0.1), **ages)

    read_clinics(tmp_path, make_dictionary(tolerance=0.2), **ages)


def test_column_that_a_table_lacks_is_refused(tmp_path: Path) -> None:
    dictionary = make_dictionary()
    dictionary["columns"]["weight"] = {"mean": 70, "scale": 12}

    with pytest.raises(ConfigurationError, match="Boston.csv has no column 'weight'"):
        read_clinics(tmp_path, dictionary)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"classes": [False, True]}, "classes=.*each: a text.*Write texts in quotation marks"),
        ({"positive": None}, "positive: None is none of the classes"),
        ({"tolerance": 2}, "tolerance=2.*It is a share of the cells"),
        ({"target_scale": 0}, "target_scale=0.*above 0"),
        ({"target_scale": float("nan")}, "target_scale=nan.*finite"),
        ({"columns": {"age": {"mean": 60, "scale": 0}}}, "scale=0.*above 0"),
        ({"columns": {"age": {"mean": 60, "scale": float("nan")}}}, "scale=nan"),
        ({"columns": {"age": {"low": 5, "high": 5}}}, "name='age'.*low is not below high"),
        ({"columns": {"age": {"lowest": 5}}}, "unexpected keyword argument 'lowest'"),
        ({"columns": {"age": {"gaps": "NA"}}}, "gaps='NA'.*True or False or a list"),
        ({"target": None}, "a data dictionary names its target"),
        ({"patient": "age"}, "the patient is among the columns"),
        ({"columns": {"age": {"kind": "number"}}}, "name='age'.*kind is not numbers, categ"),
    ],
)
def test_dictionary_that_means_nothing_is_refused(changes: dict[str, Any], message: str) -> None:
    dictionary = make_dictionary(**changes)
    if message.startswith("classes="):
        dictionary["positive"] = True

    with pytest.raises(ConfigurationError, match=message):
        Columns(encoder=dictionary)


def test_kinds_of_the_dictionary_decide_how_columns_are_read(tmp_path: Path) -> None:
    """Dates, and numbers that name something, need no further option."""
    dictionary = make_dictionary()
    dictionary["columns"] = {
        "stay": {"kind": "days since came", "low": 0, "high": 90, "mean": 5, "scale": 4},
        "zip": {"categories": ["01067", "80331"]},
    }
    texts = {
        "stay": ["2024-03-02", "2024-03-05", "2024-07-09", "2024-03-09"],
        "came": ["2024-03-01"] * 4,
        "zip": ["01067", "80331"] * 2,
        "died": ["no", "yes"] * 2,
    }
    file = tmp_path / "Lyon.csv"
    pd.DataFrame(texts).to_csv(file, index=False)

    def read() -> Any:
        data = FederatedDataModule(
            clients={"Lyon": str(file), "Graz": str(file)},
            labels="died",
            columns={"encoder": dictionary},
            splits=Splits(server_val=0.0),
        )
        data.setup("fit")
        return data

    with pytest.raises(
        ConfigurationError, match="Lyon.csv, line 4: 130.0 in 'stay', expected 0 to 90"
    ):
        read()
    dictionary["columns"]["stay"]["high"] = 365
    inputs, _ = read()._data.tensors()
    first_row, second_row = inputs[:2].tolist()
    assert first_row == [-1, 1, 0, 0, 0]
    assert second_row == [-0.25, 0, 1, 0, 0]


def test_column_of_another_kind_is_refused_by_its_file(tmp_path: Path) -> None:
    dictionary = make_dictionary()
    dictionary["columns"]["ward"] = {"kind": "truth values"}

    with pytest.raises(ConfigurationError, match=r"Boston.csv: 'ward' has categories, .* truth"):
        read_clinics(tmp_path, dictionary, ward=["True", "False"] * 2)


def test_rows_of_a_patient_of_the_dictionary_stay_together(tmp_path: Path) -> None:
    rows = {name: cells * 15 for name, cells in ROWS.items()}
    rows["case"] = [str(row // 3) for row in range(60)]
    file = tmp_path / "Lyon.csv"
    pd.DataFrame(rows).to_csv(file, index=False)

    def read(**splits: Any) -> Any:
        data = FederatedDataModule(
            str(file),
            labels="died",
            columns={"encoder": make_dictionary(patient="case")},
            splits=Splits(server_val=0.3, seed=0, **splits),
        )
        data.setup("fit")
        return data

    data = read()
    held_out = set((data.server_val_indices // 3).tolist())
    for client in range(data.num_clients):
        assert held_out.isdisjoint((data.client_indices(client) // 3).tolist())
    assert held_out
    with pytest.raises(ConfigurationError, match="splits.together is 'ward', and the data dict"):
        read(together="ward")


def test_dictionary_of_another_target_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="has target: 'ill'"):
        read_clinics(tmp_path, make_dictionary(target="ill"))


def hospitals_with(columns: dict[str, Any], folder: Path) -> FederatedDataModule:
    paths = {}
    for name, table in make_hospital_tables().items():
        paths[name] = str(folder / f"{name}.csv")
        table.to_csv(paths[name], index=False)
    data = FederatedDataModule(
        clients=paths,
        labels="died",
        pos_label="yes",
        columns=columns,
        splits=Splits(server_val=0.0),
    )
    data.setup("fit")
    return data


def test_drafted_dictionary_gives_the_same_features_to_the_bit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fitted = hospitals_with({"exclude": EXCLUDED}, tmp_path)
    clinics = tmp_path / "clinics"
    clinics.mkdir()
    for name in ("Boston", "Lyon", "Osaka"):
        (tmp_path / f"{name}.csv").rename(clinics / f"{name}.csv")
    monkeypatch.chdir(tmp_path)

    main(
        [
            "data",
            "--data.source=clinics",
            "--data.files.root=.",
            "--data.labels=died",
            "--data.pos_label=yes",
            "--data.splits.server_val=0",
            "--data.columns={exclude: [patient, insurer]}",
            "--write=dictionary.yaml",
        ]
    )

    with_dictionary = hospitals_with({"encoder": "dictionary.yaml"}, tmp_path)
    for tensor, fitted_tensor in zip(with_dictionary._data.tensors(), fitted._data.tensors()):
        assert torch.equal(tensor, fitted_tensor)
    assert with_dictionary.class_names == fitted.class_names
    text = Path("dictionary.yaml").read_text()
    (line_of_ward,) = [line for line in text.splitlines() if line.startswith('  "ward"')]
    assert "# Osaka: only this site has Osaka" in line_of_ward
    columns = yaml.safe_load(text)["columns"]
    assert columns["lab"]["kind"] == "numbers"


def test_drafted_dictionary_of_a_regression_gives_the_same_targets(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    generator = np.random.default_rng(0)
    rows = pd.DataFrame(
        {
            "clinic": ["Boston", "Lyon"] * 30,
            "age": generator.integers(20, 90, 60),
            "days": generator.gamma(3, 2, 60),
        }
    )
    rows.to_csv(tmp_path / "stays.csv", index=False)
    monkeypatch.chdir(tmp_path)
    columns = {"task": "regression", "standardize_target": True}
    options: dict[str, Any] = {"labels": "days", "groups": "clinic", "splits": Splits(server_val=0)}
    fitted = FederatedDataModule("stays.csv", columns=columns, **options)
    fitted.setup("fit")

    main(
        [
            "data",
            "--data.source=stays.csv",
            "--data.files.root=.",
            "--data.labels=days",
            "--data.groups=clinic",
            "--data.splits.server_val=0",
            f"--data.columns={json.dumps(columns)}",
            "--write=dictionary.yaml",
        ]
    )

    drafted = yaml.safe_load(Path("dictionary.yaml").read_text())
    assert drafted["columns"]["age"]["kind"] == "whole numbers"
    with_dictionary = FederatedDataModule(
        "stays.csv", columns=columns | {"encoder": "dictionary.yaml"}, **options
    )
    with_dictionary.setup("fit")
    for tensor, fitted_tensor in zip(with_dictionary._data.tensors(), fitted._data.tensors()):
        assert torch.equal(tensor, fitted_tensor)


def test_drafted_ranges_are_wide_and_no_patients_values() -> None:
    generator = np.random.default_rng(0)
    for _ in range(50):
        values = pd.Series(generator.lognormal(generator.normal(), 1, 200))
        low, high = wide_range(values)

        assert low <= values.min()
        assert high > values.max()
        assert not values.isin([low, high]).any()
        assert high - low > 1.5 * (values.quantile(0.99) - values.quantile(0.01))
