"""Dealing a source out: defaults, precedence of options, and refusals."""

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, TensorDataset

from flsv.data import IIDPartitioner, SizePartitioner, TensorBatches
from flsv.data.federated_data import deal
from flsv.data.loaders import Loader, make_loader
from flsv.data.sources.source import SourceData
from flsv.data.splits import Splits
from flsv.errors import ConfigurationError

X = torch.randn(100, 2, 3)
Y = torch.arange(100) % 4
DATA = TensorDataset(X, Y)


class PerSample(Dataset):
    def __len__(self):
        return 100

    def __getitem__(self, index):
        return X[index], int(Y[index])


def deal_out(source, partitioner=None, split=None, **options):
    return deal(source, partitioner or IIDPartitioner(3), split or Splits(), **{"loader": Loader(), **options})


def test_own_validation_data_spare_the_training_data():
    val = TensorDataset(X[:9], Y[:9])
    dealt = deal_out(SourceData(DATA, val))
    assert len(dealt.splits.server_val) == 0
    assert int(dealt.class_counts.sum()) == 100
    assert isinstance(dealt.val, TensorBatches)
    assert torch.equal(next(iter(dealt.val))[0], X[:9])
    loader = DataLoader(val)
    assert deal_out(SourceData(DATA, val_loaders=loader)).val is loader


def test_preloaded_batches_are_the_same():
    plain, preloaded = deal_out(SourceData(PerSample())), deal_out(SourceData(PerSample()), loader=Loader(preload=True))
    rows = plain.splits.clients[1]["train"]
    for (x1, y1), (x2, y2) in zip(
        *(
            make_loader(
                data.train, rows, shuffle=True, generator=torch.Generator().manual_seed(0), **data.train_options
            )
            for data in (plain, preloaded)
        ),
        strict=True,
    ):
        assert torch.equal(x1, x2)
        assert torch.equal(y1, y2)
    assert isinstance(preloaded.val, TensorBatches)
    assert isinstance(plain.val, DataLoader)


def test_a_client_without_a_full_batch_is_named_where_the_rest_is_dropped():
    source = SourceData(DATA)
    with pytest.raises(ConfigurationError, match="Client 1 has 18 training samples, not one full batch of 32"):
        deal_out(source, SizePartitioner([4, 1]), loader=Loader(drop_last=True))
    deal_out(source, SizePartitioner([4, 1]), batch_size=18, loader=Loader(drop_last=True))
