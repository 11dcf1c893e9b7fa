"""Suspicious samples over rounds: what crosses, what stays, and what it looks like."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from toys import fit, toy_sets

from flsv.data import FederatedDataModule, GaussianNoise, IIDPartitioner, Splits
from flsv.errors import ConfigurationError
from flsv.loop import FederatedLoop
from flsv.metrics import CalibratedOTGradient
from flsv.valuation import clients_of, sample_values, server_of


def draw(samples: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.randn(samples, 1, 3, 3, generator=torch.Generator().manual_seed(seed))
    return x, torch.arange(samples) % 2


def made(**kwargs: object) -> tuple[CalibratedOTGradient, list]:
    bad = draw(100, 1)
    bad[0][::10] += 15
    clients = clients_of([bad, draw(80, 2), draw(40, 3)])
    metric = CalibratedOTGradient(3, features="pixels", support=30, iterations=5, **kwargs)  # type: ignore[arg-type]
    generator = torch.Generator().manual_seed(0)
    metric.update(torch.tensor([0, 1]), clients[:2], server_of(*draw(80, 0)), generator=generator)
    return metric, clients


def test_it_is_one_minus_the_share_of_flagged_samples() -> None:
    metric, clients = made()
    shares = [client.ask(sample_values).flagged.float().mean() for client in clients[:2]]
    torch.testing.assert_close(metric.compute()[:2], 1 - torch.stack(shares))
    torch.testing.assert_close(metric.diagnostics()["flagged"][:2], torch.stack(shares))
    assert clients[0].ask(sample_values).flagged[::10].all()
    assert shares[0] >= 0.1 > shares[1]
    assert metric.compute()[2].isnan()
    assert metric.diagnostics()["distance"][0] > metric.diagnostics()["distance"][1]


def test_only_counts_are_in_its_state() -> None:
    metric, clients = made()
    assert {name: list(state.shape) for name, state in metric.state_dict().items()} == {
        "distances": [3], "flagged": [3], "rounds": [],
    }  # fmt: skip
    assert "most_harmful" in clients[0].ask(lambda local: local.memory["artifacts"])
    assert clients[2].ask(lambda local: "artifacts" not in local.memory)
    _, clients = made(pictures=0)
    assert clients[0].ask(lambda local: "artifacts" not in local.memory)


def test_the_papers_rule() -> None:
    metric, clients = made(rule="positive", options={"calibration": "client"})
    values = clients[1].ask(sample_values)
    assert torch.equal(values.flagged, values.gradients > 0)
    with pytest.raises(ConfigurationError, match="rule='worst'"):
        CalibratedOTGradient(rule="worst")


def test_in_a_loop_noise_is_found_at_the_client_that_has_it(tmp_path: Path) -> None:
    noise = GaussianNoise(std=12.0, sample_rate=0.25, clients=[1])
    data = FederatedDataModule(toy_sets(600), IIDPartitioner(3), corruptions=[noise], splits=Splits(server_val=0.25))
    metric = CalibratedOTGradient(features="pixels", support=40, iterations=4, every=0)
    loop = FederatedLoop(metrics={"ot": metric}, seed=1)
    fit(loop, tmp_path, data=data, rounds=2)
    assert loop.contributions["ot"].argmin() == 1
    assert metric.diagnostics()["flagged"][1] > 0.15
    assert metric.diagnostics()["flagged"][[0, 2]].max() < 0.12
