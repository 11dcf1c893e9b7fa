"""Names of 1.0 that stay until 2.0 mean what the new ones do."""

from __future__ import annotations

import pytest
from torch import nn

from flsv import FederatedLoop, participants
from flsv.core import Channel, LocalData, map_clients, opened
from flsv.core.parameter_space import ParameterSpace
from flsv.core.strategy import Federation, FederationInfo


def test_functions_and_classes_have_old_and_new_names() -> None:
    assert Federation is FederationInfo
    assert (Channel.taken_out, Channel.put_first) == (Channel.pop_since, Channel.prepend)
    assert LocalData.visit is LocalData.set_models
    assert (participants.run_protocol, participants.at) == (map_clients, opened)


@pytest.mark.parametrize(("old", "new"), [("apart_head", "unshared_head"), ("left_names", "non_finite_names")])
def test_parameter_space_attributes_have_old_and_new_names(old: str, new: str) -> None:
    space = ParameterSpace(nn.Linear(2, 2), kept=["weight"])
    assert getattr(space, old) == getattr(space, new)


def test_loop_attributes_have_old_and_new_names() -> None:
    loop = FederatedLoop()
    assert loop.board is loop.contribution_metrics
