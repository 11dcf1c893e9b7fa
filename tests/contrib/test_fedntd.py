"""FedNTD against its formula in plain PyTorch, also with gradient accumulation, and the checks of client algorithms."""

import copy
from functools import partial

import pytest
import torch
from torch import nn

from flsv.contrib.fedntd import FedNTD
from flsv.testing import parametrize_with_checks
from helpers import refused
from helpers.fits import fit, make_loop_of_three_clients
from helpers.loops_by_hand import (
    assert_same_state,
    cohorts_by_hand,
    fedavg_by_hand,
    make_unequal_data,
    take_steps,
)
from helpers.models import Plain, network

LR, BETA, TAU = 0.1, 0.7, 2.0
sgd = partial(torch.optim.SGD, lr=LR)


def not_true_distillation(logits, global_logits, y):
    """Sample by sample: KL of the distributions over the other classes, times tau squared."""
    divergences = []
    for row, global_row, label in zip(logits, global_logits, y.tolist()):
        others = [m for m in range(len(row)) if m != label]
        p = torch.softmax(global_row[others] / TAU, 0)
        q = torch.softmax(row[others] / TAU, 0)
        divergences.append((p * (p / q).log()).sum())
    return TAU**2 * torch.stack(divergences).mean()


def train_by_distillation(model, visit, window):
    teacher = copy.deepcopy(model).eval()

    def compute_loss(x, y):
        logits = model(x)
        term = not_true_distillation(logits, teacher(x).detach(), y)
        return nn.functional.cross_entropy(logits, y) + BETA * term

    optimizer = sgd(model.parameters())
    for epoch in visit.epochs:
        take_steps(optimizer, compute_loss, epoch, window)


@pytest.mark.fast_rows
@pytest.mark.parametrize(("batch_norm", "accumulated"), [(True, 1), (False, 2)])
def test_fedntd_equals_its_formula_by_hand(tmp_path, batch_norm, accumulated):
    net = network(batch_norm)
    train = partial(train_by_distillation, window=accumulated)
    expected, _ = fedavg_by_hand(net, train, cohorts=cohorts_by_hand(rounds=2))

    module = Plain(copy.deepcopy(net), sgd)
    fit(
        make_loop_of_three_clients(client_algorithm=FedNTD(BETA, TAU)),
        tmp_path,
        module,
        make_unequal_data(),
        rounds=2,
        accumulate_grad_batches=accumulated,
    )

    assert_same_state(module.net, expected)


class NeverCalled(Plain):
    def training_step(self, batch, batch_idx):
        x, y = batch
        return nn.functional.cross_entropy(self.net(x), y)


def test_a_module_that_training_step_does_not_call_is_refused(tmp_path):
    with refused("training_step does not call this"):
        fit(
            make_loop_of_three_clients(client_algorithm=FedNTD()),
            tmp_path,
            NeverCalled(),
            make_unequal_data(),
        )


@pytest.mark.by_turn
@pytest.mark.fast_rows("*pickles", "*trains_alone")
@parametrize_with_checks([FedNTD()])
def test_fedntd_passes_the_checks_of_client_algorithms(check):
    check()
