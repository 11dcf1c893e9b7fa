import pytest

from flsv.errors import ConfigurationError
from flsv.models import McMahanCNN


def test_as_in_the_paper(check_network):
    check_network(McMahanCNN(), 10, (1, 28, 28), 1_663_370)  # "1,663,370 total parameters"


def test_on_cifar(check_network):
    parameters = (75 + 1) * 32 + (800 + 1) * 64 + (64 * 64 + 1) * 512 + 513 * 100
    check_network(McMahanCNN(100, (3, 32, 32)), 100, (3, 32, 32), parameters)


def test_on_digits(check_network):
    check_network(McMahanCNN(10, (1, 8, 8), hidden=32), 10, (1, 8, 8), 832 + 51_264 + (256 + 1) * 32 + 330)


def test_too_small():
    with pytest.raises(ConfigurationError, match="at least 4x4"):
        McMahanCNN(10, (1, 3, 28))
