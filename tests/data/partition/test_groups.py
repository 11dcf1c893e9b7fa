"""Natural groups stay whole."""

import pytest
import torch

from flsv.data import GroupPartitioner
from flsv.errors import ConfigurationError

GROUPS = torch.tensor([40] * 5 + [10] * 2 + [30] * 4 + [20] * 3)
LABELS = torch.zeros(len(GROUPS), dtype=torch.long)


def test_one_client_per_group_in_order():
    parts = GroupPartitioner()(LABELS, 1, GROUPS)
    assert [GROUPS[part].unique().tolist() for part in parts] == [[10], [20], [30], [40]]
    assert [len(part) for part in parts] == [2, 3, 4, 5]


def test_groups_are_dealt_from_the_largest_to_the_smallest():
    parts = GroupPartitioner(num_clients=3)(LABELS, 1, GROUPS)
    assert [GROUPS[part].unique().tolist() for part in parts] == [[10, 40], [30], [20]]


def test_no_group_is_split():
    groups = torch.randint(0, 50, (400,), generator=torch.Generator().manual_seed(0))
    parts = GroupPartitioner(num_clients=7)(torch.zeros(400, dtype=torch.long), 1, groups)
    owners = [set(groups[part].tolist()) for part in parts]
    assert sum(map(len, owners)) == len(set().union(*owners)) == len(groups.unique())


def test_number_of_clients_is_unknown_until_the_groups_are_seen():
    assert GroupPartitioner().num_clients is None
    assert repr(GroupPartitioner()) == "GroupPartitioner()"


def test_data_without_groups():
    with pytest.raises(ConfigurationError, match="needs to know each sample's group"):
        GroupPartitioner()(LABELS, 1)


def test_fewer_groups_than_clients():
    with pytest.raises(ConfigurationError, match="4 groups, and a group is not split"):
        GroupPartitioner(num_clients=5)(LABELS, 1, GROUPS)
    with pytest.raises(ConfigurationError, match="fall into 1 groups"):
        GroupPartitioner()(LABELS, 1, torch.ones_like(GROUPS))


def test_num_clients_of_one():
    with pytest.raises(ConfigurationError, match="at least 2 clients"):
        GroupPartitioner(num_clients=1)
