"""Classifier heads that go where the server's went."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn
from toys import fit

from flsv.attacks import HeadAlignment
from flsv.errors import ConfigurationError
from flsv.loop import FederatedLoop
from flsv.parameters import ParameterSpace
from flsv.uploads import UploadContext


def test_rows_are_the_servers_at_their_own_length_and_all_else_stays() -> None:
    space = ParameterSpace(nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2)))
    assert space.head is not None
    generator = torch.Generator().manual_seed(0)
    update, first, second = torch.randn(3, space.size, generator=generator)
    attack, state = HeadAlignment(classes=[1]), {}
    attack.check(space)

    def sent(start: torch.Tensor) -> torch.Tensor:
        return attack.apply(update, UploadContext(0, 2, space.num_parameters, 1, state=state, start=start))

    torch.testing.assert_close(sent(first), update)
    after = sent(second)
    mine, own, step = (space.head.rows(each) for each in (after, update, second - first))
    torch.testing.assert_close(mine[0], own[0])
    torch.testing.assert_close(mine[1], step[1] * own[1].norm() / step[1].norm())
    before_head = space.head.weight.start
    assert torch.equal(after[:before_head], update[:before_head])


def test_what_cannot_be(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="mix"):
        HeadAlignment(mix=0)
    with pytest.raises(ConfigurationError, match=r"has no classes \[7\]; they are 0 .. 2"):
        fit(FederatedLoop(uploads=[HeadAlignment(classes=[7])]), tmp_path)
    with pytest.raises(ConfigurationError, match="has none that is shared"):
        HeadAlignment().check(ParameterSpace(nn.Conv1d(2, 2, 1)))
