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


SIZES = [30, 20, 10]


def make_subsets():
    return random_split(WHOLE, SIZES)


def make_loaders(**options):
    return [DataLoader(subset, **options) for subset in make_subsets()]


def make_tensors():
    return list(zip(INPUTS.split(SIZES), LABELS.split(SIZES)))


def make_arrays():
    return [(x.numpy(), y.numpy()) for x, y in make_tensors()]


def make_frame(columns="abcd"):
    """The first client's arrays as a DataFrame and a Series."""
    x, y = make_arrays()[0]
    return pd.DataFrame(x, columns=list(columns)), pd.Series(y)


@pytest.mark.parametrize("make_clients", [make_subsets, make_arrays, make_tensors, make_loaders])
def test_clients_of_a_list_have_their_positions_as_names(make_clients):
    data = set_up_data(clients=make_clients(), splits=NO_VALIDATION)

    assert data.client_names == ("0", "1", "2")
    assert data.num_samples.tolist() == SIZES
    samples_of_each_class = len(LABELS) // 3
    assert data.class_counts.sum(0).tolist() == [samples_of_each_class] * 3


@pytest.mark.parametrize("clients", ["boston.csv", WHOLE, {1, 2}, pd.DataFrame(INPUTS), [WHOLE]])
def test_clients_that_are_neither_a_dictionary_nor_a_list_are_refused(clients):
    with refused("as a dictionary {name: data} or a list"):
        FederatedDataModule(clients=clients)


def test_options_of_the_clients_loaders_are_used():
    loaders = make_loaders(batch_size=8, drop_last=True)

    data = set_up_data(clients=loaders, splits=NO_VALIDATION)

    # Client 1 has 20 samples. The incomplete third batch is dropped.
    batch_sizes = [len(labels) for _, labels in data.client_loader(1)]
    assert batch_sizes == [8, 8]


def test_loader_with_a_subset_sampler_is_a_client_with_these_samples():
    loader_of_three_samples = DataLoader(WHOLE, sampler=SubsetRandomSampler([3, 4, 5]))
    clients = {"Boston": loader_of_three_samples, "Lyon": DataLoader(WHOLE)}

    data = set_up_data(clients=clients, splits=NO_VALIDATION)

    assert data.num_samples.tolist() == [3, len(WHOLE)]


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
    frame, series = make_frame()

    data = set_up_data((frame, series), splits=NO_VALIDATION)

    inputs, labels = data.division.source.tensors
    np.testing.assert_array_equal(inputs, frame)
    np.testing.assert_array_equal(labels, series)


def test_frames_with_columns_in_another_order_are_refused():
    with refused("the DataFrames have different columns"):
        set_up_data(clients=[make_frame(columns="abcd"), make_frame(columns="bacd")])


def test_column_of_words_among_the_inputs_of_a_pair_is_refused():
    frame, series = make_frame()
    frame_with_words = frame.assign(c="word")

    with refused("columns 'c' of X are not numbers"):
        set_up_data((frame_with_words, series))


def test_pair_of_different_lengths_is_refused():
    frame, series = make_frame()
    without_last_label = series[:-1]

    with refused(r"X has the shape \[30, 4\], but y .* \[29\]"):
        set_up_data((frame, without_last_label))
