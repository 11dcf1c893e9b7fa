"""Clients with passes of their own, and with equally many steps: the weights of a loop by hand, to the bit."""

import math
from typing import NamedTuple

import numpy as np
import pytest
import torch
from torch.optim.lr_scheduler import LinearLR

from flsv import FederatedLoop
from flsv.cli.parser import make_cli
from flsv.core.parameter_space import ParameterSpace
from flsv.training.algorithms import FedRep
from flsv.utilities.seeding import generator_for
from helpers import refused
from helpers.data import toy_data
from helpers.fits import KeepsRounds, fit
from helpers.loops_by_hand import SEED, cross_entropy_of, make_network_without_norm, take_steps
from helpers.models import Plainest, sgd

SIZES = (7, 2, 1)
UNEQUAL_EPOCHS = {"0": 1, "1": 3, "2": 4}


class WorkCase(NamedTuple):
    """Arguments of the loop and the Trainer, and how many batches clients 0, 1 and 2, which have 9, 3 and 2 of them,
    then train on in each of their epochs."""

    local_epochs: dict[str, int] | str
    batches_of_epochs: list[list[int]]
    accumulate_grad_batches: int = 1
    limit_train_batches: float = 1.0


CASES = [
    WorkCase(UNEQUAL_EPOCHS, [[9], [3, 3, 3], [2, 2, 2, 2]]),
    WorkCase(
        UNEQUAL_EPOCHS,
        [[2], [2, 2, 2], [2, 2, 2, 2]],
        accumulate_grad_batches=2,
        limit_train_batches=2,
    ),
    WorkCase("5 steps", [[5], [3, 2], [2, 2, 1]]),
    WorkCase("5 steps", [[9], [3, 3, 2], [2, 2, 2, 2, 2]], accumulate_grad_batches=2),
    WorkCase("3 steps", [[2, 1], [2, 1], [2, 1]], limit_train_batches=2),
]


def train_by_hand(data, sent_round, client, case):
    """Return the client's model, which begins as the round's global one, and its number of steps."""
    model = make_network_without_norm()
    space = ParameterSpace(model)
    space.write(model, sent_round.global_vector)
    optimizer = sgd(model.parameters())
    num_steps = 0

    for epoch, num_batches in enumerate(case.batches_of_epochs[client]):
        draw = generator_for(SEED, "shuffle", sent_round.round_index, client, epoch)
        batches = list(data.client_loader(client, "train", generator=draw))[:num_batches]
        assert len(batches) == num_batches
        batches_of_step = case.accumulate_grad_batches
        take_steps(optimizer, cross_entropy_of(model), batches, window=batches_of_step)
        num_steps += math.ceil(num_batches / batches_of_step)

    return space.read(model), num_steps


@pytest.mark.by_turn
@pytest.mark.fast_rows
@pytest.mark.parametrize("case", CASES)
def test_models_and_steps_of_unequal_work_equal_a_loop_by_hand(tmp_path, case):
    data = toy_data(SIZES)
    aggregator = KeepsRounds()
    fit(
        FederatedLoop(aggregator, local_epochs=case.local_epochs, seed=SEED),
        tmp_path,
        Plainest(),
        data,
        rounds=2,
        accumulate_grad_batches=case.accumulate_grad_batches,
        limit_train_batches=case.limit_train_batches,
    )

    num_samples = data.num_samples.tolist()
    first_round, second_round = aggregator.rounds
    for sent_round in (first_round, second_round):
        expected_models = []
        for client in range(len(SIZES)):
            expected_model, expected_steps = train_by_hand(data, sent_round, client, case)
            assert torch.equal(sent_round.client_vectors[client], expected_model)
            assert sent_round.num_steps[client] == expected_steps
            expected_models.append(expected_model)
        # Flsv adds the mean update to the global model, with other roundings.
        mean_model = np.average(expected_models, axis=0, weights=num_samples)
        np.testing.assert_allclose(sent_round.server_vector, mean_model, rtol=1e-6, atol=1e-6)


class DecaysToZero(Plainest):
    """Its learning rate is zero after each client's last step of the fit."""

    def __init__(self):
        super().__init__(scheduler=self.make_schedule, interval="step")

    def make_schedule(self, optimizer):
        num_steps = self.trainer.estimated_stepping_batches
        return LinearLR(optimizer, start_factor=1.0, end_factor=0.0, total_iters=num_steps)


def last_learning_rates(loop):
    """Return each client's learning rate after its last step, from the state of its only scheduler."""
    rates = []
    for client_state in loop.state_dict()["clients"].values():
        scheduler_state = client_state["pace"]["schedulers"][0]
        (rate,) = scheduler_state["_last_lr"]
        rates.append(rate)
    return rates


@pytest.mark.fast_rows
@pytest.mark.parametrize("work", [UNEQUAL_EPOCHS, "5 steps"])
def test_schedules_follow_each_clients_own_steps(tmp_path, work):
    loop = FederatedLoop(local_epochs=work, seed=SEED)

    fit(loop, tmp_path, DecaysToZero(), toy_data(SIZES), rounds=2)

    assert last_learning_rates(loop) == pytest.approx([0, 0, 0], abs=1e-9)


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


@pytest.mark.slow
def test_work_is_read_from_the_command_line_and_from_files(tmp_path):
    file = tmp_path / "a.yaml"
    file.write_text("federation: {local_epochs: {0: 2, 1: 1}}")

    in_words = make_cli(["--config=digits", "--federation.local_epochs=3 steps"], run=False)
    in_file = make_cli(["--config=digits", f"--config={file}"], run=False)

    assert in_words.loop.local_epochs == "3 steps"
    assert list(in_file.loop.local_epochs.values()) == [2, 1]
