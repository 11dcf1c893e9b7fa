"""FedProx's gradient against autograd's, and its anchors in a federation."""

from pathlib import Path
from typing import Any

import pytest
import torch
from toys import Plain, fit, network

from flsv.errors import ConfigurationError
from flsv.local import FedProx
from flsv.loop import FederatedLoop
from flsv.personalization import Personalizer
from flsv.round import Round


def test_gradient_is_that_of_the_proximal_term() -> None:
    w = [torch.randn(3, 2, requires_grad=True), torch.randn(4, requires_grad=True)]
    anchors = [torch.randn(3, 2), torch.randn(4)]
    gradients = [torch.randn(3, 2), torch.randn(4)]
    before = [g.clone() for g in gradients]
    term = 0.7 / 2 * sum(((p - a) ** 2).sum() for p, a in zip(w, anchors))
    expected = torch.autograd.grad(term, w)
    FedProx(mu=0.7).add_gradients(w, gradients, anchors)
    for got, start, added in zip(gradients, before, expected):
        torch.testing.assert_close(got, start + added)


def test_negative_mu() -> None:
    with pytest.raises(ConfigurationError, match=r"mu=-1\): expected a number >= 0"):
        FedProx(mu=-1)


@pytest.mark.parametrize("anchor", ["start", "global"])
def test_clients_are_held_near_what_the_anchor_names(tmp_path: Path, anchor: Any) -> None:
    class Apart(Personalizer):
        """Every client starts somewhere else."""

        def start(self, client: Any, global_vector: torch.Tensor, models: Any) -> torch.Tensor:
            return global_vector + 3 * (client.id + 1)

        def personalize(self, round: Round, contributions: Any, models: Any) -> dict[int, torch.Tensor]:
            for client, vector in zip(round.client_ids.tolist(), round.client_vectors):
                near = round.global_vector + (3 * (client + 1) if anchor == "start" else 0)
                assert (vector - near).abs().max() < 1
            return {}

    # lr mu = 1: every step begins at the anchor.
    module = Plain(network(batch_norm=False), lambda parameters: torch.optim.SGD(parameters, lr=1e-3))
    fit(FederatedLoop(personalizer=Apart(), client_term=FedProx(1000.0, anchor), seed=0), tmp_path, module, rounds=2)


def test_an_unknown_anchor() -> None:
    with pytest.raises(ConfigurationError, match="anchor='own'"):
        FedProx(anchor="own")  # type: ignore[arg-type]
