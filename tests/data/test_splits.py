"""What the server and the clients hold out: a number of samples, or what a column chooses. Patients stay together."""

import datetime

import numpy as np
import pandas as pd
import pytest
import torch
from torch.utils.data import TensorDataset

from flsv.cli.parser import make_cli
from flsv.data import HeldOut, IIDPartitioner, OneClient, Splits
from helpers import refused, warns
from helpers.data import set_up_data

VISITS = 60  # of each hospital
VISITS_OF_PATIENT = 3


def make_visits(hospital):
    """A hospital's table, with three visits of each patient, a week apart."""
    generator = np.random.default_rng(hospital)
    days = pd.date_range("2023-01-01", periods=VISITS, freq="7D")
    patients = 100 * hospital + np.arange(VISITS) // VISITS_OF_PATIENT
    split_names = ["train", "train", "train", "val", "test"]

    table = pd.DataFrame()
    table["patient"] = patients
    table["visited"] = days.strftime("%Y-%m-%d")
    table["split"] = generator.choice(split_names, VISITS)
    table["age"] = generator.normal(50, 9, VISITS)
    table["ill"] = generator.choice(["no", "yes"], VISITS)

    return table


TABLES = {"Basel": make_visits(1), "Lyon": make_visits(2)}
EXCLUDED = {"excluded": ["patient", "visited", "split"]}


def make_hospitals(splits, dictionary=EXCLUDED):
    return set_up_data(clients=TABLES, labels="ill", dictionary=dictionary, splits=splits)


def split_indices_of_clients(data):
    """Indices of each client's training, validation and test samples."""
    return data.division.splits.clients


def rows_of_split(data, split):
    """The rows of each client's table that are in its training, validation or test set."""
    rows = []
    for client, indices in enumerate(split_indices_of_clients(data)):
        first_index_of_table = client * VISITS
        rows.append((indices[split] - first_index_of_table).tolist())
    return rows


def rows_where(column, condition):
    """The rows of each table whose value meets a condition."""
    return [np.flatnonzero(condition(table[column])).tolist() for table in TABLES.values()]


def test_numbers_of_samples_are_held_out():
    data = make_hospitals(Splits(server_val=10, client_val=7, client_test=5))

    assert len(data.server_val_indices) == 10
    for client in split_indices_of_clients(data):
        assert len(client["val"]) == 7
        assert len(client["test"]) == 5
    assert data.validation() == {"of": "10 samples of the partners' data", "rows": 10}

    left_out = data.division.splits.num_left_out
    assert left_out["client_val"] == [7] * len(TABLES)
    assert left_out["client_test"] == [5] * len(TABLES)
    assert sum(left_out["server_val"]) == 10
    num_trained = data.num_samples.tolist()
    for client in range(len(TABLES)):
        num_left_out = sum(numbers[client] for numbers in left_out.values())
        assert num_trained[client] + num_left_out == VISITS


@pytest.mark.parametrize("split", ["test", "train"])
def test_samples_with_a_columns_value_are_held_out(split):
    splits = Splits(server_val=HeldOut("split", "val"), client_test=HeldOut("split", ["test"]))

    data = make_hospitals(splits)

    assert rows_of_split(data, split) == rows_where("split", lambda value: value == split)
    assert data.validation()["of"] == "the partners' data with split = val"


@pytest.mark.parametrize(
    ("held_out", "is_chosen"),
    [
        (HeldOut("split", values="test"), lambda split: split == "test"),
        (HeldOut("visited", since="2024-01-01"), lambda day: day >= "2024-01-01"),
    ],
)
def test_shares_are_drawn_from_what_no_column_chooses(held_out, is_chosen):
    data = make_hospitals(Splits(server_val=0.25, client_val=0.2, client_test=held_out))

    assert rows_of_split(data, "test") == rows_where(held_out.column, is_chosen)
    # The server's share is one of all visits, though none of those that the column chooses is drawn.
    num_visits = len(TABLES) * VISITS
    assert len(data.server_val_indices) == 0.25 * num_visits
    for train_rows, val_rows in zip(rows_of_split(data, "train"), rows_of_split(data, "val")):
        assert set(train_rows).isdisjoint(val_rows)


def make_hospitals_with_whole_patients():
    return make_hospitals(Splits(server_val=0.1, client_val=4, client_test=0.2, together="patient"))


def test_no_patient_has_visits_both_in_training_and_held_out():
    data = make_hospitals_with_whole_patients()

    clients = split_indices_of_clients(data)
    training_indices = torch.cat([client["train"] for client in clients])
    patients = pd.concat(TABLES.values())["patient"].to_numpy()
    is_training = np.isin(np.arange(len(patients)), training_indices)
    training_patients = set(patients[is_training])
    held_out_patients = set(patients[~is_training])
    assert training_patients
    assert held_out_patients.isdisjoint(training_patients)


def test_whole_patients_are_held_out_until_their_visits_reach_the_number():
    data = make_hospitals_with_whole_patients()

    num_visits = len(TABLES) * VISITS
    assert len(data.server_val_indices) == 0.1 * num_visits
    for client in split_indices_of_clients(data):
        # One patient's 3 visits are fewer than client_val=4, those of two are enough.
        assert len(client["val"]) == 2 * VISITS_OF_PATIENT


def test_blank_among_the_values_holds_out_no_sample_without_a_value():
    held_out = HeldOut("split", values=["", "A"])

    assert held_out.select(["", "A", "B", None]).tolist() == [False, True, False, False]


