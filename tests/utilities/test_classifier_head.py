"""Which layer of a module is its classifier head."""

import copy

import pytest
import timm
import torch
from torch import nn

from flsv.models.mixture import Mixture
from flsv.utilities.classifier_head import find_head


def make_mlp(hidden=8, classes=3):
    return nn.Sequential(
        nn.Linear(4, hidden),
        nn.ReLU(),
        nn.Linear(hidden, classes),
    )


def with_frozen(network):
    """A trained network, and after it a frozen one."""
    teacher = network.requires_grad_(False)
    return nn.ModuleDict({"student": make_mlp(), "teacher": teacher})


def test_last_linear_layer_is_the_head():
    assert find_head(make_mlp()).name == "2"


def test_frozen_copy_after_the_network_is_no_head():
    network = with_frozen(make_mlp())

    assert find_head(network).name == "student.2"


def test_frozen_timm_network_after_the_network_is_no_head():
    teacher = timm.create_model("resnet10t", num_classes=3)

    assert find_head(with_frozen(teacher)).name == "student.2"


def test_hidden_layer_with_as_many_outputs_as_classes_is_no_second_head():
    assert find_head(make_mlp(hidden=3)).name == "2"


def test_network_that_is_frozen_as_a_whole_has_its_last_layer_as_head():
    network = make_mlp().requires_grad_(False)

    assert find_head(network).name == "2"


def test_two_trained_networks_have_no_head():
    peers = nn.ModuleDict()
    peers["one"] = make_mlp()
    peers["two"] = make_mlp()

    name, problem = find_head(peers)

    assert name is None
    assert problem == "each of its layers 'one.2', 'two.2' may be the head"


def test_frozen_head_is_not_replaced_by_the_layer_before_it():
    network = make_mlp()
    network[2].requires_grad_(False)

    name, problem = find_head(network)

    assert name is None
    assert problem == "each of its layers '0', '2' may be the head"


def test_module_without_a_linear_layer_has_no_head():
    head = find_head(nn.Conv2d(1, 1, 1))

    assert head.problem == "it has no nn.Linear layer that is trained"


@pytest.mark.parametrize("network", [make_mlp(), with_frozen(make_mlp())])
def test_copies_for_evaluation_have_the_same_head(network):
    evaluated = copy.deepcopy(network).eval()

    with torch.no_grad():
        assert find_head(evaluated) == find_head(network)


def test_head_of_a_mixture_is_that_of_its_last_component():
    components = [make_mlp() for _ in range(3)]
    module = nn.ModuleDict({"network": Mixture(components)})

    assert find_head(module).name == "network.components.2.2"


def test_head_of_a_mixture_of_timm_networks_is_that_of_its_last_component():
    components = [timm.create_model("resnet10t", num_classes=3) for _ in range(2)]

    assert find_head(Mixture(components)).name == "components.1.fc"
