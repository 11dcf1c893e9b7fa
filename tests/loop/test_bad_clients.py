"""Clients whose updates are not finite, or who attack."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from small_loops import KeepUpdates, shapfed
from torch import Tensor
from toys import Plain, fit, network, vector

from flsv.attacks import Attack
from flsv.loop import FederatedLoop
from flsv.personalization import Standalone
from flsv.uploads import UploadContext


class Diverges(Plain):
    """Some clients' gradients are NaN from some round on."""

    def __init__(self, clients: set[int], since: int) -> None:
        super().__init__()
        self.bad, self.since = clients, since

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loop = next(c for c in self.trainer.callbacks if isinstance(c, FederatedLoop))
        broken = loop.round_index >= self.since and loop.current_client in self.bad
        return super().training_step(batch, batch_idx) * (float("nan") if broken else 1.0)


def test_a_client_with_nan_is_left_out_named_and_the_run_goes_on(tmp_path: Path) -> None:
    loop = shapfed(personalizer=Standalone(), optimizer_state="persist")
    with pytest.warns(UserWarning, match="client 1 returned a model with NaN or infinite entries in round 2"):
        module = fit(loop, tmp_path, Diverges({1}, since=1))
    assert vector(module).isfinite().all()
    assert loop.weights[[0, 2]].isfinite().all()
    assert loop.weights[1].isnan()
    assert loop.received()[1].isfinite().all()
    assert loop.contributions["cssv"].isfinite().all()  # client 1 keeps the row of round 0


def test_if_all_clients_fail_the_run_stops_with_the_reason(tmp_path: Path) -> None:
    with (
        pytest.warns(UserWarning, match="3 of 3 clients returned"),
        pytest.raises(RuntimeError, match=r"round 2: every client of the cohort returned a model with NaN"),
    ):
        fit(FederatedLoop(seed=1), tmp_path, Diverges({0, 1, 2}, since=1))


# ---- malicious clients


class Double(Attack):
    """Sends twice its update."""

    def attack(self, update: Tensor, context: UploadContext, generator: torch.Generator) -> Tensor:
        return 2 * update


def test_an_attack_acts_on_the_update_that_leaves_the_client(tmp_path: Path) -> None:
    honest, attacked = KeepUpdates(), KeepUpdates()
    net = network()
    fit(FederatedLoop(honest, seed=1), tmp_path, Plain(copy.deepcopy(net)), rounds=1)
    loop = FederatedLoop(attacked, uploads=[Double(clients=[2])], seed=1)
    fit(loop, tmp_path, Plain(copy.deepcopy(net)), rounds=1)
    start, cut = loop.space.read(Plain(copy.deepcopy(net))), loop.space.num_parameters
    for client in (0, 1):
        assert torch.equal(attacked.rounds[0][client], honest.rounds[0][client])
    expected = start + 2 * (honest.rounds[0][2] - start)
    torch.testing.assert_close(attacked.rounds[0][2][:cut], expected[:cut])
    torch.testing.assert_close(attacked.rounds[0][2][cut:], honest.rounds[0][2][cut:])  # buffers are left alone
