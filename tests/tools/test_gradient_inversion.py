"""The picture of the gradient inversion attack, at the size of a test."""

from __future__ import annotations

import importlib
import os
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import nn

ROOT = os.environ.get("FLSV_DATA_ROOT")


@pytest.fixture
def tool(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    module = importlib.import_module("gradient_inversion")
    monkeypatch.setattr(module, "NOISE", (0.0, 1.0))
    monkeypatch.setattr(module, "SMOOTHING", (0.01,))
    return module


@pytest.mark.slow
def test_on_scikit_learns_digits(tool: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    images, labels = tool.digits(2, None)
    titles, rows = tool.run(images, labels)
    assert [len(row) for row in rows] == [len(titles)] * 2
    for original, unprotected, clipped, noisy in rows:
        for found in (unprotected, clipped):
            assert (found - original).square().mean() < 1e-4
        assert tool.likeness(noisy, original) < 0.5
        assert (noisy - original).square().mean() > original.var()
    printed = capsys.readouterr().out
    assert "| unprotected | inf |" in printed
    assert "| 1.00 | 2/2 |" in printed
    assert "| clipped, sigma = 1 | 4.377 |" in printed
    tool.draw(titles, rows, tmp_path / "new" / "picture.png")
    assert (tmp_path / "new" / "picture.png").stat().st_size > 3000


def test_it_finds_what_the_first_layer_says(tool: ModuleType) -> None:
    """A linear layer's weight gradient is its bias gradient times the input (Phong et al., IEEE TIFS 2018)."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Flatten(), nn.Linear(36, 20), nn.Sigmoid(), nn.Linear(20, 5))
    loss = nn.functional.cross_entropy(net(torch.rand(1, 1, 6, 6)), torch.tensor([2]))
    observed = torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(net.parameters()))])
    weights, biases = observed[: 36 * 20].view(20, 36), observed[36 * 20 : 37 * 20]
    closed_form = (weights * biases[:, None]).sum(0) / biases.square().sum()
    image, label = tool.invert(net, observed, (1, 6, 6))
    assert label == 2
    torch.testing.assert_close(image.flatten(), closed_form, atol=2e-3, rtol=0)


def test_likeness(tool: ModuleType) -> None:
    image = torch.rand(1, 4, 4)
    assert tool.likeness(image / 2 + 0.1, image) == pytest.approx(1)
    assert tool.likeness(1 - image, image) == pytest.approx(-1)
    assert tool.likeness(torch.zeros(1, 4, 4), image) == 0


@pytest.mark.parametrize(
    "root",
    [
        None,
        pytest.param(
            ROOT,
            marks=pytest.mark.skipif(
                ROOT is None or not Path(ROOT, "MNIST").is_dir(), reason="FLSV_DATA_ROOT has no MNIST"
            ),
        ),
    ],
    ids=["digits", "MNIST"],
)
def test_one_digit_of_each_class(tool: ModuleType, root: str | None) -> None:
    images, labels = tool.digits(10, root)
    size = 8 if root is None else 28
    assert images.shape == (10, 1, size, size)
    assert labels.tolist() == list(range(10))
    assert images.min() == 0
    assert 0.9 <= images.max() <= 1
    assert tool.one_step(tool.dlg_network(size, seed=0), images[0], labels[0]).norm() > tool.CLIP
