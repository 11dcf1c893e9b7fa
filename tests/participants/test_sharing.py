"""What travels, by words, patterns and functions; on modules whose names say nothing of what their layers are."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import nn

from flsv.errors import ConfigurationError
from flsv.participants.sharing import Sharing, sharing


def network() -> nn.Module:
    """0: linear, 1: BatchNorm, 2: GroupNorm, 3: linear, 4: linear."""
    return nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.GroupNorm(2, 4), nn.Linear(4, 4), nn.Linear(4, 3))


def of(*layers: int) -> set[str]:
    """Names of all that these layers have."""
    return {name for name in network().state_dict() if int(name[0]) in layers}


@pytest.mark.parametrize(
    ("share", "kept"),
    [
        ("all", set()),
        ("trainable", set()),
        (["!norm"], of(1, 2)),
        (["!head"], of(4)),
        (["all", "!3.*", "!4.*"], of(3, 4)),
        (["0.*", "norm"], of(3, 4)),
        (["!?.*", "head", "!4.bias"], of(0, 1, 2, 3) | {"4.bias"}),
        (lambda name, tensor: tensor.ndim == 2, of(1, 2) | {"0.bias", "3.bias", "4.bias"}),
    ],
)
def test_what_stays(share: Any, kept: set[str]) -> None:
    assert sharing(["!head"], network(), head="3").kept == of(3)
    assert sharing(share, network()) == Sharing(frozenset(kept), frozenset())


def test_frozen_parameters_are_constant_unless_they_are_excluded_by_name() -> None:
    net = network()
    net[:2].requires_grad_(False)
    frozen = {"0.weight", "0.bias", "1.weight", "1.bias"}
    # Statistics of a frozen BatchNorm change in training, too.
    assert sharing("trainable", net) == Sharing(frozenset(), frozenset(frozen))
    assert sharing(["3.*", "4.*"], net) == Sharing(frozenset(of(1, 2) - frozen), frozenset(frozen))
    assert sharing(["trainable", "!head"], net) == Sharing(frozenset(of(4)), frozenset(frozen))
    kept = sharing(["trainable", "!0.*"], net)
    assert kept == Sharing(frozenset({"0.weight", "0.bias"}), frozenset({"1.weight", "1.bias"}))
    assert sharing(lambda name, _: name.startswith("4"), net).constant == frozen


def test_normalization_of_other_libraries_and_wrapped() -> None:
    class TinyRMSNorm(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(3))

    class PreLayerNorm(nn.Module):  # a block, which has more in it
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.first = nn.Linear(3, 3), nn.LayerNorm(3)

    net = nn.Sequential(TinyRMSNorm(), PreLayerNorm(), nn.SyncBatchNorm(3), nn.InstanceNorm1d(3, affine=True))
    kept = {"0.weight", "1.first.weight", "1.first.bias", "3.weight", "3.bias"}
    kept |= {name for name in net.state_dict() if name.startswith("2.")}
    assert sharing(["!norm"], net).kept == kept


def test_tied_weights_are_one() -> None:
    net = network()
    net[4].weight = nn.Parameter(torch.zeros(4, 4))
    net[0].weight = net[4].weight
    assert sharing(["!head"], net).kept == {"0.weight", "4.bias"}


@pytest.mark.parametrize(
    ("share", "said"),
    [
        (["!bn.*"], "'!bn.*' names nothing of the module. It has '0.weight', '0.bias', '1.weight', ..."),
        (["!*"], "leaves nothing of the module to share"),
        (["*num_batches*"], "leaves nothing of the module to share"),
    ],
)
def test_what_names_nothing(share: Any, said: str) -> None:
    with pytest.raises(ConfigurationError, match=re.escape(said)):
        sharing(share, network())
