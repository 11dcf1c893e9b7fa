"""MoreauSGD against Algorithm 1 in NumPy, and that w is what the server averages."""

from __future__ import annotations

import inspect
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from toys import Plain, fit, network

from flsv import ClientEvaluation
from flsv.aggregation import FedAvg
from flsv.clients.algorithms import MoreauSGD
from flsv.errors import ConfigurationError
from flsv.loop import FederatedLoop

CONFIG = Path(__file__).parents[3] / "configs/pfedme.yaml"
#: The defaults of main.py in the authors' code: personal_learning_rate, learning_rate, lamda and K.
AUTHORS = {"lr": 0.09, "outer_lr": 0.005, "lamda": 15, "inner_steps": 5}
MOREAU = partial(MoreauSGD, lr=0.08, outer_lr=0.1, lamda=4.0, inner_steps=3)


def test_inner_and_outer_steps() -> None:
    rng = np.random.default_rng(0)
    matrix, shift = rng.normal(size=(3, 3)), rng.normal(size=(5, 3))
    matrix = matrix @ matrix.T / 3
    w = rng.normal(size=3)
    parameter = torch.nn.Parameter(torch.from_numpy(w.copy()))
    unused = torch.nn.Parameter(torch.ones(2))
    optimizer = MOREAU([parameter, unused])
    theta = w.copy()
    for b in shift:  # five batches, each with its own quadratic loss

        def closure(b: np.ndarray = b) -> torch.Tensor:
            optimizer.zero_grad()
            loss = parameter @ torch.from_numpy(matrix) @ parameter / 2 - parameter @ torch.from_numpy(b)
            loss.backward()
            return loss

        optimizer.step(closure)
        for _ in range(3):
            theta = theta - 0.08 * (matrix @ theta - b + 4.0 * (theta - w))
        w = w - 0.1 * 4.0 * (w - theta)
        np.testing.assert_allclose(parameter.detach().numpy(), theta)
    optimizer.upload_parameters()
    np.testing.assert_allclose(parameter.detach().numpy(), w)
    assert unused.tolist() == [1, 1]


def test_many_inner_steps_reach_the_proximal_point() -> None:
    """argmin of a/2 theta^2 + lamda/2 (theta - w)^2 is lamda w / (a + lamda)."""
    parameter = torch.nn.Parameter(torch.tensor([2.0]))
    optimizer = MoreauSGD([parameter], lr=0.1, outer_lr=0.01, lamda=4.0, inner_steps=200)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = (3.0 / 2 * parameter**2).sum()
        loss.backward()
        return loss

    optimizer.step(closure)
    assert parameter.item() == pytest.approx(4.0 * 2.0 / 7.0, rel=1e-4)


def test_the_defaults_and_the_configuration_are_the_authors() -> None:
    signature = inspect.signature(MoreauSGD).parameters
    assert {name: signature[name].default for name in AUTHORS} == AUTHORS
    config = yaml.safe_load(CONFIG.read_text())
    assert config["model"]["init_args"]["optimizer"]["init_args"] == AUTHORS
    assert inspect.signature(FedAvg).parameters["server_lr"].default == 1  # beta
    assert "server_lr" not in config["federation"]["aggregator"]["init_args"]


def test_one_batch_with_the_defaults_by_hand() -> None:
    """f = theta^2 / 2 from w = 1: theta goes to 15/16, its distance times 1 - 0.09 (1 + 15) = -0.44 in every step."""
    parameter = torch.nn.Parameter(torch.ones(1, dtype=torch.float64))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
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


@pytest.mark.parametrize(
    ("outer_lr", "lamda", "share"), [(0.125, 4.0, "0.5"), (0.2, 5.0, "1"), (0.0666, 15.0, "0.999")]
)
def test_where_w_nearly_is_theta_a_warning_says_so(outer_lr: float, lamda: float, share: str) -> None:
    parameter = torch.nn.Parameter(torch.zeros(1))
    with pytest.warns(UserWarning, match=rf"w moves {share} of the way to theta.*FedAvg with fine-tuning.*= 0\.075"):
        MoreauSGD([parameter], outer_lr=outer_lr, lamda=lamda)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        MoreauSGD([parameter], outer_lr=0.499 / lamda, lamda=lamda)


def test_a_group_of_parameters_is_looked_at_too() -> None:
    first, second = (torch.nn.Parameter(torch.zeros(1)) for _ in range(2))
    groups: list[dict[str, Any]] = [{"params": [first]}, {"params": [second], "outer_lr": 0.06}]
    with pytest.warns(UserWarning, match=r"outer_lr=0\.06, lamda=15\): w moves 0\.9 "):
        MoreauSGD(groups)
    with pytest.raises(ConfigurationError, match=r"outer_lr=0\.07\): expected a finite number in \(0, 0\.0666667\]"):
        MoreauSGD([groups[0], {**groups[1], "outer_lr": 0.07}])


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
    with pytest.warns(UserWarning, match="FedAvg with fine-tuning"):
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
    ("loop", "trainer"), [({"client_optimizer": "keep"}, {}), ({}, {"accumulate_grad_batches": 2})]
)
def test_what_it_cannot_do_is_said_before_training(
    tmp_path: Path, loop: dict[str, Any], trainer: dict[str, Any]
) -> None:
    with pytest.raises(ConfigurationError, match="MoreauSGD starts anew with every client"):
        fit(FederatedLoop(**loop), tmp_path, Plain(optimizer=MoreauSGD), **trainer)
