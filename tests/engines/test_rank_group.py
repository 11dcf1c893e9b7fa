"""The group by which ranks communicate, without processes."""

import weakref

import pytest
import torch

from flsv.engines.ranks import RankGroup


class GroupOfTwo:
    """A process group whose connections are open as long as it exists."""

    def rank(self):
        return 0

    def size(self):
        return 2


def test_aborted_rank_closes_its_connections_and_exchanges_nothing(capsys):
    process_group = GroupOfTwo()
    # A weak reference, which returns None as soon as nobody has the process group.
    process_group_or_none = weakref.ref(process_group)
    ranks = RankGroup(process_group, torch.device("cpu"))
    del process_group

    ranks.abort("its round 2 ended early")

    assert process_group_or_none() is None
    assert "rank 0 of 2 stops: its round 2 ended early." in capsys.readouterr().err
    with pytest.raises(RuntimeError, match="rank 0 of 2 has stopped communicating"):
        ranks.broadcast(0, "a value", "values")
