"""Samples that ``collate_fn`` leaves out, none of which is among the few that are looked at before training."""

import warnings

import lightning as L
import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset, default_collate

from flsv import FederatedDataModule
from flsv.data import SizePartitioner, Splits
from flsv.federation import FederatedLoop
from helpers import warns
from helpers.data import CLASSES, FEATURES
from helpers.fits import fit
from helpers.models import Plain, Plainest

CORRUPT = 99.0


def leave_corrupt_out(samples):
    complete_samples = [(x, y) for x, y in samples if x[0] != CORRUPT]
    return default_collate(complete_samples)


def collate_all(samples):
    return default_collate(samples)


def collate_twice(samples):
    """Make a batch of two views of each sample."""
    return default_collate(samples * 2)


class DataModuleWithCorruptSamples(L.LightningDataModule):
    def __init__(self, num_corrupt=0, **options):
        super().__init__()
        inputs = torch.randn(90, FEATURES)
        # The second to fourth samples of a client are not among its 16 evenly spaced ones.
        inputs[1 : 1 + num_corrupt, 0] = CORRUPT
        self.samples = TensorDataset(inputs, torch.arange(90) % CLASSES)
        self.options = {
            "batch_size": 8,
            "shuffle": True,
            "collate_fn": leave_corrupt_out,
            **options,
        }

    def train_dataloader(self):
        return DataLoader(self.samples, **self.options)


class PartitionsInBlocks(SizePartitioner):
    """Gives each client a block of samples in a row."""

    def partition(self, labels, *args, **kwargs):
        samples = torch.arange(len(labels))
        return list(samples.split([60, 30]))


def make_data(*arguments, **options):
    return FederatedDataModule(
        DataModuleWithCorruptSamples(*arguments, **options),
        PartitionsInBlocks([2, 1]),
        splits=Splits(server_val=0),
    )


def fit_and_record_warnings(folder, data, **options):
    """The texts of all warnings of a fit."""
    loop = FederatedLoop(seed=1)
    with warnings.catch_warnings(record=True) as recorded:
        warnings.simplefilter("always")
        fit(loop, folder, Plain(), data, **options)
    return [str(warning.message) for warning in recorded]


def num_of_left_out(texts):
    return sum("collate_fn leaves samples out" in text for text in texts)


def test_client_whose_corrupt_samples_are_left_out_is_named_with_both_numbers(tmp_path):
    data = make_data(num_corrupt=3)

    loop = FederatedLoop(seed=1)

    with warns("client 0 has trained with 57 of 60 samples in a local epoch"):
        fit(loop, tmp_path, Plain(), data, rounds=1)

    assert data.num_samples.tolist() == [60, 30]


def test_warning_is_given_once_in_a_run(tmp_path):
    data = make_data(num_corrupt=3)

    texts = fit_and_record_warnings(tmp_path, data, rounds=3)

    assert num_of_left_out(texts) == 1


def test_clients_trained_at_once_are_counted_too(tmp_path):
    loop = FederatedLoop(seed=1, engine="vmap")

    data = make_data(num_corrupt=3)

    with warns("client 0 has trained with 57 of 60 samples"):
        fit(loop, tmp_path, Plainest(), data, rounds=1)


@pytest.mark.parametrize(
    ("options", "trainer_options"),
    [
        ({}, {}),
        ({"drop_last": True}, {}),
        ({}, {"limit_train_batches": 2}),
        ({"collate_fn": collate_all}, {}),
        ({"collate_fn": collate_twice}, {}),
        ({"batch_size": 100}, {}),
    ],
)
def test_complete_batches_of_a_users_collate_fn_give_no_warning(tmp_path, options, trainer_options):
    data = make_data(**options)

    texts = fit_and_record_warnings(tmp_path, data, rounds=2, **trainer_options)

    assert num_of_left_out(texts) == 0


@pytest.mark.parametrize("num_draws", [20, 300])
def test_sampler_that_draws_fewer_or_more_samples_gives_no_warning(tmp_path, num_draws):
    weights = torch.ones(90)
    sampler = torch.utils.data.WeightedRandomSampler(weights, num_draws)
    data = make_data(sampler=sampler, shuffle=False)

    texts = fit_and_record_warnings(tmp_path, data, rounds=1)

    assert num_of_left_out(texts) == 0
