"""What a client keeps is its own."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from toys import fit, toy_data

from flsv.loop import FederatedLoop
from flsv.metrics import ContributionMetric
from flsv.participants import LocalData
from flsv.valuation import clients_of


def test_each_client_has_its_own_and_only_it_can_look() -> None:
    sets = [(torch.zeros(2, 1), torch.tensor([0, 1]))] * 2
    first, second = clients_of(sets)
    first.ask(lambda local: local.memory.update(a=1))
    assert first.ask(lambda local: dict(local.memory)) == {"a": 1}
    assert second.ask(lambda local: dict(local.memory)) == {}
    holders = []
    first.ask(holders.append)
    with pytest.raises(PermissionError, match="client 0"):
        _ = holders[0].memory
    with pytest.raises(PermissionError, match="client 0"):
        second.ask(lambda local: holders[0].memory)


def test_it_goes_with_the_client() -> None:
    clients = clients_of([(torch.zeros(2, 1), torch.tensor([0, 1]))])
    kept = [torch.zeros(1)]
    gone = weakref.ref(kept[0])
    clients[0].ask(lambda local: local.memory.update(a=kept.pop()))
    gc.collect()
    assert gone() is not None
    del clients
    gc.collect()
    assert gone() is None


def count(local: LocalData) -> int:
    """How often this client has been asked."""
    local.state["asked"] = local.state.get("asked", torch.tensor(0)) + 1
    return int(local.state["asked"])


class Asked(ContributionMetric):
    """What every client's own counter reads, ``[n]``."""

    per_class = False

    def init_states(self, num_clients: int, num_classes: int | None) -> None:
        self.add_state("counts", torch.full((num_clients,), float("nan")), dist_reduce_fx="max")

    def update(self, client_ids: torch.Tensor, clients: Any) -> None:
        self.counts[client_ids] = torch.tensor([float(client.ask(count)) for client in clients])

    def compute(self) -> torch.Tensor:
        return self.counts


def asked(folder: Path, rounds: int, ckpt_path: Path | None = None) -> list[float]:
    """The counters after so many rounds."""
    loop = FederatedLoop(metrics={"asked": Asked()}, seed=0)
    saving: dict[str, Any] = {"enable_checkpointing": True, "callbacks": [ModelCheckpoint(folder, "last")]}
    fit(loop, folder, data=toy_data(), rounds=rounds, ckpt_path=ckpt_path, **saving)
    return loop.contributions["asked"].tolist()


def test_a_counter_reads_the_same_after_a_resume(tmp_path: Path) -> None:
    asked(tmp_path / "half", 2)
    assert asked(tmp_path / "rest", 4, tmp_path / "half/last.ckpt") == [4.0, 4.0, 4.0]
