"""RegressorClient and CharacterModel alone, against sums by hand."""

from __future__ import annotations

import math
from functools import partial

import lightning as L
import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset
from toys import trainer_for

from flsv.errors import ConfigurationError
from flsv.models import CharacterModel, RegressorClient


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
    def command(data=None, **options):
        L.seed_everything(0)
        model = RegressorClient(**{"optimizer": partial(torch.optim.SGD, lr=0.05), **options})
        trainer = trainer_for(None, tmp_path, 1)
        trainer.fit(model, data or Lines())
        return trainer, model

    return command


def test_losses_are_means_over_samples(fitted):
    data = Lines()
    trainer, model = fitted()
    with torch.no_grad():
        error = (model(data.x) - data.y).double()
    logged = trainer.callback_metrics
    assert model.training_step((data.x, data.y), 0).item() == pytest.approx(logged["val_loss"].item(), rel=1e-5)
    assert logged["val_loss"].item() == pytest.approx(error.square().mean().item(), rel=1e-5)
    assert logged["val_mae"].item() == pytest.approx(error.abs().mean().item(), rel=1e-5)
    (tested,) = trainer.test(model, data, verbose=False)
    assert tested == pytest.approx({"test_loss": logged["val_loss"].item(), "test_mae": logged["val_mae"].item()})
    predicted = torch.cat(trainer.predict(model, data))
    torch.testing.assert_close(predicted, model(data.x).detach())


def test_refused(fitted):
    with pytest.raises(ConfigurationError, match=r"input_shape=\(3,\), but the data \(Lines\) has input_shape=\(4,\)"):
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
    trainer = trainer_for(None, tmp_path, 1)
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
    assert logged["val_loss"] == pytest.approx(model.training_step([batches.dataset.tensors[0]], 0).item(), rel=1e-5)
    (tested,) = trainer.test(model, batches, verbose=False)
    assert tested["test_loss"] == pytest.approx(logged["val_loss"])
    assert trainer.predict(model, batches)[0].shape == (3, 8, 256)
    text = torch.tensor([list(b"once upon")])
    changed = text.index_fill(1, torch.arange(5, 9), 33)
    assert torch.equal(model(text)[:, :5], model(changed)[:, :5])  # nothing looks ahead
