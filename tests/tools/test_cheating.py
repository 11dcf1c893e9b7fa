"""One client that is several, one that counts its samples several times, and two that pool theirs."""

from __future__ import annotations

import pytest
import torch
from cheating import CHEATS, Cheating

from flsv.data import SizePartitioner

LABELS = torch.arange(60) % 3
INNER = SizePartitioner(proportions=[1, 2, 3], seed=4)


@pytest.mark.parametrize("cheat", [name for name, each in CHEATS.items() if each.attack is None])
def test_everybody_else_keeps_number_and_samples(cheat: str) -> None:
    honest, dealt = INNER(LABELS, 3), Cheating(INNER, 1, cheat)
    parts = dealt(LABELS, 3)
    assert len(parts) == dealt.num_clients
    assert torch.equal(parts[0], honest[0])
    assert cheat == "collusion" or torch.equal(parts[2], honest[2])
    own = {
        "sybils": [honest[1], honest[1]],
        "duplication": [honest[1].repeat_interleave(3)],
        "collusion": [torch.cat(honest[1:]).sort().values],
        "framing": [honest[2]],
    }
    found = [parts[1], *parts[3:]]
    if cheat == "split_sybils":
        assert torch.equal(torch.cat(found).sort().values, honest[1])
    else:
        assert all(map(torch.equal, found, own[cheat]))
