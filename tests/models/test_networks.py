"""Networks: layers, parameters counted by hand, shapes and names that do not go."""

from __future__ import annotations

import warnings

import pytest
import torch
import torch.nn.functional as F
import torchvision.models
from torch import nn
from torch.nn.functional import embedding_bag

from flsv.errors import ConfigurationError
from flsv.models import (
    MLP,
    FastText,
    LeNet5,
    McMahanCNN,
    ShapFedCNN,
    ShapleyFLCifarCNN,
    ShapleyFLFashionCNN,
    build_network,
    resnet34_small,
)
from flsv.models.cnn import conv_stack
from flsv.models.linear import pooled_positions


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
        ((3, 17, 40), 7, 456 + 2_416 + (16 * 7 + 1) * 120 + 10_164 + 85 * 7),  # not square
    ],
)
def test_lenet5(check_network, shape, num_classes, parameters):
    check_network(LeNet5(num_classes, shape), num_classes, shape, parameters)


def test_mcmahans_cnn_as_in_the_paper(check_network):
    check_network(McMahanCNN(), 10, (1, 28, 28), 1_663_370)  # "1,663,370 total parameters"


def test_mcmahans_cnn_on_cifar(check_network):
    parameters = (75 + 1) * 32 + (800 + 1) * 64 + (64 * 64 + 1) * 512 + 513 * 100
    check_network(McMahanCNN(100, (3, 32, 32)), 100, (3, 32, 32), parameters)


def test_resnet34(check_network):
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


def test_mlp_is_mcmahans_2nn(check_network):
    check_network(MLP(), 10, (1, 28, 28), 199_210)  # "199,210 total parameters"


def test_fast_text_is_the_mean_of_the_words_vectors():
    network = FastText(3, (5,), buckets=11, width=4)
    hashes = torch.tensor([[7, 4026989588, 17, 0, 0], [3, 0, 0, 0, 0], [1, 2, 3, 4, 5]])
    # Hashes that differ by a multiple of 10 share a vector.
    rows = torch.tensor([[8, 9, 8, 0, 0], [4, 0, 0, 0, 0], [2, 3, 4, 5, 6]])
    mean = embedding_bag(rows, network.embedding.weight, mode="mean", padding_idx=0)
    torch.testing.assert_close(network(hashes), network.classifier(mean))


def test_padding_is_not_trained():
    network = FastText(2, (3,), buckets=5, width=4)
    optimizer = torch.optim.Adam(network.parameters(), lr=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        network(torch.tensor([[3, 0, 0], [9, 2, 0]])).logsumexp(1).sum().backward()
        optimizer.step()
    assert (network.embedding.weight[0] == 0).all()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"input_shape": (1, 28, 28)}, "is no text's shape"),
    ],
)
def test_refused(arguments, message):
    with pytest.raises(ConfigurationError, match=message):
        FastText(**arguments)


def test_timm_options():
    network = build_network("timm:test_vit", 4, (1, 32, 32), img_size=32)
    assert network(torch.rand(2, 1, 32, 32)).shape == (2, 4)
    with pytest.raises(ConfigurationError, match=r"timm:resnet10t could not be built.*'nonsense'"):
        build_network("timm:resnet10t", 4, (1, 32, 32), nonsense=1)


@pytest.mark.parametrize("name", ["torchvision:resnet18", "torchvision:squeezenet1_0"])
def test_torchvision(name):
    network = build_network(name, 4, (3, 32, 32))
    assert type(network).__module__.startswith("torchvision")
    assert network(torch.rand(2, 3, 32, 32)).shape == (2, 4)


@pytest.mark.parametrize(("name", "side"), [("googlenet", 32), ("inception_v3", 75)])
def test_torchvision_networks_with_auxiliary_heads_return_logits(monkeypatch, name, side):
    # Their own initialization takes seconds and draws from scipy; not what this test is about.
    monkeypatch.setattr(nn.init, "trunc_normal_", lambda tensor, **kwargs: tensor)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        network = build_network(f"torchvision:{name}", 4, (3, side, side))
    assert network.train()(torch.rand(2, 3, side, side)).shape == (2, 4)


def test_torchvision_takes_three_channels():
    with pytest.raises(ConfigurationError, match=r"takes 3 channels, but the samples have 1.*timm"):
        build_network("torchvision:resnet18", 10, (1, 28, 28))


@pytest.mark.parametrize("options", [{"pretrained": True}, {"weights": "IMAGENET1K_V1"}])
def test_torchvision_weights_keep_the_body_and_replace_the_head(monkeypatch, options):
    torch.manual_seed(1)
    downloaded = torchvision.models.shufflenet_v2_x0_5()
    monkeypatch.setattr(
        "torchvision.models._api.load_state_dict_from_url", lambda *args, **kwargs: downloaded.state_dict()
    )
    network = build_network("torchvision:shufflenet_v2_x0_5", 4, (3, 32, 32), **options)
    assert network.fc.out_features == 4
    assert torch.equal(network.conv1[0].weight, downloaded.conv1[0].weight)
    same = build_network("torchvision:shufflenet_v2_x0_5", 1000, (3, 32, 32), **options)
    assert torch.equal(same.fc.weight, downloaded.fc.weight)


@pytest.mark.parametrize("options", [{"weights": "NONSENSE"}, {"nonsense": 1}])
def test_torchvision_rejects_options(options):
    with pytest.raises(ConfigurationError, match=r"torchvision:resnet18 could not be built.*(NONSENSE|nonsense)"):
        build_network("torchvision:resnet18", 4, (3, 32, 32), **options)


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("lenet", "'lenet5'"),
        ("torchvision:resnet19", "'resnet18'"),
        ("zzzzzzzz", "flsv's own are fast_text, lenet5, mcmahan_cnn"),
    ],
)
def test_unknown_name(name, hint):
    with pytest.raises(ConfigurationError, match=f"Unknown network '{name}'.*{hint}"):
        build_network(name, 10, (3, 32, 32))
