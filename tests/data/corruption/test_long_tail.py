"""Exponential class sizes before partitioning."""

import numpy as np
import pytest
import torch

from flsv.data import DirichletPartitioner, FederatedDataModule, GroupPartitioner, IIDPartitioner, LongTail, Splits
from flsv.data.partition.base import partition_counts
from flsv.errors import ConfigurationError

LABELS = torch.arange(10).repeat_interleave(500)[torch.randperm(5000, generator=torch.Generator().manual_seed(0))]


def class_sizes(ratio, labels=LABELS, num_classes=10, **arguments):
    parts = LongTail(IIDPartitioner(3), ratio, **arguments)(labels, num_classes)
    return partition_counts(parts, labels, num_classes).sum(0).numpy()


@pytest.mark.parametrize("ratio", [1, 10, 50, 100])
def test_sizes_fall_off_exponentially(ratio):
    # Cao et al.'s own formula: img_max * imb_factor ** (j / (C - 1)) with imb_factor = 1 / ratio.
    expected = 500 * (1 / ratio) ** (np.arange(10) / 9)
    assert np.abs(class_sizes(ratio) - expected).max() <= 0.5
    assert class_sizes(ratio)[0] / class_sizes(ratio)[-1] == pytest.approx(ratio, rel=0.1)


def test_unequal_classes_still_get_the_exact_ratio():
    labels = torch.arange(4).repeat_interleave(torch.tensor([1000, 100, 900, 800]))
    sizes = class_sizes(8, labels, 4)
    assert sizes.tolist() == [200, 100, 50, 25]
    assert class_sizes(1, labels, 4).tolist() == [100] * 4


def test_absent_classes_are_left_alone():
    labels = torch.tensor([0] * 100 + [3] * 100)
    assert class_sizes(10, labels, 5).tolist() == [100, 0, 0, 10, 0]


def test_which_samples_stay_depends_on_the_seed_only():
    first, again, other = (
        torch.cat(LongTail(IIDPartitioner(3), 10, seed=seed)(LABELS, 10)).sort().values for seed in (0, 0, 1)
    )
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def test_the_inner_partitioner_deals_what_is_left():
    inner = DirichletPartitioner(4, alpha=0.3, seed=2)
    parts = LongTail(inner, 10)(LABELS, 10)
    kept = torch.cat(parts).sort().values
    expected = [kept[part] for part in inner(LABELS[kept], 10)]
    assert all(torch.equal(part, other) for part, other in zip(parts, expected))
    groups = torch.arange(5000) % 3
    by_group = LongTail(GroupPartitioner(), 10)(LABELS, 10, groups)
    assert [groups[part].unique().tolist() for part in by_group] == [[0], [1], [2]]


def test_in_a_data_module_the_server_keeps_all_classes():
    data = FederatedDataModule("digits", LongTail(IIDPartitioner(3), 20), splits=Splits(server_val=0.2))
    data.setup("fit")
    totals = data.class_counts.sum(0)
    assert totals[0] / totals[-1] == pytest.approx(20, rel=0.1)
    held = torch.bincount(torch.cat([y for _, y in data.val_dataloader()]), minlength=10)
    assert held.min() > 10
    assert data.malicious == []
    assert data.num_clients == 3


def test_a_ratio_that_cannot_be():
    for ratio in (0.5, float("nan"), float("inf")):
        with pytest.raises(ConfigurationError, match="imbalance_ratio=.*: expected a finite number of at least 1"):
            LongTail(IIDPartitioner(3), ratio)
    with pytest.raises(ConfigurationError, match=r"would keep 0\.25 of its samples.* Lower imbalance_ratio"):
        class_sizes(2000)
