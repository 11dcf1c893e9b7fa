import pytest
from torch import nn

from flsv.errors import ConfigurationError
from flsv.models import ShapFedCNN


def test_three_convolutions_and_three_linear_layers(check_network):
    network = ShapFedCNN()
    kinds = [type(module) for module in network.modules()]
    assert (kinds.count(nn.Conv2d), kinds.count(nn.Linear), kinds.count(nn.ReLU)) == (3, 3, 5)
    parameters = 160 + 4_640 + 18_496 + (64 * 9 + 1) * 120 + 121 * 84 + 85 * 2
    assert parameters == 102_870
    check_network(network, 2, (1, 28, 28), parameters)


def test_other_widths_and_sizes(check_network):
    network = ShapFedCNN(3, (3, 64, 48), channels=(4, 8), hidden=(16,))
    check_network(network, 3, (3, 64, 48), 28 * 4 + 37 * 8 + (8 * 16 * 12 + 1) * 16 + 17 * 3)


def test_too_small():
    with pytest.raises(ConfigurationError, match="at least 8x8"):
        ShapFedCNN(2, (1, 7, 7))
