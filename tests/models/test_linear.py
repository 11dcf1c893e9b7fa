import pytest
import torch

from flsv.errors import ConfigurationError
from flsv.models import MLP, SoftmaxRegression


def test_mlp_is_mcmahans_2nn(check_network):
    check_network(MLP(), 10, (1, 28, 28), 199_210)  # "199,210 total parameters"


@pytest.mark.parametrize(("hidden", "parameters"), [((), 31 * 4), ((8,), 31 * 8 + 9 * 4)])
def test_mlp_of_a_table(check_network, hidden, parameters):
    check_network(MLP(4, (30,), hidden=hidden), 4, (30,), parameters)


def test_softmax(check_network):
    check_network(SoftmaxRegression(), 10, (1, 28, 28), 7_850)
    check_network(SoftmaxRegression(3, (5,)), 3, (5,), 18)


def test_softmax_is_affine():
    network = SoftmaxRegression(3, (2, 4))
    x = torch.randn(6, 2, 4)
    expected = torch.einsum("bchw,mchw->bm", x[:, None], network.classifier.weight.view(3, 1, 2, 4))
    torch.testing.assert_close(network(x), expected + network.classifier.bias)


@pytest.mark.parametrize("build", [MLP, SoftmaxRegression])
@pytest.mark.parametrize("wrong", [{"num_classes": 0}, {"input_shape": ()}])
def test_wrong_arguments(build, wrong):
    with pytest.raises(ConfigurationError, match=build.__name__):
        build(**wrong)
