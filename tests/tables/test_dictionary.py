"""A data dictionary: its inference, what it refuses, and that features stay what they were."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
import yaml

from flsv.cli import main
from flsv.data import FederatedDataModule, Splits
from flsv.tables import Dictionary
from flsv.tables.inference import wide_range
from flsv.tables.merger import merge
from flsv.utilities.errors import ConfigurationError
from helpers import refused
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
  lab: {low: 0, high: 100, mean: 2, scale: 1, gaps: ["-999"]}
  ward: {categories: ["A", "B"]}
excluded: {patient: "a number of the case"}
"""


def make_dictionary(**changes: Any) -> dict[str, Any]:
    return yaml.safe_load(DICTIONARY) | changes


def read_clinics(folder: Path, dictionary: Any, **cells: list[str]) -> Any:
    """Read two clinics' files, of which Lyon's has other cells."""
    paths = {}
    for name, rows in (("Boston", ROWS), ("Lyon", ROWS | cells)):
        paths[name] = str(folder / f"{name}.csv")
        pd.DataFrame(rows).to_csv(paths[name], index=False)
    data = FederatedDataModule(
        clients=paths, labels="died", dictionary=dictionary, splits=Splits(server_val=0.0)
    )
    data.setup("fit")
    return data


def test_dictionary_encodes_by_its_means_and_reads_its_gaps_and_positive_class(tmp_path):
    data = read_clinics(tmp_path, make_dictionary())

    assert data.class_names == ("no", "yes")
    assert data.dictionary.feature_names == (
        "age",
        "lab",
        "ward=A",
        "ward=B",
        "lab missing",
        "ward missing",
    )
    inputs, labels = data.division.source.tensors
    mean_age = 60
    scale_of_age = 15
    second_age = (44 - mean_age) / scale_of_age
    lab_gap = 0
    is_ward_a, is_ward_b = 0, 1
    lab_missing, ward_missing = 1, 0
    expected = [second_age, lab_gap, is_ward_a, is_ward_b, lab_missing, ward_missing]
    assert inputs[1].tolist() == pytest.approx(expected)
    assert labels.tolist() == [0, 1, 0, 1] * 2
    assert data.describe()["dictionary"] == Dictionary.from_plain(make_dictionary()).hash


def test_classes_of_a_dictionary_object_keep_their_order(tmp_path):
    data = read_clinics(tmp_path, Dictionary("died", classes=("yes", "no")))

    assert data.class_names == ("yes", "no")
    _, labels = data.division.source.tensors
    assert labels.tolist() == [1, 0, 1, 0] * 2


def make_dictionary_with_whole_ages() -> dict[str, Any]:
    dictionary = make_dictionary()
    dictionary["columns"]["age"]["kind"] = "whole numbers"
    return dictionary


def test_whole_numbers_are_standardized_as_numbers_are(tmp_path):
    data = read_clinics(tmp_path, make_dictionary())
    data_with_whole_ages = read_clinics(tmp_path, make_dictionary_with_whole_ages())

    inputs, _ = data_with_whole_ages.division.source.tensors
    assert torch.equal(inputs, data.division.source.tensors[0])


def test_fraction_in_a_column_of_whole_numbers_is_refused(tmp_path):
    message = r"(?s): 1\n.*Lyon.csv, line 3: '44.5' in 'age', expected whole numbers"

    with refused(message):
        read_clinics(tmp_path, make_dictionary_with_whole_ages(), age=["61", "44.5", "57.0", "38"])


def test_error_names_ten_fields_and_the_number_of_all(tmp_path):
    ages = [str(age) for age in range(200, 240)]
    rows = {name: [*cells] * 10 for name, cells in ROWS.items()}
    rows["age"] = ages

    with pytest.raises(ConfigurationError) as error:
        read_clinics(tmp_path, make_dictionary(), **rows)

    lines = str(error.value).splitlines()
    assert lines[0].endswith(": 40")
    assert len(lines) == 12  # a summary, ten fields, and what to do


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"classes": [False, True], "positive": None}, "classes=.*Write texts in quotation marks"),
        ({"classes": ["no", "no"]}, "classes=.*a class occurs twice"),
        ({"positive": "dead"}, "positive='dead' is not one of classes"),
        ({"target_scale": float("nan")}, "target_scale=nan.*finite"),
        ({"columns": {"age": {"mean": 60, "scale": 0}}}, "'age'.*scale=0.*above 0"),
        ({"columns": {"age": {"low": 5, "high": 4}}}, "'age'.*low=5.* is above high=4"),
        ({"columns": {"age": {"lowest": 5}}}, "'age' has no option 'lowest'"),
        ({"columns": {"zip": {"categories": ["01067", 1067]}}}, "'zip'.*quotation marks"),
        ({"columns": {"died": {}}}, "the target 'died' is among the columns"),
        ({"excluded": {"age": ""}}, "both among the columns and among the excluded"),
        ({"columns": {"age": {"kind": "number"}}}, "'age'.*kind='number': expected"),
        ({"exclude": ["age"]}, "has no option 'exclude'. Did you mean excluded"),
        ({"read": {"Lyon": {"decimal": ";"}}}, "read: 'Lyon'.*decimal=';'"),
        ({"task": "regression"}, "task: regression has no classes"),
    ],
)
def test_dictionary_that_means_nothing_is_refused(changes, message):
    with refused(message):
        Dictionary.from_plain(make_dictionary(**changes))


def test_question_without_an_answer_is_refused(tmp_path):
    dictionary = make_dictionary(excluded={"came": "? dates. Days since what?"})
    with refused("came: dates. Days since what"):
        read_clinics(tmp_path, dictionary)


