"""What a FederatedStrategy refuses, and what it is with one process."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import lightning as L
import pytest
import torch
from rank_processes import free_port
from torch.distributed import HashStore
from toys import fit, toy_data, vector

from flsv.engines.ranks import FederatedStrategy, ranks_of
from flsv.engines.ranks.rendezvous import Rendezvous, _heartbeat, check_versions, meet, versions
from flsv.errors import ConfigurationError
from flsv.loop import FederatedLoop


def test_one_process_is_the_ordinary_path(tmp_path: Path) -> None:
    ordinary = fit(FederatedLoop(seed=1), tmp_path / "one")
    alone = fit(FederatedLoop(seed=1), tmp_path / "two", strategy="federated", devices=1)
    assert torch.equal(vector(ordinary), vector(alone))


def test_its_name_is_registered() -> None:
    trainer = L.Trainer(strategy="federated", devices=2, accelerator="cpu", logger=False, enable_checkpointing=False)
    assert isinstance(trainer.strategy, FederatedStrategy)
    assert (trainer.world_size, ranks_of(trainer).size) == (1, 1)  # until it starts


def test_another_backend_is_refused() -> None:
    with pytest.raises(ConfigurationError, match=r'process_group_backend=\'mpi\'\): expected "gloo" or "nccl"'):
        FederatedStrategy(process_group_backend="mpi")  # type: ignore[arg-type]


@pytest.mark.parametrize("arguments", [{"threads": 0}, {"timeout": 0}, {"start_timeout": float("nan")}])
def test_numbers_out_of_range_are_refused(arguments: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError, match=f"FederatedStrategy.*{next(iter(arguments))}"):
        FederatedStrategy(**arguments)


def test_other_versions_are_named() -> None:
    mine = versions()
    check_versions([mine, dict(mine)])
    with pytest.raises(ConfigurationError, match=f"rank 1 runs torch 1.0 \\(rank 0: {mine['torch']}"):
        check_versions([mine, {**mine, "torch": "1.0"}])


def test_a_rank_more_than_devices(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_RANK", "1")
    monkeypatch.setenv("MASTER_PORT", "1")
    with pytest.raises(ConfigurationError, match="this is local rank 1, and the trainer has 1 devices on a host"):
        fit(FederatedLoop(seed=1), tmp_path, data=toy_data(), strategy="federated", devices=1)


@pytest.mark.parametrize(
    ("alive", "message"),
    [
        (lambda: "the process of local rank 1 has ended with code 1", "the process of local rank 1 has ended"),
        (lambda: None, "0 s are over"),
    ],
)
def test_who_does_not_come_is_not_waited_for(alive: Callable[[], str | None], message: str) -> None:
    rendezvous = Rendezvous("127.0.0.1", free_port(), 0, 2, start_timeout=0.2)
    with pytest.raises(ConfigurationError, match=f"rank 0 of 2 waits for rank 1, which does not come: {message}"):
        meet(rendezvous, torch.device("cpu"), alive=alive)


def test_who_is_not_there_for_the_lifeline_is_not_waited_for() -> None:
    store = HashStore()
    rendezvous = Rendezvous("127.0.0.1", free_port(), 0, 2)
    with pytest.raises(ConfigurationError, match="rank 0 of 2 waits for rank 1, which does not come: it has ended"):
        _heartbeat(rendezvous, store, lambda: "it has ended", time.monotonic() + 5)


def test_torchruns_store_is_there_before_the_ranks_or_not_at_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    store = Mock(side_effect=RuntimeError("refused"))
    monkeypatch.setattr("flsv.engines.ranks.rendezvous.TCPStore", store)
    with pytest.raises(ConfigurationError, match="rank 1 of 2 cannot reach the ranks' store at .*: refused"):
        meet(Rendezvous("127.0.0.1", free_port(), 1, 2, start_timeout=0.2), torch.device("cpu"))
    assert store.call_count == 1


def test_a_store_that_cannot_be_reached() -> None:
    rendezvous = Rendezvous("127.0.0.1", free_port(), 1, 2, start_timeout=0.5)
    with pytest.raises(ConfigurationError, match="rank 1 of 2 cannot reach the ranks' store at 127.0.0.1"):
        meet(rendezvous, torch.device("cpu"))
