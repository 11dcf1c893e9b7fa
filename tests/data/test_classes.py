"""Classes are found where samples have them, and are missed only where somebody needs them."""

import dataclasses
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from data_options import grouped
from torch.utils.data import ConcatDataset, Dataset, Subset, TensorDataset

from flsv.data import (
    ClosedSetLabelNoise,
    DirichletPartitioner,
    FederatedDataModule,
    GaussianNoise,
    IIDPartitioner,
    OpenSetLabelNoise,
    PathologicalPartitioner,
    ProportionPartitioner,
    ShardPartitioner,
    SizePartitioner,
    Splits,
)
from flsv.data.labels import find_classes
from flsv.data.skew import LongTail
from flsv.errors import ConfigurationError

N = 40


class Items(Dataset):
    """Hands out samples, counts how often, and has whatever attributes it is given."""

    def __init__(self, items, **attributes):
        self.items, self.reads = items, 0
        self.__dict__.update(attributes)

    def __len__(self):
        return len(self.items)

    def __getitem__(self, index):
        self.reads += 1
        return self.items[index]


@dataclasses.dataclass
class Graph:
    """As torch_geometric's Data: attributes, no items."""

    x: torch.Tensor
    edge_index: torch.Tensor
    y: torch.Tensor | None = None


def graphs(label):
    return [Graph(torch.rand(3, 2), torch.zeros(2, 4, dtype=torch.long), label(i)) for i in range(N)]


X = torch.rand(N, 6)

# What people train on that is no classification.
WITHOUT_CLASSES = {
    "texts": TensorDataset(torch.randint(20, (N, 8))),
    "bare tensors": Items(list(torch.randint(20, (N, 8)))),
    "next tokens": TensorDataset(torch.randint(20, (N, 8)), torch.randint(20, (N, 8))),
    "segmentation": Items([(torch.rand(1, 4, 4), torch.randint(3, (4, 4))) for _ in range(N)]),
    "regression": TensorDataset(X, torch.rand(N)),
    "regression, column": TensorDataset(X, torch.rand(N, 1)),
    "regression on whole floats": TensorDataset(X, torch.arange(N).float()),
    "regression, numbers": Items([(X[i], float(i % 3)) for i in range(N)]),
    "regression, stored": Items([(X[i], float(i)) for i in range(N)], targets=np.arange(N) / 1.0),
    "multilabel": TensorDataset(X, torch.randint(2, (N, 5))),
    "multilabel, read": Items([(X[i], torch.randint(2, (5,))) for i in range(N)]),
    "forecasting": TensorDataset(torch.rand(N, 12, 1), torch.rand(N, 4, 1)),
    "nothing but inputs": Items([X[i] for i in range(N)]),
    "two views": Items([[X[i], X[i]] for i in range(N)]),
    "graphs to regress on": Items(graphs(lambda i: torch.rand(1, 3))),
    "graphs with labels of nodes": Items(graphs(lambda i: torch.randint(2, (3,)))),
    "graphs alone": Items(graphs(lambda i: None)),
    "dictionaries": Items([{"input_ids": torch.randint(20, (8,)), "attention_mask": torch.ones(8)} for _ in range(N)]),
    "dictionaries of texts": Items([{"x": X[i], "labels": torch.randint(20, (8,))} for i in range(N)]),
    "boxes": Items([(X[i], {"boxes": torch.rand(i % 3, 4)}) for i in range(N)]),
    "ragged, stored": Items([(X[i], 0.0) for i in range(N)], labels=[[0] * (1 + i % 3) for i in range(N)]),
    "names": Items([(X[i], "cat") for i in range(N)]),
    "parts": ConcatDataset([TensorDataset(X, torch.rand(N)), TensorDataset(X, torch.rand(N))]),
    "a part": Subset(TensorDataset(X, torch.rand(N)), range(5, 35)),
}


@pytest.mark.parametrize("kind", WITHOUT_CLASSES)
@pytest.mark.parametrize(
    "partitioner", [IIDPartitioner(3), SizePartitioner([1, 2, 3]), ProportionPartitioner([[0.4], [0.6]])]
)
def test_data_without_classes_are_of_one_class(kind, partitioner, recwarn):
    data = FederatedDataModule(WITHOUT_CLASSES[kind], partitioner, splits=Splits(server_val=0.2))
    data.prepare_data()
    data.setup("fit")
    assert data.num_classes == 1
    assert data.class_names == ("samples",)
    assert data.no_classes
    assert data.class_counts.shape == (data.num_clients, 1)
    assert data.class_counts.flatten().tolist() == [len(data.client_indices(i)) for i in range(data.num_clients)]
    assert data.class_counts[:, 0].equal(data.num_samples)
    assert not recwarn.list


INTEGERS = [i % 3 for i in range(N)]
WITH_CLASSES = {
    "tensors": TensorDataset(X, torch.tensor(INTEGERS)),
    "column": TensorDataset(X, torch.tensor(INTEGERS)[:, None]),
    "yes and no": TensorDataset(X, torch.tensor(INTEGERS) > 0),
    "read": Items([(X[i], INTEGERS[i]) for i in range(N)]),
    "stored": Items([X[i] for i in range(N)], targets=INTEGERS),
    "dictionaries": Items([{"x": X[i], "label": INTEGERS[i]} for i in range(N)]),
    "graphs": Items(graphs(lambda i: torch.tensor([i % 3]))),
    "objects": Items([SimpleNamespace(image=X[i], label=INTEGERS[i]) for i in range(N)]),
}


