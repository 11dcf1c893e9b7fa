"""Clients that are given as a list, and parts of data in the forms of other libraries."""

import numpy as np
import pandas as pd
import pytest
import torch
from torch.utils.data import DataLoader, SubsetRandomSampler, TensorDataset, random_split

from flsv import FederatedDataModule
from flsv.data import Splits
from helpers import refused
from helpers.data import set_up_data

INPUTS = torch.randn(60, 4)
LABELS = torch.arange(60) % 3
WHOLE = TensorDataset(INPUTS, LABELS)
NO_VALIDATION = Splits(server_val=0)


def parts():
    return random_split(WHOLE, [30, 20, 10])


def loaders(**options):
    return [DataLoader(part, **options) for part in parts()]


def arrays():
    pairs = []
    for rows in (slice(0, 30), slice(30, 50), slice(50, 60)):
        pairs.append((INPUTS[rows].numpy(), LABELS[rows].numpy()))
    return pairs


def tensors():
    return [(torch.from_numpy(x), torch.from_numpy(y)) for x, y in arrays()]


def frames(columns="abcd"):
    return [(pd.DataFrame(x, columns=list(columns)), pd.Series(y)) for x, y in arrays()]


@pytest.mark.parametrize("make", [parts, arrays, tensors, frames, loaders])
def test_clients_of_a_list_have_their_positions_as_names(make):
    data = set_up_data(clients=make(), splits=NO_VALIDATION)

    assert data.client_names == ("0", "1", "2")
    assert data.num_samples.tolist() == [30, 20, 10]
    assert data.class_counts.sum(0).tolist() == [20, 20, 20]


@pytest.mark.parametrize("clients", ["boston.csv", WHOLE, {1, 2}, pd.DataFrame(INPUTS), [WHOLE]])
def test_other_forms_of_clients_are_refused_in_one_sentence(clients):
    with refused("as a dictionary {name: data} or a list"):
        FederatedDataModule(clients=clients)


def test_options_of_the_clients_loaders_are_used():
    data = set_up_data(clients=loaders(batch_size=8, drop_last=True), splits=NO_VALIDATION)

    sizes = [len(labels) for _, labels in data.client_loader(1)]

    assert sizes == [8, 8]


def test_loader_of_some_samples_is_a_client_with_these():
    sampler = SubsetRandomSampler([3, 4, 5])
    clients = {
        "some": DataLoader(WHOLE, sampler=sampler),
        "all": DataLoader(WHOLE),
    }

    data = set_up_data(clients=clients, splits=NO_VALIDATION)

    assert data.num_samples.tolist() == [3, 60]


@pytest.mark.parametrize(
    ("second_client", "message"),
    [
        (WHOLE, "client '1': expected a torch DataLoader .* got a TensorDataset"),
        (DataLoader(WHOLE, batch_size=5), "client '1': its loader differs in batch_size"),
    ],
)
def test_clients_with_different_loaders_are_refused(second_client, message):
    with refused(message):
        set_up_data(clients=[DataLoader(WHOLE, batch_size=8), second_client])


def test_frame_and_series_have_the_values_of_arrays():
    (frame, series), *_ = frames()
    (x, y), *_ = arrays()

    data = set_up_data((frame, series), splits=NO_VALIDATION)

    inputs, labels = data.division.source.tensors
    np.testing.assert_array_equal(inputs, x)
    np.testing.assert_array_equal(labels, y)


def test_frames_with_columns_in_another_order_are_refused():
    boston, _, _ = frames()
    _, lyon, _ = frames(columns="bacd")

    with refused("the DataFrames have different columns"):
        set_up_data(clients={"Boston": boston, "Lyon": lyon})


def test_words_among_the_inputs_of_a_pair_are_named():
    (frame, series), *_ = frames()

    with refused("columns 'c' of X are not numbers"):
        set_up_data((frame.assign(c="word"), series))


def test_pair_of_different_lengths_is_refused():
    (frame, series), *_ = frames()

    with refused(r"X has the shape \[30, 4\], but y .* \[29\]"):
        set_up_data((frame, series[:-1]))
