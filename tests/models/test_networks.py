"""Networks: layers, parameters counted by hand, shapes and names that do not go."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.functional import embedding_bag
from torch.testing import assert_close

from flsv import models
from flsv.models.cnn import conv_stack
from helpers import refused


def test_conv_stack_equals_its_layers_written_out():
    torch.manual_seed(0)
    stack = conv_stack([1, 4, 6], kernel=3, padding=1)
    convolutions = [layer for layer in stack if isinstance(layer, nn.Conv2d)]

    assert len(convolutions) == 2

    x = torch.randn(5, 1, 12, 12)
    expected = x
    for layer in convolutions:
        activations = F.relu(
            F.conv2d(
                expected,
                layer.weight,
                layer.bias,
                padding=1,
            )
        )
        expected = F.max_pool2d(activations, 2)

    assert_close(stack(x), expected)


LENET = (25 + 1) * 6 + (150 + 1) * 16 + (256 + 1) * 120 + 121 * 84 + 85 * 10  # 44,426
MCMAHAN = (75 + 1) * 32 + (800 + 1) * 64 + (64 * 64 + 1) * 512 + 513 * 100
SHAPFED = 160 + 4_640 + 18_496 + (64 * 9 + 1) * 120 + 121 * 84 + 85 * 2
FASHION = (25 + 1) * 16 + 32 + (400 + 1) * 32 + 64 + (32 * 49 + 1) * 10
CIFAR = (27 + 1) * 16 + (144 + 1) * 32 + (32 * 64 + 1) * 512 + 513 * 10


@pytest.mark.parametrize(
    ("network", "num_classes", "shape", "parameters"),
    [
        (models.LeNet5, 10, (1, 28, 28), LENET),
        (
            models.LeNet5,
            10,
            (1, 32, 32),
            61_706,
        ),  # the number usually quoted for LeNet-5, at LeCun's image size
        (
            models.LeNet5,
            7,
            (3, 17, 40),
            456 + 2_416 + (16 * 7 + 1) * 120 + 10_164 + 85 * 7,
        ),  # not square
        (models.McMahanCNN, 10, (1, 28, 28), 1_663_370),  # "1,663,370 total parameters"
        (models.McMahanCNN, 100, (3, 32, 32), MCMAHAN),
        (models.ShapFedCNN, 2, (1, 28, 28), SHAPFED),
        (models.ShapleyFLFashionCNN, 10, (1, 28, 28), FASHION),
        (models.ShapleyFLCifarCNN, 10, (3, 32, 32), CIFAR),
        (models.MLP, 10, (1, 28, 28), 199_210),  # "199,210 total parameters": McMahan's 2NN
    ],
)
def test_networks_have_the_parameter_counts_of_their_papers(
    network, num_classes, shape, parameters
):
    check_network(network(num_classes, shape), num_classes, shape, parameters)


def check_network(network, num_classes, input_shape, parameters):
    """Logits of the right shape, gradients everywhere, the head last, and as many parameters as computed by hand."""
    torch.manual_seed(0)
    logits = network(torch.rand(3, *input_shape))
    logits.square().sum().backward()

    assert logits.shape == (3, num_classes)
    for parameter in network.parameters():
        assert parameter.grad is not None
        assert parameter.grad.isfinite().all()

    linear_layers = [module for module in network.modules() if isinstance(module, nn.Linear)]
    head = linear_layers[-1]
    *_, last_parameter = network.parameters()
    num_parameters = sum(parameter.numel() for parameter in network.parameters())
    assert head.out_features == num_classes
    assert last_parameter is head.bias
    assert num_parameters == parameters


@pytest.mark.slow
def test_resnet34_for_small_images_has_its_parameters_and_buffers():
    network = models.resnet34_small()
    check_network(network, 10, (3, 32, 32), 21_282_122)
    running = [buffer for buffer in network.buffers() if buffer.is_floating_point()]
    assert sum(buffer.numel() for buffer in running) == 17_024


def test_fast_text_is_the_mean_of_the_words_vectors():
    network = models.FastText(3, (5,), buckets=11, width=4)
    padding = 0
    hashes = torch.tensor(
        [
            [7, 4026989588, 17, padding, padding],
            [3, padding, padding, padding, padding],
            [1, 2, 3, 4, 5],
        ]
    )

    logits = network(hashes)

    # Vector 0 is that of the padding, and a hash has vector 1 + hash % 10.
    rows = torch.tensor(
        [
            [8, 9, 8, 0, 0],
            [4, 0, 0, 0, 0],
            [2, 3, 4, 5, 6],
        ]
    )
    means = embedding_bag(rows, network.embedding.weight, mode="mean", padding_idx=0)
    assert_close(logits, network.classifier(means))


def test_padding_of_fast_text_is_not_trained():
    network = models.FastText(3, (5,), buckets=11, width=4)
    optimizer = torch.optim.Adam(network.parameters(), lr=0.1)
    hashes = torch.tensor([[7, 17, 0, 0, 0], [3, 0, 0, 0, 0]])

    network(hashes).logsumexp(1).sum().backward()
    optimizer.step()

    assert (network.embedding.weight[0] == 0).all()


def test_fast_text_of_images_is_refused():
    with refused("is not the shape of a text"):
        models.FastText(input_shape=(1, 28, 28))


def test_build_network_passes_options_to_timm():
    network = models.build_network("timm:test_vit", 4, (1, 32, 32), img_size=32)
    assert network(torch.rand(2, 1, 32, 32)).shape == (2, 4)


@pytest.mark.parametrize("name", ["softmax", "timm:resnet10t"])
def test_build_network_refuses_options_of_another_network(name):
    with refused(
        rf"{name}\(hidden=\[64\]\):.*network.*no such option.*--model.network_args=\{{\}}"
    ):
        models.build_network(name, 10, (3, 32, 32), hidden=[64])


@pytest.mark.parametrize("name", ["lenet", "torchvision:resnet18"])
def test_build_network_with_an_unknown_name_raises(name):
    with refused(rf"network '{name}'\..* flsv has fast_text, lenet5"):
        models.build_network(name, 10, (4,))
