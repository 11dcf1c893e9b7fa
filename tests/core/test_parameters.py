"""ParameterSpace against state_dict, which is how everybody else reads a module."""

import pytest
import timm
import torch
from torch import nn
from torchmetrics import MeanMetric

from flsv.core.parameter_space import ParameterSpace
from helpers import refused


def make_network():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 4, 3),
        nn.BatchNorm2d(4),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(144, 5),
        nn.Linear(5, 3),
    )


def float_state(module):
    return {name: value for name, value in module.state_dict().items() if value.is_floating_point()}


def test_vector_holds_scalars_and_has_the_widest_dtype():
    module = nn.Linear(2, 2).to(torch.bfloat16)
    module.register_parameter("temperature", nn.Parameter(torch.tensor(2.0)))
    space = ParameterSpace(module)
    vector = space.read(module)

    assert vector.dtype == torch.float32
    assert space.unflatten(vector)["temperature"].shape == ()

    space.write(module, vector * 0 + 1)
    assert module.weight.dtype == torch.bfloat16
    assert module.temperature.item() == 1
    assert ParameterSpace(nn.Linear(2, 2).double()).dtype == torch.float64


def test_parameter_space_reads_parameters_first():
    module = make_network()
    space = ParameterSpace(module)

    vector = space.read(module)

    cut = space.num_parameters
    parameters = torch.cat([p.detach().reshape(-1) for p in module.parameters()])
    statistics = torch.cat([module[1].running_mean, module[1].running_var])
    assert torch.equal(vector[:cut], parameters)
    assert torch.equal(vector[cut:], statistics)
    matrix = torch.stack([vector, -vector])
    assert torch.equal(space.flatten(space.unflatten(vector)), vector)
    assert torch.equal(space.flatten(space.unflatten(matrix)), matrix)
    assert space.size == len(parameters) + len(statistics)


def test_module_is_read_into_a_row_and_written_into_another_module():
    module = make_network()
    randomized = make_network()
    expected_state = float_state(randomized)
    with torch.no_grad():
        for value in expected_state.values():
            value.normal_()
    space = ParameterSpace(module)
    matrix = torch.zeros(3, space.size)

    row = space.read(randomized, out=matrix[1])
    space.write(module, row)

    assert row.data_ptr() == matrix[1].data_ptr()
    assert matrix[0].abs().sum() == 0
    for name, value in float_state(module).items():
        assert torch.equal(value, expected_state[name]), name


def test_constants_are_outside_of_the_vector():
    module = make_network()
    space = ParameterSpace(module, constant=["0.bias"])

    assert space.constant_names == ("0.bias",)
    assert "0.bias" not in space.names
    (constant,) = space.constants(module).values()
    assert constant is module[0].bias
    assert ParameterSpace(module).constants(module) == {}


def test_head_is_the_last_linear_layer_or_the_named_one():
    module = make_network()

    last_head = ParameterSpace(module).head
    named_head = ParameterSpace(module, head="4").head

    assert last_head.name == "5"
    assert named_head.name == "4"
    assert named_head.num_classes == 5


def test_head_of_timm_is_its_classifier():
    wrapper = nn.Module()
    wrapper.backbone = timm.create_model("resnet10t", num_classes=7)
    wrapper.projection = nn.Linear(3, 3)  # comes later, and is not the classifier
    assert ParameterSpace(wrapper).head.name == "backbone.fc"


def test_parameter_space_errors_name_the_wrong_head_vector_or_parameter():
    module = make_network()
    with refused(r"head='classifier' is not.*layer.*\['4', '5'\]"):
        ParameterSpace(module, head="classifier")
    with refused(r"\(BatchNorm2d\) has no weight matrix"):
        ParameterSpace(module, head="1")
    with pytest.raises(ValueError, match="expected a vector of shape"):
        ParameterSpace(module).write(module, torch.zeros(3))

    module.register_parameter("phase", nn.Parameter(torch.zeros(1, dtype=torch.complex64)))
    with refused("'phase' is complex"):
        ParameterSpace(module)


def test_rows_of_the_head_are_its_weights_and_biases():
    module = make_network()
    space = ParameterSpace(module, head="4")
    layer = module[4]
    vector = space.read(module)

    rows = space.head.rows(vector)
    rows_without_bias = space.head.rows(vector, include_bias=False)
    rows_of_many = space.head.rows(
        torch.zeros(
            7,
            2,
            space.size,
        )
    )

    expected = torch.cat([layer.weight, layer.bias[:, None]], dim=1)
    assert torch.equal(rows, expected)
    assert torch.equal(rows_without_bias, layer.weight)
    assert rows_of_many.shape == (7, 2, *expected.shape)


def test_parameter_space_names_equal_torchs_without_tied_or_unsaved_entries():
    shared = nn.Linear(2, 2)
    nested = nn.Sequential(shared, nn.Sequential(nn.Tanh(), shared))
    net = nn.ModuleDict(
        {
            "a": nested,
            "b": nn.Linear(2, 2),
        }
    )
    net.register_module("none", None)
    net["metric"] = MeanMetric()
    net["b"].weight = shared.weight
    net.register_buffer("table", torch.ones(4), persistent=False)
    net.register_buffer("mean", torch.ones(2))
    shared.register_buffer("mean_of_net", net.mean)

    names = ParameterSpace(net).names

    parameters = [name for name, _ in net.named_parameters()]
    assert names == (*parameters, "mean")
