import pytest

from flsv.errors import ConfigurationError
from flsv.models import LeNet5


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


def test_the_small_variant(check_network):
    network = LeNet5(channels=(10, 20), hidden=(50,))
    check_network(network, 10, (1, 28, 28), 260 + 5_020 + (320 + 1) * 50 + 510)


def test_padding_for_small_images(check_network):
    check_network(LeNet5(10, (1, 8, 8), padding=2), 10, (1, 8, 8), 156 + 2_416 + (64 + 1) * 120 + 10_164 + 850)


def test_too_small():
    with pytest.raises(ConfigurationError, match=r"8x8 are too small.*at least 16x16.*padding=2"):
        LeNet5(10, (1, 8, 8))
    with pytest.raises(ConfigurationError, match=r"3x3 are too small.*at least 4x4") as error:
        LeNet5(10, (1, 3, 3), padding=2)
    assert "padding=2" not in str(error.value)


@pytest.mark.parametrize("wrong", [{"num_classes": 1}, {"input_shape": (784,)}, {"channels": ()}])
def test_wrong_arguments(wrong):
    with pytest.raises(ConfigurationError, match="LeNet5[:(]"):
        LeNet5(**wrong)


def test_three_layers_of_convolutions(check_network):
    parameters = (25 + 1) * 4 + (100 + 1) * 6 + (150 + 1) * 8 + (8 * 9 + 1) * 120 + 10_164 + 850
    check_network(LeNet5(10, (1, 28, 28), channels=(4, 6, 8), padding=2), 10, (1, 28, 28), parameters)
