"""What is taken out of data sets and other people's data modules, and what is refused."""

import lightning as L
import pytest
import torch
from torch.utils.data import (
    DataLoader,
    IterableDataset,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)

from flsv.data.sources.module import module_source
from flsv.errors import ConfigurationError

DATA = TensorDataset(torch.zeros(20, 3), torch.arange(20) % 4)


def module(train, val=None):
    """A data module with these loaders; a loader is left out where it is None."""
    kinds = {"train_dataloader": lambda self: train}
    if val is not None:
        kinds["val_dataloader"] = lambda self: val
    return type("Somebodys", (L.LightningDataModule,), kinds)()


def collate(samples):
    return samples


def test_a_loaders_way_of_reading_is_kept():
    loader = DataLoader(DATA, batch_size=6, shuffle=True, collate_fn=collate, num_workers=2, drop_last=True)
    source = module_source(module(loader))
    assert source.train is DATA
    assert source.indices is None
    assert source.train_options == {
        "batch_size": 6,
        "drop_last": True,
        "collate_fn": collate,
        "num_workers": 2,
        "pin_memory": False,
        "worker_init_fn": None,
    }
    assert source.eval_options == {**source.train_options, "drop_last": False}


def test_samples_held_out_by_a_sampler_stay_held_out():
    loader = DataLoader(DATA, batch_size=2, sampler=SubsetRandomSampler([1, 4, 9]))
    assert module_source(module(loader)).indices.tolist() == [1, 4, 9]


def test_a_sampler_that_cannot_be_kept_is_warned_of():
    with pytest.warns(UserWarning, match="WeightedRandomSampler.*shuffled plainly instead"):
        module_source(module(DataLoader(DATA, batch_size=2, sampler=WeightedRandomSampler(torch.ones(20), 20))))


class Scaled(DataLoader):
    """Yields something else than its data set holds."""

    def __iter__(self):
        return ((2 * x, y) for x, y in super().__iter__())


def test_a_loader_that_makes_its_own_batches_is_refused_and_validates_as_it_is():
    with pytest.raises(ConfigurationError, match="is a Scaled of which samples cannot be dealt to clients.*collate_fn"):
        module_source(module(Scaled(DATA, 4)))
    own = Scaled(DATA, 4)
    assert module_source(module(DataLoader(DATA), own)).val_loaders is own


@pytest.mark.parametrize(
    ("loader", "message"),
    [
        ({"a": DataLoader(DATA)}, "training loader is a dict of which"),
        ([DataLoader(DATA)] * 2, "training loader is a list of which"),
        (DataLoader(DATA, batch_size=None), "batch_size=None"),
        (DataLoader(type("Stream", (IterableDataset,), {"__iter__": None})()), "IterableDataset"),
    ],
)
def test_loaders_whose_samples_cannot_be_dealt(loader, message):
    with pytest.raises(ConfigurationError, match=message):
        module_source(module(loader))
