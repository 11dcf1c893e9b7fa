"""Splits written down as a matrix, among them the papers' own."""

import numpy as np
import pytest
import torch

from flsv.data import ProportionPartitioner, partition_counts
from flsv.errors import ConfigurationError

LABELS = torch.arange(10).repeat(600)


def counts_of(partitioner, labels=LABELS, num_classes=10):
    return partition_counts(partitioner(labels, num_classes), labels, num_classes)


def test_shapfed_imbalanced():
    counts = counts_of(ProportionPartitioner([[0.7], [0.1], [0.1], [0.1]]))
    assert counts.tolist() == [[420] * 10, [60] * 10, [60] * 10, [60] * 10]


def test_shapfed_heterogeneous():
    rest = [0.25] * 9
    counts = counts_of(ProportionPartitioner([[1, *rest], [0, *rest], [0, *rest], [0, *rest]]))
    assert counts[:, 0].tolist() == [600, 0, 0, 0]
    assert (counts[:, 1:] == 150).all()


def test_shapfed_chest_xrays():
    labels = torch.cat([torch.zeros(1214), torch.ones(3494)]).long()
    shares = np.array([[0.4, 0.0], [0.3, 0.1], [0.2, 0.2], [0.1, 0.3], [0.0, 0.4]])
    counts = counts_of(ProportionPartitioner(shares.tolist()), labels, 2)
    assert np.abs(counts.numpy() - shares * [1214, 3494]).max() < 1
    assert counts.sum(0).tolist() == [1214, 3494]


def test_columns_below_one_leave_samples_unused():
    assert counts_of(ProportionPartitioner([[0.2], [0.3]])).tolist() == [[120] * 10, [180] * 10]


def test_random_matrices_are_met_within_a_sample():
    rng = np.random.default_rng(0)
    labels = torch.from_numpy(rng.integers(0, 6, 997))
    for _ in range(20):
        shares = rng.dirichlet(np.ones(5), size=6).T[:4]
        counts = counts_of(ProportionPartitioner(shares.tolist()), labels, 6)
        assert np.abs(counts.numpy() - shares * np.bincount(labels, minlength=6)).max() < 1


def test_guo_eighty_percent_of_two_classes():
    rows = [[0.4 if label // 2 == client else 0.025 for label in range(10)] for client in range(4)]
    rows.append([0.5 if label >= 8 else 0.0 for label in range(10)])
    counts = counts_of(ProportionPartitioner(rows, of="client", total=1000))
    assert counts.sum(1).tolist() == [200] * 5
    assert counts[0].tolist() == [80, 80, 5, 5, 5, 5, 5, 5, 5, 5]
    assert counts[4].tolist() == [0] * 8 + [100, 100]


def test_client_rows_and_sizes_are_on_any_scale():
    counts = counts_of(ProportionPartitioner([[8] * 10, [1] * 10], of="client", sizes=[2, 6], total=800))
    assert counts.tolist() == [[20] * 10, [60] * 10]


def test_client_shares_use_as_much_as_the_scarcest_class_allows():
    labels = torch.cat([torch.zeros(100), torch.ones(1000)]).long()
    counts = counts_of(ProportionPartitioner([[1, 1], [1, 3]], of="client"), labels, 2)
    # Both clients have T/2; class 0 is asked for T/4 + T/8 = 100, so T = 266.7.
    assert counts.sum(0)[0] <= 100
    assert counts[:, 0].tolist() == [67, 33]
    assert counts.sum(1).tolist() == [133, 133]


def test_client_shares_never_exceed_a_class():
    rng = np.random.default_rng(1)
    labels = torch.from_numpy(rng.integers(0, 5, 300))
    for _ in range(50):
        mix = rng.dirichlet(np.full(5, 0.5), size=7)
        counts = counts_of(ProportionPartitioner(mix.tolist(), of="client"), labels, 5)
        assert (counts.sum(0) <= torch.bincount(labels, minlength=5)).all()


def test_more_in_total_than_the_classes_bear():
    with pytest.raises(ConfigurationError, match="At most total=600 fits"):
        ProportionPartitioner([[1] + [0] * 9, [1] + [0] * 9], of="client", total=601)(LABELS, 10)


def test_counts():
    matrix = [[10, 0, 5], [0, 20, 5]]
    assert counts_of(ProportionPartitioner(matrix, of="count"), torch.arange(3).repeat(20), 3).tolist() == matrix


def test_counts_beyond_what_there_is():
    with pytest.raises(ConfigurationError, match="class 3 has 600 samples, but the matrix asks for 602"):
        ProportionPartitioner([[1, 1, 1, 301] + [1] * 6] * 2, of="count")(LABELS, 10)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"matrix": [[0.7], [0.4]]}, "a column sums to more than 1"),
        ({"matrix": [[1, 0.5], [0, 0.6]]}, "a column sums to more than 1"),
        ({"matrix": [[0.7], [-0.1]]}, "of at least 0"),
        ({"matrix": [[0.7], [float("nan")]]}, "finite"),
        ({"matrix": [[0.7, 0.1], [0.0, 0.0]]}, "a row is all zeros"),
        ({"matrix": [[0.7, 0.1], [0.1, 0.1, 0.1]]}, r"the rows have \[2, 3\] entries"),
        ({"matrix": [[0.7]]}, "at least 2 clients"),
        ({"matrix": [[1.5], [1.0]], "of": "count"}, "whole numbers"),
        ({"matrix": [[0.5], [0.5]], "of": "row"}, '"class" or "client"'),
        ({"matrix": [[0.5], [0.5]], "total": 5}, "belong to of='client'"),
        ({"matrix": [[0.5], [0.5]], "of": "client", "sizes": [1]}, "one positive number per client"),
    ],
)
def test_matrices_that_are_none(arguments, message):
    with pytest.raises(ConfigurationError, match=message):
        ProportionPartitioner(**arguments)


def test_as_many_columns_as_classes():
    with pytest.raises(ConfigurationError, match=r"the data have 10 classes, but the rows have \[2\] entries"):
        ProportionPartitioner([[0.5, 0.5], [0.5, 0.5]])(LABELS, 10)
