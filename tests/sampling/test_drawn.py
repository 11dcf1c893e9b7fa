"""What a sampler of one's own draws is looked at before anybody trains by it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from toys import fit, toy_data

from flsv import FederatedLoop
from flsv.aggregation import ShapleyWeighted
from flsv.metrics import SurrogateFederatedShapley
from flsv.sampling import ClientSampler


class Own(ClientSampler):
    """Draws what it is told to."""

    def __init__(self, drawn: Any, chances: Any = (1.0, 1.0, 1.0)) -> None:
        self.drawn, self.chances = torch.tensor(drawn), torch.tensor(chances)

    def sample(self, num_clients: int, *_: Any, **__: Any) -> torch.Tensor:
        return self.drawn

    def inclusion_probabilities(self, num_clients: int, *_: Any, **__: Any) -> torch.Tensor:
        return self.chances


@pytest.mark.parametrize(
    ("drawn", "words"),
    [
        ([2, 0, 2], r"\[2, 0, 2\].*client 2 twice"),
        ([True, False, True], r"torch.bool.*nonzero\(\)"),
        ([0.0, 1.0], "torch.float32"),
        ([-1, 0], "clients 0 to 2"),
        ([0, 3], "clients 0 to 2"),
        ([[0, 1]], r"shape \[1, 2\]"),
        ([], "drew no client for round 0"),
    ],
)
def test_what_is_no_cohort_is_refused(tmp_path: Path, drawn: Any, words: str) -> None:
    with pytest.raises(RuntimeError, match=f"Own.*{words}"):
        fit(FederatedLoop(sampler=Own(drawn)), tmp_path, data=toy_data(), rounds=1)


@pytest.mark.parametrize(
    ("chances", "words"),
    [
        ([0.5, 0.5], r"shape \[2\].*\[3\]"),
        ([0.5, 0.0, 0.5], r"client 1 .* 0\.0"),
        ([0.5, 1.5, 0.5], r"client 1 .* 1\.5"),
        ([0.5, float("nan"), 0.5], "client 1 .* nan"),
    ],
)
def test_chances_that_cannot_be_are_refused(tmp_path: Path, chances: Any, words: str) -> None:
    loop = FederatedLoop(
        ShapleyWeighted("ssv"), metrics={"ssv": SurrogateFederatedShapley()}, sampler=Own([0, 1], chances)
    )
    with pytest.raises(RuntimeError, match=f"Own.*inclusion_probabilities.*{words}"):
        fit(loop, tmp_path, data=toy_data(server_val=0.2), rounds=1)


def test_what_is_good_is_used(tmp_path: Path) -> None:
    loop = FederatedLoop(sampler=Own([2, 0]), seed=0)
    fit(loop, tmp_path, data=toy_data(), rounds=2)
    assert loop.participations.tolist() == [2, 0, 2]
