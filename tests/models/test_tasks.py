"""RegressorClient, CharacterModel and MixtureClient against sums by hand."""

import math
from functools import partial

import lightning as L
import numpy as np
import pytest
import torch
from numpy.testing import assert_allclose
from torch import nn
from torch.testing import assert_close
from torch.utils.data import DataLoader, TensorDataset

from flsv.models import CharacterModel, RegressorClient
from flsv.models.mixture import Mixture, MixtureClient
from helpers import make_generator, refused
from helpers.data import CLASSES, FEATURES, toy_data
from helpers.fits import plain_trainer
from helpers.models import network


class Lines(L.LightningDataModule):
    """y = x w + 3 and noise; 37 samples, so that the last batch is smaller."""

    def __init__(self, shape=(4,)):
        super().__init__()
        generator = make_generator()
        x = torch.randn(37, 4, generator=generator)
        self.x, self.y = (
            x,
            x @ torch.arange(4.0) + 3 + 0.1 * torch.randn(37, generator=generator),
        )
        self.input_shape = shape

    def train_dataloader(self):
        return DataLoader(TensorDataset(self.x, self.y), batch_size=10)

    val_dataloader = test_dataloader = predict_dataloader = train_dataloader


@pytest.fixture
def fit_module(tmp_path):
    def command(data=None, **options):
        L.seed_everything(0)
        options.setdefault("optimizer", partial(torch.optim.SGD, lr=0.05))
        model = RegressorClient(**options)
        trainer = plain_trainer(tmp_path, 1)
        trainer.fit(model, data or Lines())
        return trainer, model

    return command


def test_regressor_reads_inputs_and_targets_of_batches_with_further_fields():
    model = RegressorClient(input_shape=(3,))
    inputs = torch.rand(4, 3)
    targets = torch.rand(4)
    weights = torch.ones(4)
    loss = model.training_step((inputs, targets), 0)
    loss_with_weights = model.training_step((inputs, targets, weights), 0)

    assert loss_with_weights == loss


def test_regressor_losses_and_errors_are_means_over_samples(fit_module):
    data = Lines()
    trainer, model = fit_module()
    with torch.no_grad():
        error = (model(data.x) - data.y).double()

    mean_squared_error = pytest.approx(
        error.square().mean().item(),
        rel=1e-5,
    )
    mean_absolute_error = pytest.approx(
        error.abs().mean().item(),
        rel=1e-5,
    )

    logged = trainer.callback_metrics
    assert logged["val_loss"].item() == mean_squared_error
    assert logged["val_mae"].item() == mean_absolute_error

    # Of the validation samples in one batch, the loss of a training step is the same.
    assert (
        model.training_step(
            (data.x, data.y),
            0,
        ).item()
        == mean_squared_error
    )

    (tested,) = trainer.test(model, data, verbose=False)
    assert tested == {"test_loss": mean_squared_error, "test_mae": mean_absolute_error}

    predicted = torch.cat(trainer.predict(model, data))
    assert_close(predicted, model(data.x).detach())


def test_regressor_with_wrong_shapes_is_refused(fit_module):
    with refused(r"input_shape=\(3,\),.*data \(Lines\) has input_shape=\(4,\)"):
        fit_module(input_shape=(3,))

    with refused("input_shape is not known"):
        fit_module(data=Lines(shape=None))
    with refused("has no network before training starts"):
        RegressorClient()(torch.rand(3, 4))

    model = RegressorClient(input_shape=(4,))
    for y in (
        torch.rand(3, 1),
        torch.rand(1),
    ):  # would be broadcast
        with refused(r"number per sample.*expected, \[3\]"):
            model.training_step((torch.rand(3, 4), y), 0)


def make_loader(text=b"abcdefgh" * 8, length=7, batch_size=3):
    pieces = torch.tensor(
        [list(text[at : at + length + 1]) for at in range(0, len(text) - length, length)]
    )
    return DataLoader(TensorDataset(pieces), batch_size=batch_size)


def test_character_model_predicts_each_following_character(tmp_path):
    model = CharacterModel(width=4, hidden=8)
    batches = make_loader()
    trainer = plain_trainer(tmp_path, 1)
    trainer.validate(model, batches, verbose=False)
    losses = []
    hits = []
    with torch.no_grad():
        for (pieces,) in batches:
            for piece in pieces:
                for end in range(1, 8):  # one character at a time
                    character = piece[end]
                    outputs = model(piece[None, :end])
                    logits = outputs[0, -1].double()
                    log_probabilities = logits.log_softmax(0)
                    losses.append(-log_probabilities[character].item())
                    hits.append(bool(logits.argmax() == character))

    mean_loss = sum(losses) / len(losses)
    expected_loss = pytest.approx(mean_loss, rel=1e-5)
    expected_bits = pytest.approx(mean_loss / math.log(2), rel=1e-5)
    accuracy = sum(hits) / len(hits)
    logged = trainer.callback_metrics
    assert logged["val_loss"].item() == expected_loss
    assert logged["val_bits_per_character"].item() == expected_bits
    assert logged["val_accuracy"].item() == pytest.approx(accuracy)

    (all_pieces,) = batches.dataset.tensors
    training_loss = model.training_step([all_pieces], 0)
    assert training_loss.item() == expected_loss

    (tested,) = trainer.test(model, batches, verbose=False)
    assert tested["test_loss"] == expected_loss
    predictions = trainer.predict(model, batches)
    assert predictions[0].shape == (3, 8, 256)


