"""One client that is several, one that counts its samples several times, and two that pool theirs."""

import pytest
import torch
from cheating import CHEATS, Cheating, Run, gains

from flsv.data import SizePartitioner

LABELS = torch.arange(60) % 3
INNER = SizePartitioner(proportions=[1, 2, 3], seed=4)


@pytest.mark.parametrize("cheat", [name for name, each in CHEATS.items() if each.attack is None])
def test_cheating_partition_keeps_the_other_clients_samples(cheat: str) -> None:
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


def test_gain_of_a_client_split_in_two_is_its_summed_share() -> None:
    honest, cheated = Run({"size": [0.5, 0.5]}, [], 0.75), Run({"size": [0.4, 0.3, 0.3]}, [1, 2], 0.5)
    (row,) = gains("sybils", "all", [(0, honest, cheated), (0, honest, honest)])
    assert row == {
        **{"metric": "size", "safeguards": "all", "cheat": "sybils", "honest_percent": 50, "gain": pytest.approx(10)},
        **{"half_width": row["half_width"], "trials": 2, "named": 1, "others_named": 1},
        **{"honest_accuracy": 0.75, "accuracy_lost": 0.125},
    }