def test_dictionary_of_another_target_is_refused(tmp_path):
    with refused("has target: 'ill'"):
        read_clinics(tmp_path, make_dictionary(target="ill"))


def hospitals_with(dictionary: Any, folder: Path) -> FederatedDataModule:
    paths = {}
    for name, table in make_hospital_tables().items():
        paths[name] = str(folder / f"{name}.csv")
        table.to_csv(paths[name], index=False)
    data = FederatedDataModule(
        clients=paths,
        labels="died",
        pos_label="yes",
        dictionary=dictionary,
        splits=Splits(server_val=0.0),
    )
    data.setup("fit")
    return data


def test_merged_dictionaries_of_sites_are_nearly_the_dictionary_of_one_process(
    tmp_path, monkeypatch, capsys
):
    """Three sites infer dictionaries by the command line, and somebody merges their files, in any order."""
    excluded = {"patient": "number of the case", "insurer": ""}
    data = hospitals_with({"excluded": excluded}, tmp_path)
    monkeypatch.chdir(tmp_path)
    for name in ("Boston", "Lyon", "Osaka"):
        main(
            [
                "data",
                f"--data.source={name}.csv",
                "--data.files.root=.",
                "--data.labels=died",
                "--data.pos_label=yes",
                "--data.partitioner=OneClient",
                "--data.splits.server_val=0",
                f"--data.dictionary={json.dumps({'excluded': excluded})}",
                f"--write={name}.yaml",
            ]
        )
    dictionary_by_site = [f"{name}.yaml" for name in ("Osaka", "Boston", "Lyon")]
    capsys.readouterr()
    main(["data", "--merge", *dictionary_by_site, "--write=merged.yaml"])

    assert "lab of Osaka: 100 % of the values are missing" in capsys.readouterr().out
    inferred = Dictionary.from_file("Boston.yaml")
    assert "rare" not in inferred.columns["ward"].categories  # two rows
    merged = Dictionary.from_file("merged.yaml")
    assert data.dictionary is not None
    for name, column in data.dictionary.columns.items():
        merged_column = merged.columns[name]
        assert merged_column.count == column.count
        if column.has_numbers:
            assert merged_column.mean == pytest.approx(column.mean, abs=0.03 * column.scale)
            assert merged_column.scale == pytest.approx(column.scale, rel=0.03)
    assert merged.class_counts == data.dictionary.class_counts

    by_file = hospitals_with("merged.yaml", tmp_path)
    inputs, labels = by_file.division.source.tensors
    inferred_inputs, inferred_labels = data.division.source.tensors
    assert "ward=rare" not in merged.feature_names
    names = list(data.dictionary.feature_names)
    positions = [names.index(name) for name in merged.feature_names]
    assert torch.allclose(inputs, inferred_inputs[:, positions], atol=0.1)
    assert torch.equal(labels, inferred_labels)


def test_dictionaries_that_disagree_are_merged_with_questions(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    plain = make_dictionary(class_counts=[40, 60])
    plain["columns"]["age"]["count"] = 100
    Path("Boston.yaml").write_text(Dictionary.from_plain(plain).to_text())
    plain["columns"]["age"] = {"categories": ["old", "young"], "count": 100}
    Path("Lyon.yaml").write_text(Dictionary.from_plain(plain).to_text())

    main(["data", "--merge", "Boston.yaml", "Lyon.yaml", "--write=merged.yaml"])

    (question,) = Dictionary.from_file("merged.yaml").questions
    assert question.startswith("age: the sites have numbers at Boston and categories at Lyon")
    printed = capsys.readouterr().out.replace("\n", " ")
    assert "? age: the sites have numbers at Boston" in printed
    assert "answered by each site in its own dictionary" in printed


def test_dictionaries_with_two_codings_of_the_classes_are_refused_by_site():
    dictionary_by_site = {}
    for name, classes in {"Boston": ["0", "1"], "Lyon": ["2", "1"]}.items():
        plain = make_dictionary(classes=classes, positive="1", class_counts=[40, 60])
        dictionary_by_site[name] = Dictionary.from_plain(plain)

    message = "'0' at Boston, '1' at Boston, Lyon, '2' at Lyon, but pos_label='1' needs"
    with refused(message):
        merge(dictionary_by_site)


def test_inferred_dictionary_of_a_regression_gives_the_same_targets(tmp_path):
    generator = np.random.default_rng(0)
    rows = pd.DataFrame(
        {
            "clinic": ["Boston", "Lyon"] * 30,
            "age": generator.integers(20, 90, 60),
            "days": generator.gamma(3, 2, 60),
        }
    )

    def read(dictionary: Any) -> FederatedDataModule:
        data = FederatedDataModule(
            rows, labels="days", groups="clinic", dictionary=dictionary, splits=Splits(server_val=0)
        )
        data.setup("fit")
        return data

    inferred = read({"task": "regression", "standardize_target": True})
    assert inferred.dictionary is not None
    file = tmp_path / "dictionary.yaml"
    file.write_text(inferred.dictionary.to_text())

    assert inferred.dictionary.columns["age"].kind == "whole numbers"
    for tensor, inferred_tensor in zip(
        read(str(file)).division.source.tensors, inferred.division.source.tensors
    ):
        assert torch.equal(tensor, inferred_tensor)


def test_inferred_ranges_are_wide_and_no_patients_values():
    generator = np.random.default_rng(0)
    for _ in range(50):
        values = pd.Series(generator.lognormal(generator.normal(), 1, 200))
        low, high = wide_range(values.to_numpy())

        assert low <= values.min()
        assert high > values.max()
        assert not values.isin([low, high]).any()
        assert high - low > 1.5 * (values.quantile(0.99) - values.quantile(0.01))
