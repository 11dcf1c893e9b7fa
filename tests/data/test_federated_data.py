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


def test_batch_sizes():
    tensors, samples = SourceData(DATA), SourceData(PerSample())
    told = SourceData(DATA, train_options={"batch_size": 7}, eval_options={"batch_size": 9})

    def sizes(source, **options):
        dealt = deal_out(source, **options)
        return dealt.train_options["batch_size"], dealt.eval_options["batch_size"]

    assert sizes(tensors) == (32, 256)
    assert sizes(samples) == (32, 32)
    assert sizes(samples, loader=Loader(preload=True)) == (32, 256)
    assert sizes(tensors, batch_size=300) == (300, 300)
    assert sizes(tensors, batch_size=4, loader=Loader(eval_batch_size=5)) == (4, 5)
    assert sizes(told) == (7, 9)
    assert sizes(told, batch_size=4) == (4, 9)
    assert sizes(told, loader=Loader(eval_batch_size=4)) == (7, 4)


def test_reading_options_replace_the_sources_unless_none():
    source = SourceData(
        PerSample(), train_options={"num_workers": 2, "drop_last": True}, eval_options={"num_workers": 1}
    )
    kept = deal_out(source, batch_size=4, loader=Loader())
    assert kept.train_options == {"batch_size": 4, "num_workers": 2, "drop_last": True}
    assert kept.eval_options["num_workers"] == 1
    changed = deal_out(source, loader=Loader(num_workers=0, drop_last=False))
    assert changed.train_options["num_workers"] == changed.eval_options["num_workers"] == 0
    assert changed.eval_options["drop_last"] is False


def test_own_validation_data_spare_the_training_data():
    val = TensorDataset(X[:9], Y[:9])
    dealt = deal_out(SourceData(DATA, val))
    assert len(dealt.splits.server_val) == 0
    assert int(dealt.class_counts.sum()) == 100
    assert isinstance(dealt.val, TensorBatches)
    assert torch.equal(next(iter(dealt.val))[0], X[:9])
    loader = DataLoader(val)
    assert deal_out(SourceData(DATA, val_loaders=loader)).val is loader


def test_class_names_fall_back_on_numbers():
    assert deal_out(SourceData(DATA)).classes.names == ("0", "1", "2", "3")
    assert deal_out(SourceData(DATA, class_names=tuple("abcde"))).classes.names == tuple("abcde")
    assert deal_out(SourceData(DATA, class_names=tuple("ab"))).classes.names == ("0", "1", "2", "3")


def test_classes_that_a_subset_misses_are_counted():
    assert deal_out(SourceData(DATA, indices=torch.arange(0, 100, 4))).class_counts.shape == (3, 4)


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


@pytest.mark.parametrize(
    ("sample", "collate_fn", "shape"),
    [
        (lambda i: (X[i], int(Y[i])), None, (2, 3)),
        (lambda i: {"image": X[i], "label": int(Y[i])}, None, (2, 3)),
        (lambda i: (i, int(Y[i])), lambda s: (torch.zeros(len(s), 5, 5), None), (5, 5)),
    ],
)
def test_input_shape(sample, collate_fn, shape):
    class Made(PerSample):
        def __getitem__(self, index):
            return sample(index)

    options = {"collate_fn": collate_fn}
    assert deal_out(SourceData(Made(), train_options=options, eval_options=options)).input_shape == shape


def test_a_client_without_a_full_batch_is_named_where_the_rest_is_dropped():
    source = SourceData(DATA)
    with pytest.raises(ConfigurationError, match="Client 1 has 18 training samples, not one full batch of 32"):
        deal_out(source, SizePartitioner([4, 1]), loader=Loader(drop_last=True))
    deal_out(source, SizePartitioner([4, 1]), batch_size=18, loader=Loader(drop_last=True))


def test_names_are_made_once() -> None:
    """Whoever asks for one name asks for all: for every client anew, that would be a square of their number."""
    data = deal_out(SourceData(DATA), IIDPartitioner(20))
    assert data.client_names == tuple(map(str, range(20)))
    assert data.client_names is data.client_names
