"""Coalitions' heads, and parts of a network, on the federation's features: against gradients and heads by hand."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from shadow_cases import ROUNDS, SEED, Kept, data, loop
from torch import Tensor, nn
from toys import Plain, fit, network, sgd, vector

from flsv import FederatedLoop, Reporting
from flsv.metrics import ShadowShapley
from flsv.seeding import generator_for


def head_by_a_plain_loop(module: Plain, members: Sequence[int]) -> Tensor:
    """Heads of a coalition on the federation's trunk, by hand: ``[P]``."""
    module, dealt = copy.deepcopy(module).train(), data()
    dealt.setup("fit")
    head = copy.deepcopy(module.net[4])
    for index in range(ROUNDS):
        start, sent, heads, weights, theirs = copy.deepcopy(module.state_dict()), [], [], [], []
        for client in range(3):
            module.load_state_dict(start)
            mine = copy.deepcopy(head)
            own, of_head = module.configure_optimizers(), sgd(mine.parameters())
            for x, y in dealt.client_loader(
                client, "train", generator=generator_for(SEED, "shuffle", index, client, 0)
            ):
                own.zero_grad()
                of_head.zero_grad()
                features = module.net[:4](x)
                nn.functional.cross_entropy(module.net[4](features), y).backward()
                nn.functional.cross_entropy(mine(features.detach()), y).backward()
                own.step()
                of_head.step()
            sent.append(copy.deepcopy(module.state_dict()))
            weights.append(float(dealt.num_samples[client]))
            if client in members:
                heads.append(mine.state_dict())
                theirs.append(weights[-1])
        floating = [n for n, t in start.items() if t.is_floating_point()]
        mean = {n: sum(w * s[n] for w, s in zip(weights, sent)) / sum(weights) for n in floating}
        module.load_state_dict({**start, **mean})
        head.load_state_dict({n: sum(w * h[n] for w, h in zip(theirs, heads)) / sum(theirs) for n in heads[0]})
    module.net[4].load_state_dict(head.state_dict())
    return vector(module)


@pytest.mark.parametrize("batch_norm", [False, True])
@pytest.mark.parametrize("part", ["head", ["net.4.*"]])
def test_heads_are_trained_on_the_federations_features(tmp_path: Path, batch_norm: bool, part: Any) -> None:
    module, federation = Plain(network(batch_norm)), loop(Kept(coalitions="all", part=part))
    start = copy.deepcopy(module)
    fit(federation, tmp_path, module, data(), rounds=ROUNDS)
    models = federation.metrics["shadow"].models
    torch.testing.assert_close(models[False, False, False].double(), vector(start), rtol=0, atol=0)
    for mask, found in models.items():
        members = [client for client in range(3) if mask[client]]
        if members:
            torch.testing.assert_close(found.double(), head_by_a_plain_loop(start, members), rtol=1e-5, atol=1e-5)
    assert torch.stack(list(models.values())).unique(dim=0).shape[0] == 8


def test_heads_of_features_that_draw_and_cannot_be_batched(tmp_path: Path) -> None:
    """Dropout and a recurrent layer before the head are not done twice."""

    class Recurrent(Plain):
        def __init__(self) -> None:
            torch.manual_seed(0)
            super().__init__(nn.Linear(8, 3))
            self.gru, self.drop = nn.GRU(6, 8, batch_first=True), nn.Dropout(0.5)

        def forward(self, x: Tensor) -> Tensor:
            return self.net(self.drop(self.gru(x[:, None])[0][:, -1]))

    federation = loop(Kept(coalitions="all", part=["net.*"]))
    without = fit(FederatedLoop(seed=SEED, reporting=Reporting(table=False)), tmp_path, Recurrent(), data())
    beside = fit(federation, tmp_path, Recurrent(), data())
    assert torch.equal(vector(beside), vector(without))
    assert federation.contributions["shadow"].isfinite().all()


def test_layers_after_the_part_are_not_reused(tmp_path: Path) -> None:
    """What comes after the first layer of the part depends on it: dropout and another layer in between."""
    federation = loop(Kept(coalitions="all", part=["net.0.*", "net.4.*"]))
    whole = loop(Kept(coalitions="all"))
    for each in (federation, whole):
        fit(each, tmp_path, Plain(network(batch_norm=False, dropout=0.4)), data())
    # Of this network the part is the whole.
    every = whole.metrics["shadow"].models
    for mask, model in federation.metrics["shadow"].models.items():
        torch.testing.assert_close(model, every[mask], rtol=1e-5, atol=1e-5)


class Between(Plain):
    """A layer that no part has between two that it has."""

    def __init__(self) -> None:
        torch.manual_seed(1)
        super().__init__(
            nn.Sequential(nn.Linear(6, 8), nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.3)), nn.Linear(8, 3))
        )


def test_a_layer_between_two_of_the_part_sees_the_coalitions_own(tmp_path: Path) -> None:
    """Against the gradient of the part by hand, in the second round's first step, where coalitions differ."""
    steps: list[tuple[dict[str, Tensor], dict[str, Tensor], Any, dict[str, Tensor], Tensor]] = []
    from flsv.clients.kernel import RowTraining

    class Watched(RowTraining):
        def gradients(self, batch: Any, beside: Any = None) -> dict[str, Tensor]:
            before = {name: tensor.clone() for name, tensor in self.states.items()}
            own = {name: tensor.detach().clone() for name, tensor in module.named_parameters()}
            drawn = torch.get_rng_state()
            found = super().gradients(batch, beside)
            steps.append((before, {n: g.clone() for n, g in found.items()}, batch, own, drawn))
            return found

    federation, module = loop(ShadowShapley(coalitions="all", part=["net.0.*", "net.2.*"])), Between()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("flsv.clients.algorithms.shadow_rows.RowTraining", Watched)
        fit(federation, tmp_path, module, data(), rounds=2)
    rows, gradients, batch, own, drawn = steps[-1]
    assert rows["net.0.weight"].unique(dim=0).shape[0] == 3
    for row in range(3):
        copied = copy.deepcopy(module).train()
        state = {**own, **{name: tensor[row] for name, tensor in rows.items()}}
        copied.load_state_dict(state)
        torch.set_rng_state(drawn)
        copied.training_step(batch, 0).backward()
        for name, parameter in copied.named_parameters():
            if name in gradients:
                torch.testing.assert_close(gradients[name][row], parameter.grad, rtol=1e-4, atol=1e-6)
