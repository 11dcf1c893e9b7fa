"""FedRep against Algorithm 1 in plain PyTorch, head and body frozen in turn."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from by_hand import LOCAL_EPOCHS, ROUNDS, SEED, Train, assert_kept, assert_same, sharing_by_hand, unequal_data
from torch import nn
from toys import Plain, fit, network

from flsv.aggregation import FedAvg
from flsv.clients.algorithms import FedRep
from flsv.errors import ConfigurationError
from flsv.loop import FederatedLoop
from flsv.sampling import UniformSampler

pytestmark = pytest.mark.filterwarnings("ignore:.*tensors stay at their clients.*")
HEAD = ["4.weight", "4.bias"]


def decaying(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.5, weight_decay=0.01)


def fedrep(**kwargs: Any) -> FederatedLoop:
    options: dict[str, Any] = {"sampler": UniformSampler(3), "local_epochs": LOCAL_EPOCHS, "seed": SEED, **kwargs}
    options.setdefault("share", ["!head"])
    return FederatedLoop(FedAvg("uniform"), client_algorithm=FedRep(head_epochs=1), **options)


def in_turn() -> Train:
    """One epoch for the head, then one for the body, as the authors' code has it: by requires_grad."""

    def train(client: nn.Module, epochs: list[list[Any]]) -> None:
        optimizer = decaying(client.parameters())
        for number, epoch in enumerate(epochs):
            for name, parameter in client.named_parameters():
                parameter.requires_grad_((name in HEAD) == (number == 0))
            for features, labels in epoch:
                optimizer.zero_grad()
                nn.functional.cross_entropy(client(features), labels).backward()
                optimizer.step()
        client.requires_grad_(True)

    return train


@pytest.mark.parametrize("batch_norm", [False, True])
def test_same_models_and_heads_as_by_hand(tmp_path: Path, batch_norm: bool) -> None:
    net = network(batch_norm)
    expected, own = sharing_by_hand(net, HEAD, in_turn(), uniform=True)
    federated, module = fedrep(), Plain(copy.deepcopy(net), decaying)
    fit(federated, tmp_path, module, unequal_data(), rounds=ROUNDS)
    assert_same(module.net, expected)
    assert_kept(federated, own)
    assert not torch.equal(module.net[0].weight, net[0].weight)


def test_what_cannot_work_is_refused_before_training(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"FedRep\(\) trains the part that a client keeps, and all"):
        fit(fedrep(share="all"), tmp_path)
    with pytest.raises(ConfigurationError, match=r"no epoch for the shared part: local_epochs=1\. Set .*=2\) or more"):
        fit(fedrep(local_epochs=1), tmp_path)
    with pytest.raises(ConfigurationError, match=r"head_epochs=0"):
        FedRep(head_epochs=0)
