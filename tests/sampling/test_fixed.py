"""FixedCohort: who takes part, and that a federation with it is one without the others."""

from pathlib import Path

import pytest
import torch
from toys import fit, toy_data, vector

from flsv.errors import ConfigurationError
from flsv.loop import FederatedLoop
from flsv.sampling import FixedCohort


def test_the_same_clients_every_round(tmp_path: Path) -> None:
    sampler = FixedCohort([2, 0])
    assert sampler.sample(4, {}, torch.Generator()).tolist() == [0, 2]
    assert sampler.inclusion_probabilities(4, {}).tolist() == [1, 0, 1, 0]
    loop = FederatedLoop(sampler=sampler, seed=0)
    module = fit(loop, tmp_path, data=toy_data((3, 2, 2, 1)), rounds=2)
    assert loop.weights is not None
    assert loop.weights.isnan().tolist() == [False, True, False, True]
    assert loop.weights.nansum().item() == pytest.approx(1)
    again = fit(FederatedLoop(sampler=FixedCohort([0, 2]), seed=0), tmp_path, data=toy_data((3, 2, 2, 1)), rounds=2)
    assert torch.equal(vector(module), vector(again))


def test_errors(tmp_path: Path) -> None:
    for clients in ([], [1, 1], [-1, 2]):
        with pytest.raises(ConfigurationError, match="expected different client ids|at least 0"):
            FixedCohort(clients)
    with pytest.raises(ConfigurationError, match=r"clients=\[0, 3\]\) cannot be met.*clients 0 to 2 only"):
        fit(FederatedLoop(sampler=FixedCohort([0, 3]), seed=0), tmp_path, data=toy_data((3, 2, 2)))
