"""Backbones: timm's, torchvision's and our own, with random weights and those of a file."""

from __future__ import annotations

from pathlib import Path

import pytest
import timm
import torch
from torchvision.models import squeezenet1_0

from flsv.errors import ConfigurationError
from flsv.features import Backbone
from flsv.models import build_network


def images(channels: int = 1, side: int = 32) -> torch.Tensor:
    return torch.randn(3, channels, side, side, generator=torch.Generator().manual_seed(0))


def test_a_timm_network_gives_what_timm_calls_its_features(tmp_path: Path) -> None:
    torch.manual_seed(1)
    trained = timm.create_model("resnet10t", num_classes=4, in_chans=1).eval()
    torch.save(trained.state_dict(), tmp_path / "weights.pt")
    features = Backbone("resnet10t", weights=str(tmp_path / "weights.pt"))(images())
    bare = timm.create_model("resnet10t", num_classes=0, in_chans=1)
    bare.load_state_dict({k: v for k, v in trained.state_dict().items() if not k.startswith("fc.")})
    torch.testing.assert_close(features, bare.eval()(images()).detach())


def test_random_weights_follow_from_the_seed_and_leave_the_global_generator_alone() -> None:
    torch.manual_seed(5)
    state = torch.get_rng_state()
    features = [Backbone("lenet5", seed=seed)(images(side=28)) for seed in (0, 0, 1)]
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(features[0], features[1])
    assert not torch.equal(features[0], features[2])


def test_grey_images_in_a_torchvision_network_of_another_size() -> None:
    features = Backbone("torchvision:resnet18", image_size=40)(images(side=16))
    assert features.shape == (3, 512)
    assert features.isfinite().all()


def test_weights_that_do_not_do(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="not both"):
        Backbone("lenet5", pretrained=True, weights="x.pt")
    with pytest.raises(ConfigurationError, match="there is no file"):
        Backbone("lenet5", weights=str(tmp_path / "x.pt"))(images(side=28))
    (tmp_path / "noise.pt").write_text("no weights")
    with pytest.raises(ConfigurationError, match="no state_dict that can be read"):
        Backbone("lenet5", weights=str(tmp_path / "noise.pt"))(images(side=28))
    torch.save(build_network("mlp", 10, (1, 28, 28)).state_dict(), tmp_path / "mlp.pt")
    with pytest.raises(ConfigurationError, match="does not fit"):
        Backbone("lenet5", weights=str(tmp_path / "mlp.pt"))(images(side=28))


def test_unknown_networks_and_those_without_a_linear_head() -> None:
    with pytest.raises(ConfigurationError, match="Unknown network"):
        Backbone("resnet_18")(images())
    assert not any(isinstance(m, torch.nn.Linear) for m in squeezenet1_0().modules())
    with pytest.raises(ConfigurationError, match="no linear layer"):
        Backbone("torchvision:squeezenet1_0", image_size=64)(images(3))
