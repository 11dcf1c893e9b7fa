"""Clients with passes of their own, and with equally many steps: the weights of a loop by hand, to the bit."""

import math

import pytest
import torch

from flsv import FederatedLoop
from flsv.cli.parser import make_cli
from flsv.core.parameter_space import ParameterSpace
from flsv.training.algorithms import FedRep
from flsv.utilities.seeding import generator_for
from helpers import refused
from helpers.data import toy_data
from helpers.fits import KeepsRounds, fit
from helpers.loops_by_hand import SEED, cross_entropy_of, make_network_without_norm, take_steps
from helpers.models import Plain, Plainest, sgd

SIZES = (7, 2, 1)
UNEQUAL = {"0": 1, "1": 3, "2": 4}
#: The argument, batches of a step, ``limit_train_batches``; and each client's passes, of 9, 3 and 2 batches or less.
CASES = [
    (
        UNEQUAL,
        1,
        1.0,
        [[9], [3] * 3, [2] * 4],
    ),
    (
        UNEQUAL,
        2,
        2,
        [[2], [2] * 3, [2] * 4],
    ),
    (
        "5 steps",
        1,
        1.0,
        [[5], [3, 2], [2, 2, 1]],
    ),
    (
        "5 steps",
        2,
        1.0,
        [[9], [3, 3, 2], [2] * 5],
    ),
    (
        "3 steps",
        1,
        2,
        [[2, 1], [2, 1], [2, 1]],
    ),
]


def train_client(data, round, client, passes, window):
    """Return the client's model after passes of so many batches, and its number of steps."""
    model = make_network_without_norm()
    num_steps = 0
    space = ParameterSpace(model)
    space.write(model, round.global_vector)
    optimizer = sgd(model.parameters())

    for epoch, length in enumerate(passes):
        draw = generator_for(SEED, "shuffle", round.round_index, client, epoch)
        batches = list(data.client_loader(client, "train", generator=draw))[:length]
        assert len(batches) == length
        take_steps(optimizer, cross_entropy_of(model), batches, window)
        num_steps += math.ceil(length / window)

    return space.read(model), num_steps


@pytest.mark.fast_rows
@pytest.mark.parametrize(("work", "window", "limit", "passes"), CASES)
def test_weights_of_unequal_work_equal_a_loop_by_hand(tmp_path, work, window, limit, passes):
    data = toy_data(SIZES)
    aggregator = KeepsRounds()
    module = Plain(make_network_without_norm(), sgd)
    loop = FederatedLoop(aggregator, local_epochs=work, seed=SEED)
    fit(
        loop,
        tmp_path,
        module,
        data,
        rounds=2,
        accumulate_grad_batches=window,
        limit_train_batches=limit,
    )

    shares = data.num_samples / data.num_samples.sum()
    for round in aggregator.rounds:
        updates = []
        for client in range(3):
            model, num_steps = train_client(data, round, client, passes[client], window)
            assert torch.equal(round.client_vectors[client], model)
            assert round.num_steps[client] == num_steps
            updates.append(model - round.global_vector)
        mean_update = sum(share * update for share, update in zip(shares, updates))
        expected = round.global_vector + mean_update
        torch.testing.assert_close(round.server_vector, expected, rtol=1e-6, atol=1e-6)

    assert len(aggregator.rounds) == 2


class DecaysToZero(Plainest):
    """Its learning rate is zero after each client's last step of the fit."""

    def __init__(self):
        super().__init__(sgd, scheduler=self.schedule, interval="step")

    def schedule(self, optimizer):
        total = self.trainer.estimated_stepping_batches
        return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / total)


def last_rates(loop):
    """Each client's learning rate after its last step."""
    rates = []
    for state in loop.state_dict()["clients"].values():
        scheduler_state = state["pace"]["schedulers"][0]  # of the only scheduler
        (rate,) = scheduler_state["_last_lr"]
        rates.append(rate)
    return rates


@pytest.mark.fast_rows
@pytest.mark.parametrize("work", [UNEQUAL, "5 steps"])
def test_schedules_follow_each_clients_own_steps(tmp_path, work):
    loop = FederatedLoop(local_epochs=work, seed=SEED)

    fit(loop, tmp_path, DecaysToZero(), toy_data(SIZES), rounds=2)

    assert last_rates(loop) == pytest.approx([0, 0, 0], abs=1e-9)


@pytest.mark.parametrize(
    ("work", "words"),
    [
        (0, "local_epochs=0"),
        (1.5, "local_epochs=1.5"),
        ({}, "expected a number of epochs"),
        ("0 steps", "expected a number of epochs"),
        ("fast", "expected a number of epochs"),
        ({"0": 1, "1": 0}, "1=0.: expected a whole number of at least 1"),
    ],
)
def test_invalid_local_epochs_are_refused_by_the_loop(work, words):
    with refused(words):
        FederatedLoop(local_epochs=work)


def test_unknown_and_missing_clients_are_refused_before_training(tmp_path):
    loop = FederatedLoop(local_epochs={0: 1, 1: 2, "Boston": 1})

    message = "the clients are '0', '1', '2', but '2', 'Boston' is missing or"
    with refused(message):
        fit(loop, tmp_path)


def test_client_without_an_epoch_for_the_shared_part_is_refused(tmp_path):
    loop = FederatedLoop(
        client_algorithm=FedRep(), share=["!net.4.*"], local_epochs={0: 2, 1: 1, 2: 3}
    )

    with refused("to train the shared parameters, since local_epochs=1"):
        fit(loop, tmp_path)


def test_work_is_read_from_the_command_line_and_from_files(tmp_path):
    file = tmp_path / "a.yaml"
    file.write_text("federation: {local_epochs: {0: 2, 1: 1}}")

    in_words = make_cli(["--config=digits", "--federation.local_epochs=3 steps"], run=False)
    in_file = make_cli(["--config=digits", f"--config={file}"], run=False)

    assert in_words.loop.local_epochs == "3 steps"
    assert list(in_file.loop.local_epochs.values()) == [2, 1]
