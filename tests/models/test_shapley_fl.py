import pytest
import torch
from torch import nn

from flsv.errors import ConfigurationError
from flsv.models import ShapleyFLCifarCNN, ShapleyFLFashionCNN


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


def test_cifar_drops_out_in_training_only():
    network = ShapleyFLCifarCNN(10, (3, 8, 8), dropout=0.3)
    assert [module.p for module in network.modules() if isinstance(module, nn.Dropout)] == [0.3, 0.3]
    x = torch.rand(4, 3, 8, 8)
    assert not torch.equal(network(x), network(x))
    network.eval()
    assert torch.equal(network(x), network(x))


@pytest.mark.parametrize("build", [ShapleyFLFashionCNN, ShapleyFLCifarCNN])
def test_too_small(build):
    with pytest.raises(ConfigurationError, match=f"{build.__name__}.*at least 4x4"):
        build(10, (3, 3, 3))
