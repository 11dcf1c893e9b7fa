"""CharacterModel: what it predicts, against sums by hand."""

import math
from functools import partial

import lightning as L
import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from flsv.models import CharacterModel

OPTIONS = {
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "accelerator": "cpu",
}


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


def test_a_checkpoint(tmp_path):
    model = CharacterModel(hidden=8, layers=2, scheduler=partial(torch.optim.lr_scheduler.StepLR, step_size=1))
    trainer = L.Trainer(max_epochs=1, default_root_dir=tmp_path, **OPTIONS)
    trainer.fit(model, loader())
    trainer.save_checkpoint(tmp_path / "it.ckpt")
    again = CharacterModel.load_from_checkpoint(tmp_path / "it.ckpt")
    text = torch.tensor([[1, 2, 3]])
    assert torch.equal(again(text), model(text))
