import pytest
import torch
from torch import nn

from flsv.errors import ConfigurationError
from flsv.models.linear import check_output, flat_size, image_shape, pooled_positions


@pytest.mark.parametrize(("shape", "size"), [((1, 28, 28), 784), ((30,), 30), ([3, 32, 32], 3072)])
def test_flat_size(shape, size):
    assert flat_size("Net", shape) == size


@pytest.mark.parametrize("shape", [(), (0,), (1, -28, 28)])
def test_flat_size_of_no_shape(shape):
    with pytest.raises(ConfigurationError, match="such as"):
        flat_size("Net", shape)


@pytest.mark.parametrize("shape", [(784,), (1, 28), (1, 1, 28, 28), (0, 28, 28)])
def test_no_image(shape):
    with pytest.raises(ConfigurationError, match="channels, height, width|at least 1"):
        image_shape("Net", shape)


@pytest.mark.parametrize("layers", [[(5, 0), (5, 0)], [(5, 2), (5, 2)], [(3, 1)] * 3, [(3, 0)]])
def test_pooled_positions_are_what_torch_makes(layers):
    stack = nn.Sequential(*(m for k, p in layers for m in (nn.Conv2d(1, 1, k, padding=p), nn.MaxPool2d(2))))
    for side in (*range(2, 40), 64):
        image = torch.zeros(1, 1, side, side + 3)
        try:
            expected = stack(image).numel()
        except RuntimeError:
            with pytest.raises(ConfigurationError, match="too small"):
                pooled_positions("Net", image.shape[1:], layers)
        else:
            assert pooled_positions("Net", image.shape[1:], layers) == expected


def test_too_small_says_how_large_and_what_to_do():
    with pytest.raises(ConfigurationError, match=r"8x8 are too small.*at least 16x16.*, say hello, or use 'mlp'"):
        pooled_positions("Net", (1, 8, 8), [(5, 0), (5, 0)], hint=", say hello")


def test_no_convolutions():
    with pytest.raises(ConfigurationError, match="channels is empty"):
        pooled_positions("Net", (1, 8, 8), [])


def test_check_output_leaves_no_trace():
    network = nn.Sequential(nn.Flatten(), nn.BatchNorm1d(64), nn.Dropout(), nn.Linear(64, 3))
    network[1].eval()  # a frozen layer in a network that trains
    before = {name: tensor.clone() for name, tensor in network.state_dict().items()}
    generator = torch.get_rng_state()
    check_output(network, "Net", 3, (1, 8, 8))
    assert [module.training for module in network] == [True, False, True, True]
    assert all(torch.equal(tensor, before[name]) for name, tensor in network.state_dict().items())
    assert torch.equal(torch.get_rng_state(), generator)


def test_check_output_of_the_wrong_head():
    with pytest.raises(ConfigurationError, match=r"Net returns \(2, 3\).*\(2, 10\) logits"):
        check_output(nn.Sequential(nn.Flatten(), nn.Linear(64, 3)), "Net", 10, (1, 8, 8))


def test_check_output_of_no_tensor():
    class Two(nn.Module):
        def forward(self, x):
            return x, x

    with pytest.raises(ConfigurationError, match="returns tuple"):
        check_output(Two(), "Net", 10, (1, 8, 8))


def test_check_output_of_the_wrong_input_keeps_the_modes():
    network = nn.Linear(5, 2)
    with pytest.raises(ConfigurationError, match=r"cannot process samples of shape \(7,\).*cannot be multiplied"):
        check_output(network, "Net", 2, (7,))
    assert network.training


def test_check_output_in_half_precision():
    check_output(nn.Linear(5, 2, dtype=torch.bfloat16), "Net", 2, (5,))
