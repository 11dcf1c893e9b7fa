"""Values of a module that clients change: means, lists, what stays the first client's, and what is named."""

import warnings

import numpy as np
import pytest
import torch
from torch import nn

from flsv.training.client_values import ClientValues
from flsv.training.module_snapshot import ModuleSnapshot
from helpers import refused, warns

#: Of the clients 0, 1 and 2, by which means are weighted.
NUM_SAMPLES = [5, 2, 3]


class KeepsValuesOfManyKinds(nn.Module):
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


def add_trained_client(values, module, client, initial):
    values.add(client, NUM_SAMPLES[client], initial=initial, trained=ModuleSnapshot(module))


def train_clients(module, clients):
    """Train clients of a round one after the other, each from the same initial snapshot."""
    initial = ModuleSnapshot(module)
    values = ClientValues()
    for client in clients:
        initial.restore()
        module.train_client(client)
        add_trained_client(values, module, client, initial)
    return initial, values


@pytest.fixture
def module_after_round():
    """A module with the values of a round in which clients 0, 1 and 2 trained."""
    module = KeepsValuesOfManyKinds()
    initial, values = train_clients(module, [0, 1, 2])
    values.write(module, initial)
    return module


def test_tensors_and_arrays_become_means_weighted_by_samples(module_after_round):
    # Client i, which adds i to the buffer and the array and i + 1 to the tensor, has 5, 2 and 3 samples.
    mean = (5 * 0 + 2 * 1 + 3 * 2) / 10
    mean_of_tensor = (5 * 1 + 2 * 2 + 3 * 3) / 10

    assert module_after_round.unsaved_buffer.tolist() == pytest.approx([mean, mean])
    assert module_after_round.array == pytest.approx(mean)
    (tensor,) = module_after_round.tensor_in_list
    assert tensor.tolist() == pytest.approx([mean_of_tensor, mean_of_tensor])


def test_lists_that_grow_have_the_items_of_all_clients(module_after_round):
    items_of_client_1 = [1.0, 1.0]
    items_of_client_2 = [2.0, 2.0, 2.0]
    assert module_after_round.losses == [0.0, *items_of_client_1, *items_of_client_2]


def test_counters_and_flags_are_those_of_the_first_client(module_after_round):
    # Client 0 counts 0 steps and leaves the layer in evaluation mode.
    assert module_after_round.num_steps == 0
    assert not module_after_round.layer.training


def test_counters_keep_their_initial_values_if_the_first_client_is_excluded():
    module = KeepsValuesOfManyKinds()
    initial, values = train_clients(module, [1, 0, 2])
    values.exclude([1])
    values.write(module, initial)

    assert module.num_steps == 0
    assert module.layer.training


def test_means_and_lists_are_without_an_excluded_client():
    module = KeepsValuesOfManyKinds()
    initial, values = train_clients(module, [1, 0, 2])
    values.exclude([1])
    values.write(module, initial)

    mean = (5 * 0 + 3 * 2) / 8
    assert module.unsaved_buffer.tolist() == pytest.approx([mean, mean])
    assert module.losses == [0.0, 2.0, 2.0, 2.0]


def return_output(layer, inputs, output):
    """A forward hook that changes nothing."""
    return output


def hook_layer_as_a_client(module, values, client, **attributes):
    """Add what a client leaves that has hooked the layer. Return the module's snapshot of before."""
    initial = ModuleSnapshot(module)
    module.layer.register_forward_hook(return_output)
    vars(module).update(attributes)
    add_trained_client(values, module, client, initial)
    return initial


def test_hook_of_the_first_client_that_another_process_lacks_is_refused():
    module = KeepsValuesOfManyKinds()
    initial, values = train_clients(module, [0])
    module_of_other_process = KeepsValuesOfManyKinds()
    values_of_other_process = ClientValues()
    hook_layer_as_a_client(module_of_other_process, values_of_other_process, client=1)

    changes_of_processes = [values_of_other_process.changes_to_send(), values.changes_to_send()]
    values.merge(changes_of_processes, clients=[1, 0])

    with refused("layer was Linear with 1 hooks"):
        values.write(module, initial)


def test_hooks_and_functions_of_the_first_client_have_one_warning():
    module = KeepsValuesOfManyKinds()
    values = ClientValues()
    initial = hook_layer_as_a_client(module, values, client=0, score=len)

    with warns("functions of KeepsValuesOfManyKinds: layer, score"):
        snapshot = values.write(module, initial)

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        values.write(module, snapshot)
