"""What the attack recovers: all of an unprotected update, nothing of a protected one."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from flsv.errors import ConfigurationError
from flsv.privacy import GaussianPrivacy, invert_gradient

SHAPE = (1, 6, 6)


def dense() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(36, 20), nn.Sigmoid(), nn.Linear(20, 5))


def convolutional() -> nn.Module:
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1),
        nn.Sigmoid(),
        nn.Conv2d(8, 8, 3, padding=1),
        nn.Sigmoid(),
        nn.Flatten(),
        nn.Linear(288, 5),
    )
    for parameter in net.parameters():
        nn.init.uniform_(parameter, -0.5, 0.5)
    return net


@pytest.fixture
def image() -> Tensor:
    return torch.rand(SHAPE, generator=torch.Generator().manual_seed(3))


def gradient(net: nn.Module, image: Tensor, label: int) -> Tensor:
    loss = nn.functional.cross_entropy(net(image[None]), torch.tensor([label]))
    return torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(net.parameters()))])


@pytest.mark.parametrize("build", [dense, convolutional])
@pytest.mark.parametrize("label", [0, 4])
def test_an_unprotected_gradient_gives_the_image_away(
    build: Callable[[], nn.Module], label: int, image: Tensor
) -> None:
    net = build()
    before = [parameter.clone() for parameter in net.parameters()]
    found = invert_gradient(net, gradient(net, image, label), SHAPE)
    assert found.label == label
    assert found.distance < 1e-6
    torch.testing.assert_close(found.image, image, atol=0.02, rtol=0)
    assert all(torch.equal(a, b) for a, b in zip(net.parameters(), before))
    assert all(parameter.grad is None for parameter in net.parameters())


def test_it_finds_what_the_first_layer_says(image: Tensor) -> None:
    """A linear layer's weight gradient is its bias gradient times the input (Phong et al., IEEE TIFS 2018)."""
    net = dense()
    observed = gradient(net, image, 2)
    weights, biases = observed[: 36 * 20].view(20, 36), observed[36 * 20 : 37 * 20]
    closed_form = (weights * biases[:, None]).sum(0) / biases.square().sum()
    found = invert_gradient(net, observed, SHAPE)
    torch.testing.assert_close(found.image.flatten(), closed_form, atol=2e-3, rtol=0)


def test_clipping_alone_hides_nothing(image: Tensor) -> None:
    net = convolutional()
    update = -0.1 * gradient(net, image, 1)
    sent = GaussianPrivacy(clip=update.norm().item() / 50, noise_multiplier=0).protect(update, torch.Generator())
    assert sent.norm() < update.norm() / 49
    torch.testing.assert_close(invert_gradient(net, -sent, SHAPE).image, image, atol=0.02, rtol=0)


@pytest.mark.parametrize("smoothness", [0.0, 0.01])
def test_noise_hides_the_image(smoothness: float, image: Tensor) -> None:
    net = convolutional()
    update = -0.1 * gradient(net, image, 1)
    privacy = GaussianPrivacy(clip=update.norm().item(), noise_multiplier=1.0)
    sent = privacy.protect(update, torch.Generator().manual_seed(0))
    found = invert_gradient(net, -sent, SHAPE, label=1, smoothness=smoothness)
    error, open_error = (
        (each.image.clamp(0, 1) - image).square().mean()
        for each in (found, invert_gradient(net, -update, SHAPE, label=1))
    )
    # Worse than knowing nothing: an evenly grey image of the right brightness.
    assert error > image.var(correction=0)
    assert error > 1000 * open_error


def test_smoothing_helps_where_there_is_a_little_noise() -> None:
    image = torch.zeros(SHAPE)
    image[:, 1:5, 2:4] = 1.0
    net = convolutional()
    observed = gradient(net, image, 1)
    sent = GaussianPrivacy(observed.norm().item(), 0.01).protect(observed, torch.Generator().manual_seed(0))
    rough, smooth = (
        (invert_gradient(net, sent, SHAPE, label=1, smoothness=s).image - image).square().mean() for s in (0.0, 0.01)
    )
    assert smooth < rough / 2


def test_buffers_behind_the_parameters_are_left_alone(image: Tensor) -> None:
    net = nn.Sequential(nn.Flatten(), nn.BatchNorm1d(36), nn.Linear(36, 20), nn.Sigmoid(), nn.Linear(20, 5)).eval()
    observed = gradient(net, image, 3)
    found = invert_gradient(net, torch.cat([observed, torch.full((72,), 9.0)]), SHAPE)
    assert found.label == 3
    torch.testing.assert_close(found.image, image, atol=0.02, rtol=0)


def test_errors(image: Tensor) -> None:
    net = dense()
    size = sum(parameter.numel() for parameter in net.parameters())
    with pytest.raises(ConfigurationError, match=rf"shape \[7\], and the module has {size} parameters"):
        invert_gradient(net, torch.ones(7), SHAPE)
    for bad in (torch.zeros(size), torch.full((size,), float("nan"))):
        with pytest.raises(ConfigurationError, match="zero or not finite"):
            invert_gradient(net, bad, SHAPE)
    headless = nn.Sequential(nn.Conv2d(1, 5, 6), nn.Flatten())
    with pytest.raises(ConfigurationError, match="pass label="):
        invert_gradient(headless, gradient(headless, image, 0), SHAPE)
