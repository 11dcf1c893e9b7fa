"""MixtureClient: the mixture's probabilities, EM's gradient and weights, and that it is an ordinary client."""

from __future__ import annotations

from pathlib import Path

import lightning as L
import numpy as np
import pytest
import torch
from torch import Tensor, nn
from toys import CLASSES, FEATURES, network, toy_data, trainer_for

from flsv.errors import ConfigurationError
from flsv.models.mixture import Mixture, MixtureClient


def client(num_components: int = 3) -> MixtureClient:
    torch.manual_seed(1)
    module = MixtureClient(
        num_components, network="mlp", network_args={"hidden": [5]}, num_classes=CLASSES, input_shape=(FEATURES,)
    )
    assert isinstance(module.network, Mixture)
    module.network.responsibility.copy_(torch.tensor([6.0, 3.0, 1.0])[:num_components])
    return module


def batch(size: int = 11) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(0)
    return torch.randn(size, FEATURES, generator=draw), torch.randint(CLASSES, (size,), generator=draw)


def likelihoods(module: MixtureClient, x: Tensor) -> np.ndarray:
    """p_k(y|x), ``[K, B, M]``."""
    logits = np.stack([component(x).detach().double().numpy() for component in module.network.components])
    exponentials = np.exp(logits)
    return exponentials / exponentials.sum(-1, keepdims=True)


def test_probabilities_are_the_weighted_mean_of_the_components() -> None:
    module, (x, _) = client(), batch()
    expected = np.einsum("k,kbm->bm", [0.6, 0.3, 0.1], likelihoods(module, x))
    np.testing.assert_allclose(module(x).exp().detach().numpy(), expected, rtol=1e-5)


def test_em() -> None:
    """Responsibilities by Bayes' rule; the loss's gradient is that of their weighted losses (the M-step's)."""
    module, (x, y) = client(), batch()
    p = likelihoods(module, x)[:, np.arange(len(y)), y.numpy()]
    joint = np.array([0.6, 0.3, 0.1])[:, None] * p
    q = joint / joint.sum(0)
    module.training_step((x, y), 0).backward()
    np.testing.assert_allclose(module.network.responsibility, np.array([6, 3, 1]) + q.sum(1), rtol=1e-5)
    for component, weights in zip(module.network.components, torch.from_numpy(q).float()):
        losses = nn.functional.cross_entropy(component(x), y, reduction="none")
        expected = torch.autograd.grad((weights * losses).mean(), list(component.parameters()))
        for parameter, gradient in zip(component.parameters(), expected):
            torch.testing.assert_close(parameter.grad, gradient, rtol=1e-4, atol=1e-6)


def test_components_start_different_by_name_and_by_object() -> None:
    by_name = MixtureClient(network="mlp", num_classes=CLASSES, input_shape=(FEATURES,)).network
    by_object = MixtureClient(network=network(), num_classes=CLASSES).network
    for mixture in (by_name, by_object):
        assert isinstance(mixture, Mixture)
        torch.testing.assert_close(mixture.responsibility, torch.full((3,), 1 / 3))
        firsts = [next(component.parameters()) for component in mixture.components]
        assert len(firsts) == 3
        assert not any(torch.equal(firsts[i], firsts[j]) for i, j in ((0, 1), (0, 2), (1, 2)))
    with pytest.raises(ConfigurationError, match=r"Flatten has no layer with reset_parameters"):
        MixtureClient(2, network=nn.Flatten(), num_classes=CLASSES)


def test_it_trains_alone_and_comes_back_from_a_checkpoint(tmp_path: Path) -> None:
    L.seed_everything(0, verbose=False)
    module = MixtureClient(2, network="mlp", optimizer=lambda p: torch.optim.SGD(p, lr=0.1))
    trainer = trainer_for(None, tmp_path, rounds=8)
    trainer.fit(module, toy_data())
    assert float(trainer.callback_metrics["val_accuracy"]) > 0.8
    trainer.save_checkpoint(tmp_path / "m.ckpt")
    again = MixtureClient.load_from_checkpoint(tmp_path / "m.ckpt")
    x, _ = batch()
    assert torch.equal(again.eval()(x), module.eval()(x))
    assert again.network.weights.tolist() == module.network.weights.tolist() != [0.5, 0.5]
