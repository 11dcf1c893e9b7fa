"""Tables as data: how columns are encoded, and what is asked or refused."""

import re

import numpy as np
import pandas as pd
import pytest

from flsv.utilities.errors import ConfigurationError
from helpers import refused, warns
from helpers.data import Frame, HuggingFace, make_patients, set_up_data

ROWS = 40
PATIENTS = {
    "age": [20.0 + row for row in range(ROWS - 1)] + [float("nan")],
    "sex": ["f", "m"] * 20,
    "ward": ["Boston", "Lyon", "Köln / Ost", "Lyon"] * 10,
    "ill": [0, 0, 0, 1] * 10,
}


def test_dates_with_a_time_zone_are_equal_from_csv_and_dataframe(tmp_path):
    hours_with_a_change_of_clocks = pd.date_range(
        "2024-03-30", periods=60, freq="h", tz="Europe/Paris"
    )
    frame = pd.DataFrame({"came": hours_with_a_change_of_clocks, "ill": [0, 1] * 30})
    path = tmp_path / "stays.csv"
    frame.to_csv(path, index=False)
    dictionary = {"columns": {"came": {"kind": "days since 1970"}}}

    data_of_frame = set_up_data(frame, labels="ill", dictionary=dictionary)
    data_of_file = set_up_data(path, labels="ill", dictionary=dictionary)

    assert data_of_file.content_hashes() == data_of_frame.content_hashes()


#: From February 28 to March 1 of a leap year, over New Year, from an unknown day, and on one day.
STAYS = pd.DataFrame(
    {
        "came": ["2024-02-28", "2023-12-31", "", "2024-03-01"] * 10,
        "left": ["2024-03-01", "2024-01-02", "2024-05-05", "2024-03-01"] * 10,
        "ill": ["a", "b"] * 20,
    }
)
DAYS_OF_STAYS = np.array([2.0, 2.0, np.nan, 0.0])


def frame_of_stays(folder):
    came = pd.to_datetime(STAYS["came"].replace("", None))
    return STAYS.assign(came=came, left=pd.to_datetime(STAYS["left"]))


def file_of_stays(folder):
    STAYS.to_csv(folder / "stays.csv", index=False)
    return folder / "stays.csv"


@pytest.mark.parametrize("make_source", [frame_of_stays, file_of_stays])
def test_days_between_two_dates_are_a_feature(make_source, tmp_path):
    dictionary = {"excluded": ["came"], "columns": {"left": {"kind": "days since came"}}}

    data = set_up_data(make_source(tmp_path), labels="ill", dictionary=dictionary, server_val=0.0)

    inputs, _ = data.division.source.train.tensors
    standardized_days, is_missing = inputs[:4].T
    deviations_from_mean = DAYS_OF_STAYS - np.nanmean(DAYS_OF_STAYS)
    expected_days = np.nan_to_num(deviations_from_mean / np.nanstd(DAYS_OF_STAYS))
    assert data.dictionary.feature_names == ("left", "left missing")
    np.testing.assert_allclose(standardized_days, expected_days, atol=1e-6)
    assert is_missing.tolist() == [0, 0, 1, 0]


def test_dtypes_of_a_dataframe_decide_the_kinds_of_its_columns():
    rows = np.arange(60)
    is_smoker = rows % 5 == 0
    is_country_na = rows % 4 == 0
    numbers_of_plans = np.array([101, 205, 330])[rows % 3]
    frame = pd.DataFrame(
        {
            "plan": pd.Categorical(numbers_of_plans),
            "country": np.where(is_country_na, "NA", "DE"),
            "smoker": is_smoker,
            "age": rows.astype(float),
            "ill": rows % 2,
        }
    )
    copied_frame = frame.copy(deep=True)

    data = set_up_data(frame, labels="ill", server_val=0, client_test=0)

    inputs, _ = data.division.source.train.tensors
    numbers = np.column_stack([is_smoker, rows])
    standardized_numbers = (numbers - numbers.mean(0)) / numbers.std(0)
    plans = [numbers_of_plans == number for number in (101, 205, 330)]
    expected_inputs = np.column_stack([standardized_numbers, *plans, ~is_country_na, is_country_na])
    np.testing.assert_allclose(inputs, expected_inputs, atol=1e-6)
    pd.testing.assert_frame_equal(frame, copied_frame)


SPELLINGS_OF_NUMBERS = np.zeros((40, 1)), ["0", "00", "1", "1.0"] * 10
SPELLINGS_OF_WORDS = Frame(
    x=[1.0, 2.0, 3.0, 4.0] * 10,
    ward=["True", "true", "TRUE", "no"] * 10,
    ill=[0, 1] * 20,
)


@pytest.mark.parametrize(
    "options",
    [
        {"clients": {"Boston": SPELLINGS_OF_NUMBERS, "Lyon": SPELLINGS_OF_NUMBERS}},
        {"source": SPELLINGS_OF_WORDS, "labels": "ill", "groups": "ward"},
    ],
)
def test_classes_and_clients_that_differ_in_spelling_only_are_refused(options):
    with refused("which look like spellings of one name"):
        set_up_data(**options)


def test_table_features_are_standardized_by_all_clients_training_rows():
    clients = {
        "Boston": make_patients(30, seed=1),
        "Lyon": make_patients(50, seed=2, shift=20.0),
        "Köln": make_patients(20, seed=3, shift=-5.0),
    }
    test = make_patients(10, seed=4)

    data = set_up_data(
        clients=clients, labels="ill", server_val=0.2, client_val=0.1, client_test=0.1, test=test
    )

    ages = np.concatenate([frame["age"] for frame in clients.values()])
    training_rows = np.concatenate([data.client_indices(client) for client in range(3)])
    mean = ages[training_rows].mean()
    deviation = ages[training_rows].std()
    inputs, _ = data.division.source.train.tensors
    test_inputs, _ = data.division.source.test.tensors
    standardized_test_ages = (np.array(test["age"]) - mean) / deviation
    np.testing.assert_allclose(inputs[:, 0], (ages - mean) / deviation, atol=1e-6)
    np.testing.assert_allclose(test_inputs[:, 0], standardized_test_ages, atol=1e-5)


