"""The same bits, whatever else is evaluated; and what an evaluation leaves behind."""

from __future__ import annotations

import copy
from typing import Any

import lightning as L
import pytest
import torch
import toys
from games.naive import CLASSES, Branching, a_round, all_masks, batches, module
from torch import Tensor
from torchmetrics.classification import MulticlassF1Score

from flsv.games import CoalitionUtility, ModelEvaluator
from flsv.parameters import ParameterSpace


@pytest.mark.parametrize("clients", [5, 9])
def test_scores_depend_on_the_coalition_alone(clients: int) -> None:
    net, data = module(), batches(150, 16)
    round = a_round(net, clients)
    masks = all_masks(clients)[: 2**clients : 2 ** (clients - 5)]

    def losses(masks: Tensor, weighting: Any = "samples") -> Tensor:
        evaluator = ModelEvaluator(net, round.space, data, num_classes=CLASSES)
        return CoalitionUtility(round, evaluator, metric="negative_loss", weighting=weighting)(masks)

    expected = losses(masks)
    order = torch.randperm(len(masks), generator=torch.Generator().manual_seed(1))
    assert torch.equal(losses(masks[order]), expected[order])
    alone = torch.cat([losses(mask[None]) for mask in masks[:6]])
    assert torch.equal(alone, expected[:6])
    weights = torch.rand(clients, generator=torch.Generator().manual_seed(2))
    assert torch.equal(losses(masks[order], weights), losses(masks, weights)[order])


@pytest.mark.parametrize("backend", ["vmap", "serial"])
def test_the_module_and_the_process_are_left_alone(backend: Any) -> None:
    net = module()
    net.train()
    net.norm.eval()
    net.conv.weight.grad = torch.ones_like(net.conv.weight)
    net.norm.num_batches_tracked.fill_(17)
    before = copy.deepcopy(net.state_dict())
    tensors = {name: (id(t), t.data_ptr(), t._version) for name, t in net.state_dict(keep_vars=True).items()}
    flags = [(layer.training, p.requires_grad) for layer in net.modules() for p in layer.parameters()]
    round = a_round(net)
    metric = MulticlassF1Score(CLASSES)
    rng = torch.get_rng_state()

    evaluator = ModelEvaluator(net, round.space, batches(), num_classes=CLASSES, metric=metric, backend=backend)
    CoalitionUtility(round, evaluator)(all_masks(4))
    evaluator.gradient_products(round.global_vector, round.client_updates)

    after = net.state_dict(keep_vars=True)
    assert {name: (id(t), t.data_ptr(), t._version) for name, t in after.items()} == tensors
    assert all(torch.equal(before[name], value) for name, value in after.items())
    assert [(layer.training, p.requires_grad) for layer in net.modules() for p in layer.parameters()] == flags
    assert net.conv.weight.grad.eq(1).all()
    assert metric.update_count == 0
    assert torch.equal(torch.get_rng_state(), rng)
    assert torch.is_grad_enabled()


class Fragile(Branching):
    """Cannot bear large weights."""

    def forward(self, x: Tensor) -> Tensor:
        if self.layer.weight.abs().max() > 100:
            raise ArithmeticError("too large")
        return self.layer(x.flatten(1))


def test_an_error_comes_out_and_leaves_nothing_behind() -> None:
    net = Fragile()
    space = ParameterSpace(net)
    metric = MulticlassF1Score(CLASSES)
    evaluator = ModelEvaluator(net, space, batches(), num_classes=CLASSES, metric=metric)
    vectors = space.read(net).repeat(40, 1)
    expected = evaluator(vectors[:1]).value("metric")
    vectors[3] = 1000
    with pytest.raises(ArithmeticError, match="too large"):
        evaluator(vectors)
    assert torch.equal(evaluator(vectors[4:]).value("metric"), expected.repeat(36))


class Watching(L.Callback):
    """Evaluates models of the module that is being trained."""

    values: Tensor

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.space = ParameterSpace(pl_module)
        x, y = toys.toy_sets()[1].tensors
        self.evaluator = ModelEvaluator(pl_module, self.space, [(x, y)], num_classes=toys.CLASSES)

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: L.LightningModule, *_: Any) -> None:
        self.values = self.evaluator(self.space.read(pl_module).repeat(3, 1)).value("accuracy")


def test_in_the_middle_of_a_fit(tmp_path: Any) -> None:
    def trained(*callbacks: L.Callback) -> L.LightningModule:
        torch.manual_seed(0)
        plain = toys.Plain(toys.network(dropout=0.3))
        data = torch.utils.data.DataLoader(toys.toy_sets()[0], batch_size=16)
        toys.trainer_for(None, tmp_path, rounds=1, callbacks=list(callbacks)).fit(plain, data)
        return plain

    watching = Watching()
    watched = trained(watching)
    assert torch.equal(toys.vector(watched), toys.vector(trained()))
    x, y = toys.toy_sets()[1].tensors
    expected = (watched.eval()(x).argmax(-1) == y).float().mean().item()
    assert watching.values.tolist() == pytest.approx([expected] * 3)
