"""Inputs that are not finite: evaluation samples are refused, training samples warned of."""

import pytest
import torch
from data_options import grouped
from torch.utils.data import Subset, TensorDataset

from flsv.data import FederatedDataModule, IIDPartitioner
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


def test_test_data_are_refused():
    with pytest.raises(ConfigurationError, match="2 samples of the test data have NaN or infinite inputs: 4, 9"):
        set_up(inputs(), inputs((4, 9), samples=30))
