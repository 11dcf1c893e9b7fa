"""What a FederatedStrategy refuses, and what it is with one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from rank_processes import free_port
from toys import fit, vector

from flsv.engines.ranks import FederatedStrategy, ranks_of
from flsv.engines.ranks.group import meet
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


@pytest.mark.parametrize("arguments", [{"threads": 0}, {"timeout": 0}, {"timeout": float("nan")}])
def test_numbers_out_of_range_are_refused(arguments: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError, match=f"FederatedStrategy.*{next(iter(arguments))}"):
        FederatedStrategy(**arguments)


def test_who_does_not_come_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(free_port()))
    for rank in (0, 1):  # as the server of the others, and as one of them
        with pytest.raises(ConfigurationError, match=f"rank {rank} of 2 has not met the others within 0.5 s"):
            meet(rank, 2, torch.device("cpu"), start_timeout=0.5)
