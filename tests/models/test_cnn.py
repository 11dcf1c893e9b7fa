"""Networks of papers: layers, parameters counted by hand, and images that are too small."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from flsv.errors import ConfigurationError
from flsv.models import LeNet5, McMahanCNN, ShapFedCNN, ShapleyFLCifarCNN, ShapleyFLFashionCNN, resnet34_small
from flsv.models.cnn import conv_stack
from flsv.models.linear import flat_size, image_shape, pooled_positions


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


def test_no_convolutions():
    with pytest.raises(ConfigurationError, match="channels is empty"):
        pooled_positions("Net", (1, 8, 8), [])


def test_conv_stack_written_out():
    torch.manual_seed(0)
    stack = conv_stack([1, 4, 6], kernel=3, padding=1)
    first, second = (layer for layer in stack if isinstance(layer, nn.Conv2d))
    x = torch.randn(5, 1, 12, 12)
    expected = F.max_pool2d(F.relu(F.conv2d(x, first.weight, first.bias, padding=1)), 2)
    expected = F.max_pool2d(F.relu(F.conv2d(expected, second.weight, second.bias, padding=1)), 2)
    torch.testing.assert_close(stack(x), expected)


@pytest.mark.parametrize(
    ("shape", "num_classes", "parameters"),
    [
        ((1, 28, 28), 10, (25 + 1) * 6 + (150 + 1) * 16 + (256 + 1) * 120 + 121 * 84 + 85 * 10),  # 44,426
        ((1, 32, 32), 10, 61_706),  # the number usually quoted for LeNet-5, at LeCun's image size
        ((3, 32, 32), 10, (75 + 1) * 6 + (150 + 1) * 16 + (400 + 1) * 120 + 121 * 84 + 85 * 10),  # 62,006
        ((3, 32, 32), 100, 62_006 + 85 * 90),
        ((1, 16, 16), 10, 156 + 2_416 + 17 * 120 + 10_164 + 850),  # the smallest
        ((3, 17, 40), 7, 456 + 2_416 + (16 * 7 + 1) * 120 + 10_164 + 85 * 7),  # not square
    ],
)
def test_network(check_network, shape, num_classes, parameters):
    check_network(LeNet5(num_classes, shape), num_classes, shape, parameters)


def test_as_in_the_paper(check_network):
    check_network(McMahanCNN(), 10, (1, 28, 28), 1_663_370)  # "1,663,370 total parameters"


def test_on_cifar(check_network):
    parameters = (75 + 1) * 32 + (800 + 1) * 64 + (64 * 64 + 1) * 512 + 513 * 100
    check_network(McMahanCNN(100, (3, 32, 32)), 100, (3, 32, 32), parameters)


def test_parameters_by_hand(check_network):
    stem = 3 * 9 * 64 + 128
    blocks, before = 0, 64
    for width, count in ((64, 3), (128, 4), (256, 6), (512, 3)):
        blocks += before * 9 * width + width * 9 * width + 4 * width  # two convolutions, two batch normalizations
        blocks += before * width + 2 * width if before != width else 0  # the shortcut's projection
        blocks += (count - 1) * (2 * width * 9 * width + 4 * width)
        before = width
    parameters = stem + blocks + 513 * 10
    assert parameters == 21_282_122
    network = resnet34_small()
    check_network(network, 10, (3, 32, 32), parameters)
    running = [buffer for buffer in network.buffers() if buffer.is_floating_point()]
    assert sum(buffer.numel() for buffer in running) == 17_024


def test_the_new_stem_starts_like_torchvisions():
    torch.manual_seed(0)
    # He initialization, fan-out: variance 2 / (64 * 9).
    assert resnet34_small().conv1.weight.std().item() == pytest.approx((2 / 576) ** 0.5, rel=0.1)


def test_three_convolutions_and_three_linear_layers(check_network):
    network = ShapFedCNN()
    kinds = [type(module) for module in network.modules()]
    assert (kinds.count(nn.Conv2d), kinds.count(nn.Linear), kinds.count(nn.ReLU)) == (3, 3, 5)
    parameters = 160 + 4_640 + 18_496 + (64 * 9 + 1) * 120 + 121 * 84 + 85 * 2
    assert parameters == 102_870
    check_network(network, 2, (1, 28, 28), parameters)


def test_fashion(check_network):
    parameters = (25 + 1) * 16 + 32 + (400 + 1) * 32 + 64 + (32 * 49 + 1) * 10
    assert parameters == 29_034
    check_network(ShapleyFLFashionCNN(), 10, (1, 28, 28), parameters)
    check_network(ShapleyFLFashionCNN(4, (3, 8, 8)), 4, (3, 8, 8))


def test_cifar(check_network):
    parameters = (27 + 1) * 16 + (144 + 1) * 32 + (32 * 64 + 1) * 512 + 513 * 10
    assert parameters == 1_059_306
    check_network(ShapleyFLCifarCNN(), 10, (3, 32, 32), parameters)
    check_network(ShapleyFLCifarCNN(4, (1, 8, 8)), 4, (1, 8, 8))
