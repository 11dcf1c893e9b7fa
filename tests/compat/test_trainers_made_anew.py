"""What goes on from round to round, or ends within one, as with a Trainer made anew for each client and round."""

from functools import partial

import pytest
import torch
from compat.by_hand import fedavg_by_trainers, validate_with_trainer
from compat.runs import DOUBLE, make_small_program, train_both_ways, train_federated
from torch.optim import lr_scheduler

from helpers.loops_by_hand import assert_same_state
from helpers.models import sgd
from zoo.program import Small, make_images

ROUNDS = 3


# ---- a schedule that follows a validated value


def make_plateau_scheduler(optimizer):
    return lr_scheduler.ReduceLROnPlateau(
        optimizer, factor=0.3, patience=0, threshold=1.0, threshold_mode="abs"
    )


class Watching(Small):
    def __init__(self):
        super().__init__()
        self.rates = []

    def on_train_batch_start(self, batch, batch_idx):
        self.rates.append(self.optimizers().param_groups[0]["lr"])

    def configure_optimizers(self):
        optimizer = self.make_optimizer(self.parameters())
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": make_plateau_scheduler(optimizer), "monitor": "val_loss"},
        }


class AtRates(Small):
    """Trains each round at a rate that is known."""

    def __init__(self, rates):
        super().__init__()
        self.rates = rates

    def on_train_epoch_start(self):
        self.optimizers().param_groups[0]["lr"] = self.rates[self.current_epoch]


def train_with_plateau_by_hand(folder):
    """The model after all rounds, and the rate of each round."""
    optimizer = sgd([torch.nn.Parameter(torch.zeros(()))])
    schedule = make_plateau_scheduler(optimizer)
    rates = []
    for round_index in range(ROUNDS):
        rates.append(optimizer.param_groups[0]["lr"])
        # From the first round on, at the rates so far.
        program = make_small_program(partial(AtRates, rates))
        module, _ = fedavg_by_trainers(program, folder, rounds=round_index + 1)
        schedule.step(validate_with_trainer(module, make_images(), "val_loss", **DOUBLE))
    return module, rates


@pytest.mark.slow
def test_plateau_schedule_follows_the_global_loss_as_by_hand(tmp_path):
    expected, rates = train_with_plateau_by_hand(tmp_path)

    module, _ = train_federated(make_small_program(Watching), tmp_path, ROUNDS)

    batches_of_round = 3 + 4  # of the two clients
    rates_of_batches = []
    for rate in rates:
        rates_of_batches += [rate] * batches_of_round
    rates_watched = module.rates
    assert rates_watched == rates_of_batches
    assert len(set(rates)) == 2
    assert_same_state(module, expected, tolerance=1e-12)


# ---- several local epochs


def make_scheduled_module():
    return Small(lambda optimizer: lr_scheduler.ExponentialLR(optimizer, 0.5), frequency=2)


def test_local_epochs_equal_the_epochs_of_a_trainer_by_hand(tmp_path):
    """Batches are counted, and windows end, in each: 3 batches in windows of 2 are 2 steps each time."""
    program = make_small_program(make_scheduled_module, accumulate_grad_batches=2)
    pair = train_both_ways(program, tmp_path, local_epochs=2)
    pair.check()
    steps_of_epoch = 2 + 2  # of the two clients
    assert pair.module.trainer.global_step == 2 * 2 * steps_of_epoch
