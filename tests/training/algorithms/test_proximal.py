"""FedProx's gradient against autograd's, and its anchors; MoreauSGD by hand, and what the server averages."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from flsv import ClientEvaluation
from flsv.aggregation import FedAvg
from flsv.core import FederationState, Instruction, LocalData, Round
from flsv.core.parameter_space import ParameterSpace
from flsv.federation import FederatedLoop
from flsv.personalization import Personalizer
from flsv.training.algorithms import ClientContext, FedProx, MoreauSGD
from flsv.utilities.errors import ConfigurationError
from helpers.fits import fit
from helpers.models import Plain, network


@pytest.mark.parametrize("sent", [True, False])
def test_fedprox_gradient_equals_that_of_the_proximal_term(sent: bool) -> None:
    module = nn.ParameterList([torch.randn(3, 2), torch.randn(4)])
    space = ParameterSpace(module)
    start, anchor = torch.randn(2, space.size)
    # Without an anchor from the server, it is the model that the client starts from.
    instruction = Instruction(0, 0, 0, start, {"anchor": anchor} if sent else {})
    count = torch.ones(2, dtype=torch.long)
    local = LocalData("client 0", lambda split: [], count, count, guarded=False)
    context = ClientContext(module, space, instruction, local, start)
    w, anchors = list(module), space.unflatten(anchor if sent else start).values()
    gradients = [torch.randn(3, 2), torch.randn(4)]
    before = [g.clone() for g in gradients]
    term = 0.7 / 2 * sum(((p - a) ** 2).sum() for p, a in zip(w, anchors))
    expected = torch.autograd.grad(term, w)
    FedProx(mu=0.7).gradients(context, w, gradients)
    for got, own, added in zip(gradients, before, expected):
        torch.testing.assert_close(got, own + added)


@pytest.mark.parametrize("anchor", ["start", "global"])
def test_fedprox_pulls_clients_toward_the_chosen_anchor(tmp_path: Path, anchor: Any) -> None:
    class Apart(Personalizer):
        def start(self, client: int, state: FederationState) -> torch.Tensor:
            return state.model() + 3 * (client + 1)

        def personalize(self, round: Round, contributions: Any, models: Any) -> dict[int, torch.Tensor]:
            for client, vector in zip(round.client_ids.tolist(), round.client_vectors):
                near = round.global_vector + (3 * (client + 1) if anchor == "start" else 0)
                assert (vector - near).abs().max() < 1
            return {}

    # lr mu = 1: every step begins at the anchor.
    module = Plain(network(batch_norm=False), lambda parameters: torch.optim.SGD(parameters, lr=1e-3))
    loop = FederatedLoop(personalizer=Apart(), client_algorithm=FedProx(1000.0, anchor), seed=0)
    fit(loop, tmp_path, module, rounds=2)


def test_moreau_sgd_step_with_defaults_equals_that_by_hand() -> None:
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


def test_pfedme_server_averages_w_and_the_client_keeps_theta(tmp_path: Path) -> None:
    rounds = []

    class Watched(FedAvg):
        def aggregate(self, round: Any, contributions: Any) -> Any:
            rounds.append((round.global_vector.clone(), round.client_vectors.clone()))
            return super().aggregate(round, contributions)

    loop = FederatedLoop(Watched("uniform"), evaluation=ClientEvaluation(every=1, models="trained"), seed=0)
    moreau = partial(MoreauSGD, lr=0.08, outer_lr=0.1, lamda=4.0, inner_steps=3)
    module = fit(loop, tmp_path, Plain(network(batch_norm=False), moreau), rounds=2)
    start, sent = rounds[-1]
    torch.testing.assert_close(loop.space.read(module), sent.mean(0))
    for client, theta in loop.trained.items():
        # w has moved towards theta, and is not there: theta was another one before the last batch.
        assert not torch.allclose(theta, sent[client])
        assert torch.dot(theta - start, sent[client] - start) > 0
    assert loop.client_accuracy.mean() > 0.4


def test_moreau_sgd_restarts_w_in_every_round(tmp_path: Path) -> None:
    """With lamda outer_lr = 1, w is theta: the round is K SGD steps per batch that start at w."""
    vectors = []
    for optimizer in (MoreauSGD, torch.optim.SGD):
        own = {"outer_lr": 0.25, "lamda": 4.0, "inner_steps": 1} if optimizer is MoreauSGD else {}
        loop = FederatedLoop(FedAvg("uniform"), local_epochs=2, seed=3)
        module = fit(loop, tmp_path, Plain(network(batch_norm=False), partial(optimizer, lr=0.1, **own)), rounds=3)
        vectors.append(loop.space.read(module))
    torch.testing.assert_close(*vectors)


def test_moreau_sgd_with_wrong_arguments_raises() -> None:
    parameter = torch.nn.Parameter(torch.zeros(1))
    for wrong in ({"lr": 0.2}, {"outer_lr": 0.1}, {"lamda": 0.0}, {"inner_steps": 0}):
        with pytest.raises(ConfigurationError, match=r"MoreauSGD\(\w+=.*expected a"):
            MoreauSGD([parameter], **wrong)
    with pytest.raises(ConfigurationError, match=r"needs a closure"):
        MoreauSGD([parameter]).step()


@pytest.mark.parametrize(
    ("loop", "trainer"), [({"optimizer_state": "persist"}, {}), ({}, {"accumulate_grad_batches": 2})]
)
def test_moreau_sgd_with_unsupported_settings_is_refused(
    tmp_path: Path, loop: dict[str, Any], trainer: dict[str, Any]
) -> None:
    with pytest.raises(ConfigurationError, match="MoreauSGD starts anew with every client"):
        fit(FederatedLoop(**loop), tmp_path, Plain(optimizer=MoreauSGD), **trainer)
