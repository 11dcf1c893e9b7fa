"""MoreauSGD against Algorithm 1 in NumPy, and that w is what the server averages."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from toys import Plain, fit, network

from flsv import ClientEvaluation
from flsv.aggregation import FedAvg
from flsv.clients.algorithms import MoreauSGD
from flsv.errors import ConfigurationError
from flsv.loop import FederatedLoop

MOREAU = partial(MoreauSGD, lr=0.08, outer_lr=0.1, lamda=4.0, inner_steps=3)


def test_one_batch_with_the_defaults_by_hand() -> None:
    """f = theta^2 / 2 from w = 1: theta goes to 15/16, its distance times 1 - 0.09 (1 + 15) = -0.44 in every step."""
    parameter = torch.nn.Parameter(torch.ones(1, dtype=torch.float64))
    optimizer = MoreauSGD([parameter])

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = (parameter**2 / 2).sum()
        loss.backward()
        return loss

    optimizer.step(closure)
    theta = 15 / 16 + (-0.44) ** 5 / 16
    assert parameter.item() == pytest.approx(theta, rel=1e-12)
    optimizer.upload_parameters()
    assert parameter.item() == pytest.approx(1 - 0.005 * 15 * (1 - theta), rel=1e-12)  # 0.075 of the way


def moreau_client(optimizer: Any = MOREAU) -> Plain:
    return Plain(network(batch_norm=False), optimizer)


def test_the_server_averages_w_and_the_client_keeps_theta(tmp_path: Path) -> None:
    vectors = []

    class Watched(FedAvg):
        def aggregate(self, round: Any, contributions: Any) -> Any:
            vectors.append((round.global_vector.clone(), round.client_vectors.clone()))
            return super().aggregate(round, contributions)

    loop = FederatedLoop(Watched("uniform"), evaluation=ClientEvaluation(every=1, models="trained"), seed=0)
    module = fit(loop, tmp_path, moreau_client(), rounds=2)
    torch.testing.assert_close(loop.space.read(module), vectors[-1][1].mean(0))
    start, sent = vectors[-1]
    for client, theta in loop.trained.items():
        # w has moved towards theta, and is not there: theta was another one before the last batch.
        assert not torch.allclose(theta, sent[client])
        assert torch.dot(theta - start, sent[client] - start) > 0
    assert loop.client_accuracy is not None
    assert loop.client_accuracy.mean() > 0.4


def test_w_starts_anew_at_every_visit(tmp_path: Path) -> None:
    """With lamda outer_lr = 1, w is theta: the round is K SGD steps per batch that start at w, computed by hand."""
    optimizer = partial(MoreauSGD, lr=0.1, outer_lr=0.25, lamda=4.0, inner_steps=1)
    plain = partial(torch.optim.SGD, lr=0.1)
    loops = [FederatedLoop(FedAvg("uniform"), local_epochs=2, seed=3) for _ in range(2)]
    modules = [fit(loop, tmp_path, moreau_client(o), rounds=3) for loop, o in zip(loops, (optimizer, plain))]
    torch.testing.assert_close(*(loop.space.read(module) for loop, module in zip(loops, modules)))


def test_wrong_arguments() -> None:
    parameter = torch.nn.Parameter(torch.zeros(1))
    for wrong in ({"lr": 0.2}, {"outer_lr": 0.1}, {"lamda": 0.0}, {"inner_steps": 0}):
        with pytest.raises(ConfigurationError, match=r"MoreauSGD\(\w+=.*expected a"):
            MoreauSGD([parameter], **wrong)
    with pytest.raises(ConfigurationError, match=r"needs a closure"):
        MoreauSGD([parameter]).step()


@pytest.mark.parametrize(
    ("loop", "trainer"), [({"optimizer_state": "persist"}, {}), ({}, {"accumulate_grad_batches": 2})]
)
def test_what_it_cannot_do_is_said_before_training(
    tmp_path: Path, loop: dict[str, Any], trainer: dict[str, Any]
) -> None:
    with pytest.raises(ConfigurationError, match="MoreauSGD starts anew with every client"):
        fit(FederatedLoop(**loop), tmp_path, Plain(optimizer=MoreauSGD), **trainer)
