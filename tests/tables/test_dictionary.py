"""A data dictionary: its inference, what it refuses, and that features stay what they were."""

import io
import json
from contextlib import redirect_stdout
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
import yaml

from flsv.cli import main
from flsv.tables import Dictionary
from flsv.tables.inference import wide_range
from flsv.tables.merger import merge
from flsv.utilities.errors import ConfigurationError
from helpers import refused
from helpers.data import set_up_data
from helpers.hospitals import make_hospital_tables

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


def make_dictionary(**changes):
    return yaml.safe_load(DICTIONARY) | changes


def read_clinics(folder, dictionary, **columns_of_lyon):
    """Read two clinics' files, of which Lyon's may have other columns."""
    paths = {}
    for name, columns in (("Boston", ROWS), ("Lyon", ROWS | columns_of_lyon)):
        paths[name] = str(folder / f"{name}.csv")
        pd.DataFrame(columns).to_csv(paths[name], index=False)
    return set_up_data(clients=paths, labels="died", dictionary=dictionary, server_val=0.0)


def test_dictionary_encodes_by_its_means_and_reads_its_gaps(tmp_path):
    data = read_clinics(tmp_path, make_dictionary())

    inputs, _ = data.division.source.tensors
    features_of_second_row = dict(zip(data.dictionary.feature_names, inputs[1].tolist()))
    mean_age, scale_of_age = 60, 15
    assert features_of_second_row == {
        "age": pytest.approx((44 - mean_age) / scale_of_age),
        "lab": 0,
        "ward=A": 0,
        "ward=B": 1,
        "lab missing": 1,
        "ward missing": 0,
    }
    assert data.describe()["dictionary"] == Dictionary.from_plain(make_dictionary()).hash


NO, YES = 0, 1


CODES_OF_LYON = {
    "rename": {"station": "ward", "outcome": "died"},
    "recode": {"ward": {"1": "A", "2": "B"}, "died": {"0": "no", "1": "yes"}},
}
ROWS_OF_LYON = {
    "age": ROWS["age"],
    "lab": ROWS["lab"],
    "station": ["1", "2", "1", "2"],
    "outcome": ["0", "1", "0", "1"],
}


@pytest.mark.parametrize("as_numbers", [False, True])
@pytest.mark.parametrize("dictionary", [{}, make_dictionary()], ids=["inferred", "written"])
def test_columns_of_one_site_are_renamed_and_recoded(tmp_path, dictionary, as_numbers):
    boston = pd.DataFrame(ROWS)
    lyon = pd.DataFrame(ROWS_OF_LYON)
    if as_numbers:
        lyon = lyon.astype({"station": int, "outcome": int})
    clients = {"Boston": boston, "Lyon": lyon}
    if not as_numbers:
        boston.to_csv(tmp_path / "b.csv", index=False)
        lyon.to_csv(tmp_path / "l.csv", index=False)
        clients = {"Boston": tmp_path / "b.csv", "Lyon": tmp_path / "l.csv"}

    dictionary = {**dictionary, "read": {"Lyon": CODES_OF_LYON}}
    data = set_up_data(clients=clients, labels="died", dictionary=dictionary, server_val=0.0)

    inputs, labels = data.division.source.tensors
    assert torch.equal(inputs[:4], inputs[4:])
    assert torch.equal(labels[:4], labels[4:])
    assert "ward=B" in data.dictionary.feature_names
    again = Dictionary.from_plain(yaml.safe_load(data.dictionary.to_text()))
    assert again.read["Lyon"].recode == CODES_OF_LYON["recode"]
    assert again.hash == data.dictionary.hash


