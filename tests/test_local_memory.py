"""What a client keeps is its own."""

from __future__ import annotations

import gc

import pytest
import torch

from flsv.local_memory import _memories, memory
from flsv.valuation import clients_of


def test_each_client_has_its_own_and_only_it_can_look() -> None:
    sets = [(torch.zeros(2, 1), torch.tensor([0, 1]))] * 2
    first, second = clients_of(sets)
    first.ask(lambda local: memory(local).update(a=1))
    assert first.ask(lambda local: dict(memory(local))) == {"a": 1}
    assert second.ask(lambda local: dict(memory(local))) == {}
    holders = []
    first.ask(holders.append)
    with pytest.raises(PermissionError, match="client 0"):
        memory(holders[0])
    with pytest.raises(PermissionError, match="client 0"):
        second.ask(lambda local: memory(holders[0]))


def test_it_goes_with_the_client() -> None:
    clients = clients_of([(torch.zeros(2, 1), torch.tensor([0, 1]))])
    gc.collect()
    before = len(_memories)
    clients[0].ask(lambda local: memory(local).update(a=1))
    assert len(_memories) == before + 1
    del clients
    gc.collect()
    assert len(_memories) == before