def test_value_that_no_sample_has_holds_out_nothing_and_has_a_warning():
    held_out = HeldOut("split", values=["A", "Z"])

    with warns("no sample has 'split' = 'Z'"):
        held_out.select(["A", "B"])


def set_up_site(client, table, splits):
    samples = TensorDataset(torch.zeros(VISITS, 1), torch.arange(VISITS) % 2)
    samples.split = table["split"].tolist()
    partitioner = OneClient()
    partitioner.first_client = client  # as a site is told its number by the server
    return set_up_data(samples, partitioner, splits=splits)


def test_sites_with_their_own_samples_hold_out_the_rows_of_a_federation_in_one_process():
    splits = Splits(server_val=0, client_test=HeldOut("split", "test"))

    rows_of_sites = []
    for client, table in enumerate(TABLES.values()):
        data_of_site = set_up_site(client, table, splits)
        rows_of_sites += rows_of_split(data_of_site, "test")

    data_of_one_process = make_hospitals(splits)
    assert rows_of_sites == rows_of_split(data_of_one_process, "test")


ALL_OTHERS = "*"


@pytest.mark.parametrize(
    ("dictionary", "inputs"),
    [
        ({"excluded": ["patient", "visited"]}, ["age"]),
        ({"columns": {"age": {}, "split": {}}, "excluded": [ALL_OTHERS]}, ["split", "age"]),
    ],
)
def test_column_that_splits_is_an_input_only_if_the_dictionary_names_it(dictionary, inputs):
    data = make_hospitals(Splits(server_val=HeldOut("split", "val")), dictionary)

    assert [column.name for column in data.division.source.columns] == inputs


def test_command_line_accepts_numbers_and_columns_of_splits(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    arguments = [
        *("--config", "quickstart"),
        *("--data.splits.client_test", "7"),
        *("--data.splits.server_val", "{column: admitted, since: 2024-01-01}"),
    ]

    splits = make_cli(arguments, run=False).datamodule.splits

    assert splits.client_test == 7
    assert splits.server_val == HeldOut("admitted", since="2024-01-01")


@pytest.mark.parametrize("since", [2024, datetime.date(2024, 1, 1)])
def test_year_and_date_of_a_yaml_file_are_dates(since):
    held_out = HeldOut("admitted", since=since)

    is_held_out = held_out.select(["2023-12-31", "2024-01-01", "", " "])

    assert is_held_out.tolist() == [False, True, False, False]
    assert str(held_out).startswith("admitted since 2024")


REFUSED = {
    "no such value": (
        {"server_val": HeldOut("split", "validation")},
        "HeldOut.split = validation. holds out no sample. The values of 'split' are 'test', 'train', 'val'",
    ),
    "no such column": (
        {"server_val": HeldOut("fold", 1)},
        r"has no column 'fold', which is named in splits",
    ),
    "no date": (
        {"server_val": HeldOut("split", since="2024-01-01")},
        "HeldOut.'split', since=.*the column has values that are not dates",
    ),
    "two sets": (
        {"server_val": HeldOut("split", "val"), "client_val": HeldOut("split", ["val", "test"])},
        "samples are both in server_val .split = val. and in client_val",
    ),
    "a client without": (
        {"server_val": 0, "client_test": HeldOut("patient", [100, 101])},
        "Client 1 .'Lyon'. has no sample for client_test .patient = 100, 101.",
    ),
    "patients on both sides": (
        {"server_val": HeldOut("split", "val"), "together": "patient"},
        "have samples both in training and in a held-out set: '10",
    ),
    "nothing left": ({"server_val": 0, "client_test": 60}, "leave none for training"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_splits_that_cannot_be_made_are_refused(case):
    options, message = REFUSED[case]
    with refused(message):
        make_hospitals(Splits(**options))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "expected either values or since"),
        ({"values": "test", "since": "2024-01-01"}, "expected either values or since"),
        ({"since": "1 May"}, "expected a date such as 2024-03-31"),
    ],
)
def test_choices_are_checked_at_construction(options, message):
    with refused(message):
        HeldOut("split", **options)


def set_up_samples_of(patients, partitioner, **splits):
    """Set up a sample of each of these patients, those of one patient together."""
    num_samples = len(patients)
    samples = TensorDataset(torch.zeros(num_samples, 2), torch.arange(num_samples) % 2)
    samples.patient = patients
    return set_up_data(samples, partitioner, together="patient", **splits)


@pytest.mark.parametrize("gap", [" ", float("nan")])
def test_samples_of_no_patient_are_refused(gap):
    patients = ["a", "a", gap, "b", "b", "b"]

    with refused("1 of 6 samples have no value"):
        set_up_samples_of(patients, IIDPartitioner(2), server_val=2)


def test_patient_whose_numbers_are_read_as_1_and_as_1_point_0_stays_together():
    numbers_of_a_column_with_gaps = [1, 1.0, 1, 1.0, 2, 2.0, 2, 2.0]

    data = set_up_samples_of(numbers_of_a_column_with_gaps, OneClient(), server_val=1)

    rows_of_patients = ([0, 1, 2, 3], [4, 5, 6, 7])
    assert data.server_val_indices.tolist() in rows_of_patients


def test_clients_that_share_patients_are_refused():
    ten_patients = [index // 6 for index in range(60)]

    with refused("give all samples of a group to one client"):
        set_up_samples_of(ten_patients, IIDPartitioner(3), server_val=0, client_test=0.3)