def test_recoded_categories_keep_their_order(tmp_path):
    outcome = pd.Categorical([0, 1] * 20, categories=[1, 0], ordered=True)
    table = pd.DataFrame({"age": range(40), "died": outcome})
    recode = {"died": {"0": "no", "1": "yes"}}

    data = set_up_data(table, labels="died", dictionary={"read": {"*": {"recode": recode}}})

    assert data.class_names == ("yes", "no")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rename": {"statoin": "ward"}}, "no column 'statoin', .* rename of the data dictionary"),
        ({"recode": {"statoin": {"1": "A"}}}, "no column 'statoin', .* recode of the data dict"),
        ({"rename": {"station": "age"}}, "has columns with the names 'age'"),
        ({"recode": {"station": {1: "A"}}}, "recode=.*Write texts in quotation marks"),
        ({"rename": "station"}, "rename=station: expected .name: new name"),
    ],
)
def test_names_and_words_that_cannot_be_replaced_are_refused(options, message):
    clients = {"Boston": pd.DataFrame(ROWS_OF_LYON), "Lyon": pd.DataFrame(ROWS_OF_LYON)}

    with refused(message):
        set_up_data(clients=clients, labels="outcome", dictionary={"read": {"Lyon": options}})


def test_positive_class_of_a_dictionary_is_class_1(tmp_path):
    data = read_clinics(tmp_path, make_dictionary(classes=["yes", "no"], positive="yes"))

    assert data.class_names == ("no", "yes")
    assert data.client_labels(0).tolist() == [NO, YES, NO, YES]


def test_classes_of_a_dictionary_object_keep_their_order(tmp_path):
    data = read_clinics(tmp_path, Dictionary("died", classes=("yes", "no")))

    assert data.class_names == ("yes", "no")
    assert data.client_labels(0).tolist() == [1 - NO, 1 - YES, 1 - NO, 1 - YES]


def make_dictionary_with_whole_ages():
    dictionary = make_dictionary()
    dictionary["columns"]["age"]["kind"] = "whole numbers"
    return dictionary


def test_whole_numbers_are_standardized_as_numbers_are(tmp_path):
    data = read_clinics(tmp_path, make_dictionary())
    data_with_whole_ages = read_clinics(tmp_path, make_dictionary_with_whole_ages())

    inputs, _ = data.division.source.tensors
    inputs_with_whole_ages, _ = data_with_whole_ages.division.source.tensors
    assert torch.equal(inputs_with_whole_ages, inputs)


def test_fraction_in_a_column_of_whole_numbers_is_refused(tmp_path):
    ages = ["61", "44.5", "57.0", "38"]

    with refused(r"(?s): 1\n.*Lyon.csv, line 3: '44.5' in 'age', expected whole numbers"):
        read_clinics(tmp_path, make_dictionary_with_whole_ages(), age=ages)


def test_error_names_ten_fields_and_the_number_of_all(tmp_path):
    columns_of_forty_rows = {name: cells * 10 for name, cells in ROWS.items()}
    impossible_ages = [str(age) for age in range(200, 240)]

    with pytest.raises(ConfigurationError) as error:
        read_clinics(
            tmp_path, make_dictionary(), **{**columns_of_forty_rows, "age": impossible_ages}
        )

    summary, *fields, _remedy = str(error.value).splitlines()
    assert summary.endswith(": 40")
    assert len(fields) == 10


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


EXCLUDED_COLUMNS = {"excluded": {"patient": "number of the case", "insurer": ""}}


def set_up_hospitals(dictionary):
    paths = {name: f"{name}.csv" for name in make_hospital_tables()}
    return set_up_data(
        clients=paths,
        labels="died",
        pos_label="yes",
        dictionary=dictionary,
        root=".",
        server_val=0.0,
    )


def write_dictionary_of_site(name):
    main(
        [
            "data",
            f"--data.source={name}.csv",
            "--data.files.root=.",
            "--data.labels=died",
            "--data.pos_label=yes",
            "--data.partitioner=OneClient",
            "--data.splits.server_val=0",
            f"--data.dictionary={json.dumps(EXCLUDED_COLUMNS)}",
            f"--write={name}.yaml",
        ]
    )


