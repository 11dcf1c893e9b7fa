"""Values of a module that clients change: means, lists, what stays the first client's, and what is named."""

import warnings

import numpy as np
import pytest
import torch
from torch import nn

from flsv.training.client_values import ClientValues
from flsv.training.module_snapshot import ModuleSnapshot
from helpers import refused, warns

NUM_SAMPLES = [5, 2, 3]


class Keeps(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(2, 2)
        self.register_buffer("unsaved_buffer", torch.zeros(2), persistent=False)
        self.tensor_in_list = [torch.zeros(2)]
        self.array = np.zeros(2)
        self.losses = []
        self.num_steps = 0

    def train_client(self, client):
        """Change each kind of state by an amount that tells the client."""
        self.unsaved_buffer += client
        self.tensor_in_list[0].add_(client + 1)
        self.array = self.array + client
        num_batches = client + 1
        self.losses += [float(client)] * num_batches
        self.num_steps += client
        self.layer.training = client > 0


def train(module, clients):
    initial = ModuleSnapshot(module)
    values = ClientValues()
    for client in clients:
        initial.restore()
        module.train_client(client)
        trained = ModuleSnapshot(module)
        values.add(
            client,
            NUM_SAMPLES[client],
            initial=initial,
            trained=trained,
        )
    return initial, values


def test_values_are_means_or_lists_of_all_clients_or_else_those_of_the_first():
    module = Keeps()
    initial, values = train(module, [0, 1, 2])
    values.write(module, initial)

    mean = (2 * 1 + 3 * 2) / 10
    assert module.unsaved_buffer.tolist() == pytest.approx([mean, mean])
    (tensor_in_list,) = module.tensor_in_list
    assert tensor_in_list.tolist() == pytest.approx([mean + 1, mean + 1])
    assert module.array == pytest.approx(mean)
    assert module.losses == [0.0, 1.0, 1.0, 2.0, 2.0, 2.0]
    assert module.num_steps == 0
    assert not module.layer.training


def test_counters_keep_their_initial_values_if_the_first_client_is_excluded():
    module = Keeps()
    initial, values = train(module, [1, 0, 2])
    values.exclude([1])
    values.write(module, initial)

    mean = 3 * 2 / 8
    assert module.num_steps == 0
    assert module.layer.training
    assert module.unsaved_buffer.tolist() == pytest.approx([mean, mean])
    assert module.losses == [0.0, 2.0, 2.0, 2.0]


def test_structure_that_another_process_lacks_is_refused():
    module = Keeps()
    initial, values = train(module, [1])
    other_module = Keeps()
    other_initial, other_values = train(other_module, [0])
    other_module.train_client(0)
    initial.restore()
    module.layer.register_forward_hook(lambda layer, inputs, output: output)
    values.forget()
    trained = ModuleSnapshot(module)
    values.add(1, 2, initial=initial, trained=trained)

    parts = [values.changes_to_send(), other_values.changes_to_send()]
    other_values.merge(parts, [1, 0])
    with refused("layer was Linear with 1"):
        other_values.write(other_module, other_initial)


def test_hooks_and_functions_of_the_first_client_have_one_warning():
    module = Keeps()
    initial, values = train(module, [0])
    module.layer.register_forward_hook(lambda layer, inputs, output: output)
    module.score = len
    values.forget()
    values.add(
        0,
        1,
        initial=initial,
        trained=ModuleSnapshot(module),
    )

    with warns("functions of Keeps: layer, score"):
        snapshot = values.write(module, initial)

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        values.write(module, snapshot)
