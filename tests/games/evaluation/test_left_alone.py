"""The same bits, whatever else is evaluated; and what an evaluation leaves behind."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from games.naive import CLASSES, a_round, all_masks, batches, module
from torchmetrics.classification import MulticlassF1Score

from flsv.games import CoalitionUtility, ModelEvaluator


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
    evaluator.gradient_products(round.global_vector, round.matrix)

    after = net.state_dict(keep_vars=True)
    assert {name: (id(t), t.data_ptr(), t._version) for name, t in after.items()} == tensors
    assert all(torch.equal(before[name], value) for name, value in after.items())
    assert [(layer.training, p.requires_grad) for layer in net.modules() for p in layer.parameters()] == flags
    assert net.conv.weight.grad.eq(1).all()
    assert metric.update_count == 0
    assert torch.equal(torch.get_rng_state(), rng)
    assert torch.is_grad_enabled()