def test_table_features_have_a_mark_of_each_category_of_clients_and_of_test_data():
    clients = {"Boston": make_patients(30, seed=1), "Lyon": make_patients(50, seed=2)}
    test = make_patients(10, seed=4)

    data = set_up_data(clients=clients, labels="ill", test=test)

    wards = np.concatenate([clients["Boston"]["ward"], clients["Lyon"]["ward"]])
    all_wards = ("A", "B", "only 1", "only 2", "only 4")
    inputs, _ = data.division.source.train.tensors
    assert data.dictionary.columns["ward"].categories == all_wards
    np.testing.assert_array_equal(inputs[:, 1:], wards[:, None] == np.array(all_wards))
    test_inputs, _ = data.division.source.test.tensors
    is_test_ward = np.array(test["ward"])[:, None] == np.array(all_wards)
    np.testing.assert_array_equal(test_inputs[:, 1:], is_test_ward)


def write_patients(folder, suffix):
    path = folder / f"wards.{suffix}"
    frame = pd.DataFrame(PATIENTS)
    if suffix == "csv":
        frame.to_csv(path, index=False)
    else:
        pytest.importorskip("pyarrow")
        frame.to_parquet(path)
    return path


MAKERS_OF_PATIENTS = {
    "pandas": lambda folder: pd.DataFrame(PATIENTS),
    "polars": lambda folder: pytest.importorskip("polars").DataFrame(PATIENTS),
    "pyarrow": lambda folder: pytest.importorskip("pyarrow").table(PATIENTS),
    "datasets": lambda folder: pytest.importorskip("datasets").Dataset.from_dict(PATIENTS),
    "hugging face": lambda folder: HuggingFace(PATIENTS),
    "csv": lambda folder: write_patients(folder, "csv"),
    "parquet": lambda folder: write_patients(folder, "parquet"),
}


@pytest.mark.parametrize("library", MAKERS_OF_PATIENTS)
def test_dataframes_of_every_library_give_the_same_data(library, tmp_path):
    table = MAKERS_OF_PATIENTS[library](tmp_path)

    data = set_up_data(table, labels="ill", groups="ward")

    frame = Frame(**PATIENTS)
    expected = set_up_data(frame, labels="ill", groups="ward")
    assert data.client_names == ("Boston", "Köln / Ost", "Lyon")
    assert data.client_names == expected.client_names
    assert data.class_names == ("0", "1")
    assert data.content_hashes() == expected.content_hashes()


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ([0.1] * ROWS, "All training rows have the same value of the target 'y'"),
        ([1e300, *range(1, ROWS)], "'1e.300' in the target 'y', expected a number"),
    ],
)
def test_targets_that_would_be_nan_or_infinite_are_refused(target, message):
    x = list(range(ROWS))
    frame = Frame(x=x, y=target)
    dictionary = {"task": "regression", "standardize_target": True}
    with refused(message):
        set_up_data(frame, labels="y", dictionary=dictionary)


def test_categories_and_classes_are_the_same_whatever_gaps_a_file_has(tmp_path):
    cells_with_gap = [0, 1, 1, None] * 10  # pandas writes 1.0 for 1
    cells = [1, 0, 0, 1] * 10
    for name, cells_of_site in {"Boston": cells_with_gap, "Lyon": cells}.items():
        table = pd.DataFrame({"code": cells_of_site[::-1], "ill": cells_of_site})
        table.to_csv(tmp_path / f"{name}.csv", index=False)
    dictionary = {"columns": {"code": {"kind": "categories"}}}

    with warns("10 of 40 rows have no value in the target 'ill'"):
        data = set_up_data(str(tmp_path), labels="ill", dictionary=dictionary)

    assert data.dictionary.columns["code"].categories == ("0", "1")
    assert data.class_names == ("0", "1")


def test_all_questions_are_in_one_message():
    columns = {
        "came": "2024-01-01",
        "age": range(60),
        "name": [f"name {row}" for row in range(60)],
        "ill": [0, 1] * 30,
    }
    table = pd.DataFrame(columns)
    table_with_another_column = table.assign(insurer="A")

    with pytest.raises(ConfigurationError) as error:
        set_up_data(clients={"Boston": table, "Lyon": table_with_another_column}, labels="ill")

    columns_asked_about = re.findall(r"^  (\w+): ", str(error.value), flags=re.MULTILINE)
    assert sorted(columns_asked_about) == ["came", "insurer", "name"]


@pytest.mark.parametrize(
    ("names", "message"),
    [
        ([], "contains nothing, .* tables by client, as <client>.csv"),
        (["val"], "too few clients: none. The server's data in it: val.csv. Expected"),
        (["test"], "too few clients: none. The server's data in it: test.csv. Expected"),
        (["val", "test"], "too few clients: none. The server's data in it: val.csv, test.csv. "),
        (["Lyon", "test"], "too few clients: Lyon.csv. .* at least 2 clients, "),
        (["train"], "too few clients: train.csv. The server's data in it: none. .* as the source"),
    ],
)
def test_folder_with_tables_of_too_few_clients_is_refused(tmp_path, names, message):
    for name in names:
        pd.DataFrame(PATIENTS).to_csv(tmp_path / f"{name}.csv", index=False)

    with pytest.raises(ConfigurationError, match=message):
        set_up_data(str(tmp_path), labels="ill")
