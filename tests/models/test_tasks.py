"""RegressorClient and CharacterModel alone, against scikit-learn and sums by hand."""

from __future__ import annotations

import math
from functools import partial

import lightning as L
import pytest
import torch
from sklearn.linear_model import LinearRegression
from torch.utils.data import DataLoader, TensorDataset

from flsv.errors import ConfigurationError
from flsv.models import CharacterModel, RegressorClient

OPTIONS = {
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "accelerator": "cpu",
}


class Lines(L.LightningDataModule):
    """y = x w + 3 and noise; 37 samples, so that the last batch is smaller."""

    def __init__(self, shape=(4,)):
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        x = torch.randn(37, 4, generator=generator)
        self.x, self.y = x, x @ torch.arange(4.0) + 3 + 0.1 * torch.randn(37, generator=generator)
        self.input_shape = shape

    def train_dataloader(self):
        return DataLoader(TensorDataset(self.x, self.y), batch_size=10)

    val_dataloader = test_dataloader = predict_dataloader = train_dataloader


@pytest.fixture
def fitted(tmp_path):
    def command(epochs=1, data=None, **options):
        L.seed_everything(0)
        model = RegressorClient(**{"optimizer": partial(torch.optim.SGD, lr=0.05), **options})
        trainer = L.Trainer(max_epochs=epochs, default_root_dir=tmp_path, **OPTIONS)
        trainer.fit(model, data or Lines())
        return trainer, model

    return command


def test_linear_regression_finds_the_least_squares(fitted):
    trainer, model = fitted(epochs=60)
    data = Lines()
    reference = LinearRegression().fit(data.x.numpy(), data.y.numpy())
    (layer,) = model.network
    torch.testing.assert_close(
        layer.weight.detach()[0].double(), torch.tensor(reference.coef_).double(), atol=0.02, rtol=0
    )
    assert layer.bias.item() == pytest.approx(reference.intercept_, abs=0.02)


def test_losses_are_means_over_samples(fitted):
    data = Lines()
    trainer, model = fitted()
    with torch.no_grad():
        error = (model(data.x) - data.y).double()
    logged = trainer.callback_metrics
    assert logged["val_loss"].item() == pytest.approx(error.square().mean().item(), rel=1e-5)
    assert logged["val_mae"].item() == pytest.approx(error.abs().mean().item(), rel=1e-5)
    (tested,) = trainer.test(model, data, verbose=False)
    assert tested == pytest.approx({"test_loss": logged["val_loss"].item(), "test_mae": logged["val_mae"].item()})
    predicted = torch.cat(trainer.predict(model, data))
    torch.testing.assert_close(predicted, model(data.x).detach())


def test_refused(fitted):
    with pytest.raises(ConfigurationError, match=r"input_shape=\(3,\), but the data have \(4,\)"):
        fitted(input_shape=(3,))
    with pytest.raises(ConfigurationError, match="input_shape is not known"):
        fitted(data=Lines(shape=None))
    with pytest.raises(ConfigurationError, match="has no network yet"):
        RegressorClient()(torch.rand(3, 4))
    model = RegressorClient(input_shape=(4,))
    for y in (torch.rand(3, 1), torch.rand(1)):  # would be broadcast
        with pytest.raises(ConfigurationError, match=r"one number per sample was expected, \[3\]"):
            model.training_step((torch.rand(3, 4), y), 0)


def loader(text=b"abcdefgh" * 8, length=7, batch_size=3):
    pieces = torch.tensor([list(text[at : at + length + 1]) for at in range(0, len(text) - length, length)])
    return DataLoader(TensorDataset(pieces), batch_size=batch_size)


def test_the_first_predict_the_following(tmp_path):
    model = CharacterModel(width=4, hidden=8)
    batches = loader()
    trainer = L.Trainer(default_root_dir=tmp_path, **OPTIONS)
    trainer.validate(model, batches, verbose=False)
    losses, hits = [], []
    with torch.no_grad():
        for (pieces,) in batches:
            for piece in pieces:
                for end in range(1, 8):  # one character at a time
                    logits = model(piece[None, :end])[0, -1].double()
                    losses.append(-logits.log_softmax(0)[piece[end]].item())
                    hits.append(int(logits.argmax()) == int(piece[end]))
    logged = {name: value.item() for name, value in trainer.callback_metrics.items()}
    assert logged["val_loss"] == pytest.approx(sum(losses) / len(losses), rel=1e-5)
    assert logged["val_bits_per_character"] == pytest.approx(logged["val_loss"] / math.log(2), rel=1e-5)
    assert logged["val_accuracy"] == pytest.approx(sum(hits) / len(hits))


def test_no_character_looks_ahead():
    model = CharacterModel(hidden=8)
    text = torch.tensor([list(b"once upon")])
    changed = text.clone()
    changed[0, 5:] = 33
    assert torch.equal(model(text)[:, :5], model(changed)[:, :5])


def test_it_learns_the_alphabet(tmp_path):
    L.seed_everything(0)
    model = CharacterModel(width=8, hidden=16, optimizer=partial(torch.optim.Adam, lr=0.05))
    trainer = L.Trainer(max_epochs=8, default_root_dir=tmp_path, **OPTIONS)
    trainer.fit(model, loader(), loader())
    validated = {name: value.item() for name, value in trainer.callback_metrics.items()}
    assert validated["val_accuracy"] > 0.95
    (tested,) = trainer.test(model, loader(), verbose=False)
    assert tested["test_loss"] == pytest.approx(validated["val_loss"])
    (first, *_) = trainer.predict(model, loader())
    assert first.shape == (3, 8, 256)
    assert chr(first[0, 2].argmax()) == "d"
