import warnings

import pytest
import torch
import torchvision.models
from torch import nn

from flsv.errors import ConfigurationError
from flsv.models import build_network


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
        ("shapfedcnn", "'shapfed_cnn'"),
        ("resnet34_smal", "'resnet34_small'"),
        ("timm:resnet_18", "'resnet18'"),
        ("torchvision:resnet19", "'resnet18'"),
        ("timm:lenet5", "none of timm's networks"),
        ("zzzzzzzz", "flsv's own are fast_text, lenet5, mcmahan_cnn"),
    ],
)
def test_unknown_name(name, hint):
    with pytest.raises(ConfigurationError, match=f"Unknown network '{name}'.*{hint}"):
        build_network(name, 10, (3, 32, 32))