@pytest.fixture(scope="module")
def printed_of_merging(tmp_path_factory):
    """What is printed when Boston.yaml and those of other sites, inferred by the command line, are merged, in any
    order, to merged.yaml. All files are in the working folder."""
    output = io.StringIO()
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(output):
        patch.chdir(tmp_path_factory.mktemp("hospitals"))
        for name, table in make_hospital_tables().items():
            table.to_csv(f"{name}.csv", index=False)
            write_dictionary_of_site(name)
        files = [f"{name}.yaml" for name in ("Osaka", "Boston", "Lyon")]
        main(["data", "--merge", *files, "--write=merged.yaml"])
        yield output.getvalue()


@pytest.mark.slow
def test_merged_dictionary_has_nearly_the_means_of_one_process(printed_of_merging):
    dictionary = set_up_hospitals(EXCLUDED_COLUMNS).dictionary
    merged = Dictionary.from_file("merged.yaml")

    assert dictionary is not None
    assert merged.class_counts == dictionary.class_counts
    for name, column in dictionary.columns.items():
        merged_column = merged.columns[name]
        assert merged_column.count == column.count
        if column.has_numbers:
            assert merged_column.mean == pytest.approx(column.mean, abs=0.03 * column.scale)
            assert merged_column.scale == pytest.approx(column.scale, rel=0.03)


@pytest.mark.slow
def test_merged_dictionary_gives_nearly_the_features_of_one_process(printed_of_merging):
    data = set_up_hospitals(EXCLUDED_COLUMNS)
    data_by_file = set_up_hospitals("merged.yaml")

    inputs, labels = data.division.source.tensors
    inputs_by_file, labels_by_file = data_by_file.division.source.tensors
    names = list(data.dictionary.feature_names)
    columns = [names.index(name) for name in data_by_file.dictionary.feature_names]
    assert torch.allclose(inputs_by_file, inputs[:, columns], atol=0.1)
    assert torch.equal(labels_by_file, labels)


def test_merging_warns_of_a_column_that_is_empty_at_a_site(printed_of_merging):
    assert "lab of Osaka: 100 % of the values are missing" in printed_of_merging


def test_dictionaries_that_disagree_are_merged_with_questions(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    numbers = {"mean": 60, "scale": 15, "count": 100}
    categories = {"categories": ["old", "young"], "count": 100}
    for site, age in {"Boston": numbers, "Lyon": categories}.items():
        plain = make_dictionary(class_counts=[40, 60], columns={"age": age})
        Path(f"{site}.yaml").write_text(Dictionary.from_plain(plain).to_text())

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
    table = pd.DataFrame()
    table["clinic"] = ["Boston", "Lyon"] * 30
    table["age"] = generator.integers(20, 90, 60)
    table["days"] = generator.gamma(3, 2, 60)
    options = {"labels": "days", "groups": "clinic", "server_val": 0}
    regression = {"task": "regression", "standardize_target": True}

    inferred_data = set_up_data(table, dictionary=regression, **options)
    file = tmp_path / "dictionary.yaml"
    file.write_text(inferred_data.dictionary.to_text())
    data = set_up_data(table, dictionary=str(file), **options)

    inputs, targets = data.division.source.tensors
    inferred_inputs, inferred_targets = inferred_data.division.source.tensors
    assert torch.equal(inputs, inferred_inputs)
    assert torch.equal(targets, inferred_targets)
    assert inferred_data.dictionary.columns["age"].kind == "whole numbers"


def test_inferred_ranges_are_wide_and_no_patients_values():
    generator = np.random.default_rng(0)
    for _ in range(50):
        values = generator.lognormal(generator.normal(), 1, 200)
        low, high = wide_range(values)

        assert low <= values.min()
        assert high > values.max()
        assert low not in values
        assert high not in values
        low_quantile, high_quantile = np.quantile(values, [0.01, 0.99])
        assert high - low > 1.5 * (high_quantile - low_quantile)
