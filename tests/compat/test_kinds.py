"""Every kind of module, as it is, in a federation: what comes out is what a loop written by hand gives."""

from __future__ import annotations

import copy
import warnings
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from compat.by_hand import QUIET, SEED, coalition_values, fedavg, validated
from compat.kinds import contrastive, generative, hooks, sequences, structured, supervised, transfer
from compat.kinds.base import Kind, federated
from torch import Tensor

from flsv import FederatedLoop
from flsv.aggregation import FedAvg

ROUNDS = 2

KINDS: dict[str, Kind] = {
    **generative.KINDS,
    **contrastive.KINDS,
    **transfer.KINDS,
    **supervised.KINDS,
    **sequences.KINDS,
    **structured.KINDS,
    **hooks.KINDS,
}


class Remembers(FedAvg):
    """Keeps what the clients of the first round sent."""

    def weights(self, round: Any, contributions: Any) -> Tensor:
        if round.round_index == 0:
            self.first = round.client_vectors.clone()
        return super().weights(round, contributions)


def run(kind: Kind, folder: Path, rounds: int = ROUNDS, **loop: Any) -> tuple[L.LightningModule, FederatedLoop]:
    module, federation = kind.module(), FederatedLoop(seed=SEED, print_table=False, **loop)
    options = {**QUIET, "max_epochs": rounds, **kind.trainer}
    trainer = L.Trainer(**options, callbacks=[federation, *kind.callbacks()], default_root_dir=folder)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer.fit(module, federated(kind))
    return module, federation


@pytest.mark.parametrize("name", KINDS)
def test_trains_as_by_hand(tmp_path: Path, name: str) -> None:
    kind = KINDS[name]
    aggregator = Remembers()
    module, loop = run(kind, tmp_path, aggregator=aggregator)
    expected, history = fedavg(kind.module(), federated(kind), tmp_path, ROUNDS, kind.callbacks, **kind.trainer)
    for vector, client in zip(aggregator.first, history[0].clients):
        state = client.state_dict()
        for entry, value in loop.space.unflatten(vector).items():
            if kind.exact:
                assert torch.equal(value, state[entry]), entry
    there = module.state_dict()
    assert there.keys() == expected.state_dict().keys()
    worst = 0.0
    for entry, value in expected.state_dict().items():
        worst = max(worst, (there[entry].double() - value.double()).abs().nan_to_num(0).max().item())
        torch.testing.assert_close(
            there[entry], value, rtol=kind.tolerance, atol=kind.tolerance, msg=lambda m, e=entry: f"{e}: {m}"
        )
    print(f"WORST {name} {worst:.1e}")
