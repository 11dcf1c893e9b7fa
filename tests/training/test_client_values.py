"""What clients make of a module's values."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from flsv.training.client_values import ClientValues, mean_of
from flsv.training.module_snapshot import ModuleSnapshot

NUM_SAMPLES = [5, 2, 3]


class Keeps(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)
        self.register_buffer("unsaved", torch.zeros(2), persistent=False)
        self.average = [torch.zeros(2)]
        self.array = np.zeros(2)
        self.losses: list[float] = []
        self.num_steps = 0

    def train_client(self, client: int) -> None:
        self.unsaved += client
        self.average[0].add_(client + 1)
        self.array = self.array + client
        self.losses += [float(client)] * (client + 1)
        self.num_steps += client
        self.layer.training = client > 0


def train(module: Keeps, clients: list[int]) -> tuple[ModuleSnapshot, ClientValues]:
    start = ModuleSnapshot(module)
    values = ClientValues()
    for client in clients:
        start.restore()
        module.train_client(client)
        end = ModuleSnapshot(module)
        values.add(client, NUM_SAMPLES[client], before=start, after=end)
    return start, values


def test_values_are_means_and_lists_of_all_and_else_the_first_clients() -> None:
    module = Keeps()
    start, values = train(module, [0, 1, 2])
    values.write(module, start)

    mean = (2 * 1 + 3 * 2) / 10
    assert torch.allclose(module.unsaved, torch.full((2,), mean))
    assert torch.allclose(module.average[0], torch.full((2,), mean + 1))
    assert module.array == pytest.approx(mean)
    assert module.losses == [0.0, 1.0, 1.0, 2.0, 2.0, 2.0]
    assert module.num_steps == 0
    assert not module.layer.training


def test_without_an_excluded_first_client_the_counters_of_the_start_stay() -> None:
    module = Keeps()
    start, values = train(module, [1, 0, 2])
    values.leave_out([1])
    values.write(module, start)

    mean = 3 * 2 / 8
    assert module.num_steps == 0
    assert module.layer.training
    assert torch.allclose(module.unsaved, torch.full((2,), mean))
    assert module.losses == [0.0, 2.0, 2.0, 2.0]


def test_clients_find_the_first_clients_list_in_the_next_round() -> None:
    module = Keeps()
    start, values = train(module, [1, 2])
    values.write(module, start)
    shown_losses = list(module.losses)
    values.forget()
    next_start = ModuleSnapshot(module)
    values.hide_records(next_start.values)
    next_start.restore()

    assert shown_losses == [1.0, 1.0, 2.0, 2.0, 2.0]
    assert module.losses == [1.0, 1.0]


@pytest.mark.parametrize(
    "values",
    [
        [1, 3],
        ["a", "b"],
        [torch.zeros(2), torch.zeros(3)],
        [torch.tensor([1]), torch.tensor([3])],
        [[0.5], [0.5, 1.0]],
    ],
)
def test_what_has_no_mean_stays(values: list[Any]) -> None:
    assert mean_of(values, [1, 1], initial=values[0], default=values[0]) is values[0]
