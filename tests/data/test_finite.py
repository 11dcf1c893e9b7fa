"""Inputs that are not finite: evaluation samples are refused, training samples warned of."""

import pytest
import torch
from data_options import grouped
from torch.utils.data import Dataset, Subset, TensorDataset

from flsv.data import FederatedDataModule, IIDPartitioner, Loader
from flsv.data.contents import not_finite
from flsv.errors import ConfigurationError

Y = torch.arange(3000) % 3


def inputs(broken=(), value=torch.nan, samples=3000):
    x = torch.randn(samples, 2, 4, generator=torch.Generator().manual_seed(0))
    x[list(broken), 1, 2] = value
    return x


def set_up(train, test=None, val=None, **kwargs):
    sources = [TensorDataset(x, Y[: len(x)]) for x in (train, test) if x is not None]
    data = FederatedDataModule(sources, IIDPartitioner(2), **grouped({"server_val": 0.0, **kwargs}))
    data.setup("fit")
    return data


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_found_wherever_they_are(value):
    data = TensorDataset(inputs((0, 1023, 1024, 2999), value), Y)
    assert not_finite(data).tolist() == [0, 1023, 1024, 2999]
    assert not_finite(Subset(data, [7, 1024, 8])).tolist() == [1]


def test_nothing_to_find():
    assert not_finite(TensorDataset(inputs(), Y)).tolist() == []
    assert not_finite(TensorDataset(inputs().long(), Y)).tolist() == []
    assert not_finite(TensorDataset(inputs()[:0], Y[:0])).tolist() == []

    class Unread(Dataset):
        def __len__(self):
            return 3

    assert not_finite(Unread()).tolist() == []


def test_test_data_are_refused():
    with pytest.raises(ConfigurationError, match="2 samples of the test data have NaN or infinite inputs: 4, 9"):
        set_up(inputs(), inputs((4, 9), samples=30))


def test_the_servers_and_the_clients_own_splits_are_refused():
    everywhere = range(3000)
    with pytest.raises(ConfigurationError, match="300 samples of the server's validation set"):
        set_up(inputs(everywhere), server_val=0.1)
    for split in ("val", "test"):
        with pytest.raises(ConfigurationError, match=f"150 samples of client 0's {split} set"):
            set_up(inputs(everywhere), **{f"client_{split}": 0.1})


def test_training_samples_are_warned_of_and_stay():
    with pytest.warns(UserWarning, match=r"3 samples of the training data have NaN or .*: 3 \.\. 5"):
        assert set_up(inputs((3, 4, 5))).num_samples.sum() == 3000


def test_data_read_sample_by_sample_are_looked_at_when_preloaded():
    class Samples(Dataset):
        def __init__(self, x):
            self.x = x
            self.targets = Y[: len(x)]

        def __len__(self):
            return len(self.x)

        def __getitem__(self, index):
            return self.x[index], self.targets[index]

    pair = Samples(inputs(samples=30)), Samples(inputs((8,), samples=30))
    FederatedDataModule(pair, IIDPartitioner(2)).setup("fit")
    with pytest.raises(ConfigurationError, match="1 samples of the test data"):
        FederatedDataModule(pair, IIDPartitioner(2), loader=Loader(preload=True)).setup("fit")
