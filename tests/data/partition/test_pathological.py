"""A few classes per client, each split evenly among its holders."""

import pytest
import torch

from flsv.data import PathologicalPartitioner, partition_counts
from flsv.errors import ConfigurationError

LABELS = torch.arange(10).repeat(100)


@pytest.mark.parametrize(("clients", "classes"), [(5, 2), (10, 3), (7, 4), (3, 10), (20, 1), (100, 2)])
def test_every_client_has_its_number_of_classes_and_every_class_a_holder(clients, classes):
    parts = PathologicalPartitioner(clients, classes, seed=1)(LABELS, 10)
    counts = partition_counts(parts, LABELS, 10)
    holders = (counts > 0).sum(0)
    assert ((counts > 0).sum(1) == classes).all()
    assert (counts.sum(0) == 100).all()
    assert holders.max() - holders.min() <= 1
    for label in range(10):
        held = counts[counts[:, label] > 0, label]
        assert held.max() - held.min() <= 1


def test_some_classes_stay_unused_where_clients_are_too_few():
    counts = partition_counts(PathologicalPartitioner(2, 3)(LABELS, 10), LABELS, 10)
    assert ((counts > 0).sum(0) <= 1).all()
    assert counts.sum() == 600


def test_classes_without_samples_are_not_dealt():
    labels = torch.tensor([0, 3, 3, 7, 7, 0, 0, 3])
    counts = partition_counts(PathologicalPartitioner(3, 1)(labels, 10), labels, 10)
    assert counts.sum(0).nonzero().flatten().tolist() == [0, 3, 7]
    with pytest.raises(ConfigurationError, match="of 3 classes only"):
        PathologicalPartitioner(3, 4)(labels, 10)


def test_which_classes_go_together_depends_on_the_seed():
    deals = {
        tuple(map(tuple, (partition_counts(PathologicalPartitioner(5, 2, seed)(LABELS, 10), LABELS, 10) > 0).tolist()))
        for seed in range(5)
    }
    assert len(deals) == 5


def test_a_class_with_fewer_samples_than_holders():
    labels = torch.tensor([0, 0, 0, 0, 0, 1])
    with pytest.raises(ConfigurationError, match="class 1 has fewer samples than its 2 holders"):
        PathologicalPartitioner(4, 1)(labels, 2)


def test_classes_per_client_must_be_positive():
    with pytest.raises(ConfigurationError, match="classes_per_client=0.: expected a whole number of at least 1"):
        PathologicalPartitioner(4, 0)