@pytest.mark.parametrize("kind", WITH_CLASSES)
def test_integers_are_classes_whoever_asks(kind):
    for asking in ((), ("somebody",)):
        found = find_classes(WITH_CLASSES[kind], (), {}, None, asking)
        expected = [min(label, 1) for label in INTEGERS] if kind == "yes and no" else INTEGERS
        assert found.labels.tolist() == expected
        assert found.labels.dtype == torch.int64
        assert found.missing is None
        assert found.names == tuple(str(i) for i in range(max(expected) + 1))


ASKING = [
    {"partitioner": DirichletPartitioner(3, alpha=0.5)},
    {"partitioner": ShardPartitioner(3)},
    {"partitioner": PathologicalPartitioner(3, classes_per_client=1)},
    {"partitioner": ProportionPartitioner([[0.5, 0.1], [0.5, 0.9]])},
    {"partitioner": LongTail(IIDPartitioner(3), imbalance_ratio=10)},
    {"corruptions": [ClosedSetLabelNoise(fraction=0.5)]},
    {"corruptions": [OpenSetLabelNoise([0])]},
    {"drop_flagged": True},
]


@pytest.mark.parametrize("arguments", ASKING, ids=lambda a: type(next(iter(a.values()))).__name__ + str(len(str(a))))
@pytest.mark.parametrize("kind", ["texts", "multilabel", "nothing but inputs", "graphs to regress on", "names"])
def test_whoever_needs_classes_says_so(arguments, kind):
    data = FederatedDataModule(WITHOUT_CLASSES[kind], **grouped({"partitioner": IIDPartitioner(3), **arguments}))
    (asking,) = arguments.values()
    name = "FedBary" if asking is True else type(asking[0] if isinstance(asking, list) else asking).__name__
    with pytest.raises(
        ConfigurationError, match=rf"{name}\(.*\) needs each sample's class\. No class labels in .*labels=\["
    ):
        data.setup("fit")


def test_labels_of_a_list_an_attribute_or_a_field():
    texts = [{"text": torch.zeros(3), "topic": torch.tensor(i % 4)} for i in range(N)]
    expected = [i % 4 for i in range(N)]
    for source, labels in (
        (TensorDataset(torch.randint(9, (N, 3))), expected),
        (Items(list(X), topic=np.array(expected)), "topic"),
        (Items(texts), "topic"),
    ):
        data = FederatedDataModule(
            source, DirichletPartitioner(2, alpha=1.0), labels=labels, splits=Splits(server_val=0.0)
        )
        data.setup("fit")
        assert data.class_counts.sum(0).tolist() == [10] * 4
        for client in range(2):
            assert data.client_labels(client).tolist() == [expected[i] for i in data.client_indices(client)]


@pytest.mark.parametrize(
    ("labels", "message"),
    [
        ("topic", "labels='topic': TensorDataset has no attribute 'topic' with one entry per sample, and its samples"),
        ([0, 1], r"one class per training sample, \[40\]; got shape \[2\]"),
        ([-1] * N, r"labels: found values that are not whole numbers from 0 up, 40 of 40, such as -1 at 0"),
        (["cat"] * N, "labels: found <U3"),
        (True, "labels needs one class per training sample"),
    ],
)
def test_labels_that_are_none(labels, message):
    with pytest.raises(ConfigurationError, match=message):
        FederatedDataModule(WITHOUT_CLASSES["texts"], IIDPartitioner(2), labels=labels).setup("fit")


def test_integers_that_are_said_to_be_no_classes():
    data = FederatedDataModule(WITH_CLASSES["tensors"], IIDPartitioner(2), labels=False)
    data.setup("fit")
    assert (data.num_classes, data.no_classes) == (1, "labels=False says so")
    with pytest.raises(ConfigurationError, match="DirichletPartitioner.* needs each sample's class. No class labels"):
        FederatedDataModule(WITH_CLASSES["tensors"], DirichletPartitioner(2, 1.0), labels=False).setup("fit")


@pytest.mark.parametrize("labels", [[-1, *range(N - 1)], [10**6, *[0] * (N - 1)]])
def test_integers_that_cannot_be_classes_are_numbers_unless_somebody_asks(labels):
    source = TensorDataset(X, torch.tensor(labels))
    data = FederatedDataModule(source, IIDPartitioner(2))
    with pytest.warns(UserWarning, match="They are taken for numbers"):
        data.setup("fit")
    assert data.num_classes == 1
    with pytest.raises(ConfigurationError):
        FederatedDataModule(source, DirichletPartitioner(2, 1.0)).setup("fit")


def test_where_the_classes_have_names_a_wrong_label_is_a_mistake(recwarn):
    source = Items([(X[i], -1) for i in range(N)], classes=["cat", "dog"])
    with pytest.raises(ConfigurationError, match="some are below 0"):
        FederatedDataModule(source, IIDPartitioner(2)).setup("fit")
    assert not recwarn.list
    source = TensorDataset(X, torch.full((N,), 5000))
    source.classes = ["cat", "dog"]
    with pytest.raises(ConfigurationError, match="the largest label is 5000"):
        FederatedDataModule(source, IIDPartitioner(2)).setup("fit")


def test_noise_on_the_inputs_needs_no_classes():
    for kind in ("regression", "multilabel", "forecasting"):
        source = WITHOUT_CLASSES[kind]
        data = FederatedDataModule(source, IIDPartitioner(2), corruptions=[GaussianNoise(clients=[1])], batch_size=100)
        data.setup("fit")
        assert data.malicious == [1]
        x, y = next(iter(data.client_loader(1, shuffle=False)))
        rows = data.client_indices(1)
        assert not x.isclose(source.tensors[0][rows]).flatten(1).any(1).all()
        assert y.equal(source.tensors[1][rows])  # targets stay as they are
        assert data.class_counts.shape == (2, 1)