def test_character_model_does_not_look_ahead():
    model = CharacterModel(width=4, hidden=8)
    text = torch.tensor([list(b"once upon")])
    last_positions = torch.arange(5, 9)
    changed = text.index_fill(1, last_positions, 33)

    outputs = model(text)[:, :5]
    outputs_of_changed = model(changed)[:, :5]
    assert torch.equal(outputs, outputs_of_changed)


def make_mixture_client(num_components=3):
    torch.manual_seed(1)
    module = MixtureClient(
        num_components,
        network="mlp",
        network_args={"hidden": [5]},
        num_classes=CLASSES,
        input_shape=(FEATURES,),
    )

    assert isinstance(module.network, Mixture)

    module.network.responsibility.copy_(torch.tensor([6.0, 3.0, 1.0])[:num_components])
    return module


def make_batch(size=11):
    draw = make_generator()
    return torch.randn(size, FEATURES, generator=draw), torch.randint(
        CLASSES, (size,), generator=draw
    )


def likelihoods(module, x):
    """p_k(y|x), ``[K, B, M]``."""
    logits = np.stack(
        [component(x).detach().double().numpy() for component in module.network.components]
    )
    exponentials = np.exp(logits)
    return exponentials / exponentials.sum(-1, keepdims=True)


def test_mixture_probabilities_are_the_weighted_mean_of_the_components():
    module, (x, _) = make_mixture_client(), make_batch()
    expected = np.einsum("k,kbm->bm", [0.6, 0.3, 0.1], likelihoods(module, x))
    assert_allclose(module(x).exp().detach().numpy(), expected, rtol=1e-5)


def test_mixture_loss_gradient_is_that_of_em():
    """Responsibilities by Bayes' rule; the loss's gradient is that of their weighted losses (the M-step's)."""
    module = make_mixture_client()
    x, y = make_batch()
    chances = likelihoods(
        module,
        x,
    )[:, np.arange(len(y)), y.numpy()]
    joint = np.array([[0.6], [0.3], [0.1]]) * chances
    responsibilities = joint / joint.sum(0)

    module.training_step((x, y), 0).backward()

    expected_counts = np.array([6, 3, 1]) + responsibilities.sum(1)
    assert_allclose(module.network.responsibility, expected_counts, rtol=1e-5)
    for component, weights in zip(module.network.components, responsibilities):
        losses = nn.functional.cross_entropy(component(x), y, reduction="none")
        weighted_loss = (torch.from_numpy(weights).float() * losses).mean()
        gradients = torch.autograd.grad(weighted_loss, list(component.parameters()))
        for parameter, gradient in zip(component.parameters(), gradients):
            assert_close(parameter.grad, gradient, rtol=1e-4, atol=1e-6)


def test_mixture_components_have_different_initial_weights():
    by_name = MixtureClient(network="mlp", num_classes=CLASSES, input_shape=(FEATURES,))
    by_object = MixtureClient(network=network(), num_classes=CLASSES)

    for client in (by_name, by_object):
        mixture = client.network
        assert isinstance(mixture, Mixture)
        assert_close(
            mixture.responsibility,
            torch.full((3,), 1 / 3),
        )
        weights = [next(component.parameters()) for component in mixture.components]
        assert len(weights) == 3
        assert not torch.equal(weights[0], weights[1])
        assert not torch.equal(weights[0], weights[2])
        assert not torch.equal(weights[1], weights[2])


def test_mixture_of_a_network_that_cannot_be_drawn_anew_is_refused():
    with refused("Flatten has no layer.*reset_parameters"):
        MixtureClient(2, network=nn.Flatten(), num_classes=CLASSES)


@pytest.mark.slow
def test_mixture_client_trains_without_a_loop_and_loads_from_a_checkpoint(tmp_path):
    L.seed_everything(0, verbose=False)
    module = MixtureClient(
        2,
        network="mlp",
        optimizer=lambda p: torch.optim.SGD(p, lr=0.1),
    )
    trainer = plain_trainer(tmp_path, rounds=8)
    trainer.fit(module, toy_data())

    assert float(trainer.callback_metrics["val_accuracy"]) > 0.8

    trainer.save_checkpoint(tmp_path / "m.ckpt")
    loaded = MixtureClient.load_from_checkpoint(tmp_path / "m.ckpt")
    loaded.eval()
    module.eval()
    x, _ = make_batch()
    assert torch.equal(loaded(x), module(x))

    weights = module.network.weights.tolist()
    assert loaded.network.weights.tolist() == weights
    assert weights != [0.5, 0.5]
