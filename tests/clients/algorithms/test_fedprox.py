"""FedProx's gradient against autograd's, and its anchors in a federation."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from toys import Plain, fit, network

from flsv.clients.algorithms import ClientContext, FedProx
from flsv.loop import FederatedLoop
from flsv.parameters import ParameterSpace
from flsv.participants import LocalData
from flsv.personalization import Personalizer
from flsv.round import FederationState, Instruction, Round


@pytest.mark.parametrize("sent", [True, False])
def test_gradient_is_that_of_the_proximal_term(sent: bool) -> None:
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
def test_clients_are_held_near_what_the_anchor_names(tmp_path: Path, anchor: Any) -> None:
    class Apart(Personalizer):
        """Every client starts somewhere else."""

        def start(self, client: int, state: FederationState) -> torch.Tensor:
            return state.model() + 3 * (client + 1)

        def personalize(self, round: Round, contributions: Any, models: Any) -> dict[int, torch.Tensor]:
            for client, vector in zip(round.client_ids.tolist(), round.client_vectors):
                near = round.global_vector + (3 * (client + 1) if anchor == "start" else 0)
                assert (vector - near).abs().max() < 1
            return {}

    # lr mu = 1: every step begins at the anchor.
    module = Plain(network(batch_norm=False), lambda parameters: torch.optim.SGD(parameters, lr=1e-3))
    fit(
        FederatedLoop(personalizer=Apart(), client_algorithm=FedProx(1000.0, anchor), seed=0),
        tmp_path,
        module,
        rounds=2,
    )
