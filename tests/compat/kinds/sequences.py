"""Language, and other sequences."""

from __future__ import annotations

from typing import Any

import lightning as L
import torch
from compat.kinds.base import Items, Kind, Sets, drawn
from torch import Tensor, nn
from torch.utils.data import TensorDataset

VOCABULARY, WIDTH, LENGTH = 11, 8, 6


class GLUE(L.LightningModule):
    """As Lightning's text-classification example: batches are dictionaries, the rate rises and falls per step."""

    def __init__(self, warmup: int = 2) -> None:
        super().__init__()
        self.save_hyperparameters()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(VOCABULARY, WIDTH, padding_idx=0)
        self.encoder = nn.TransformerEncoderLayer(WIDTH, 2, 16, dropout=0.1, batch_first=True)
        self.classifier = nn.Linear(WIDTH, 2)
        self.outputs: list[dict[str, Tensor]] = []

    def forward(self, input_ids: Tensor, attention_mask: Tensor, labels: Tensor | None = None) -> Any:
        hidden = self.encoder(self.embedding(input_ids), src_key_padding_mask=attention_mask == 0)
        logits = self.classifier(hidden[:, 0])
        return (None if labels is None else nn.functional.cross_entropy(logits, labels)), logits

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self(**batch)[0]

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        loss, logits = self(**batch)
        self.outputs.append({"loss": loss, "preds": logits.argmax(1), "labels": batch["labels"]})

    def on_validation_epoch_end(self) -> None:
        right = torch.cat([each["preds"] == each["labels"] for each in self.outputs])
        loss = torch.stack([each["loss"] for each in self.outputs]).mean()
        self.outputs.clear()
        self.log("val_loss", loss, prog_bar=True)
        self.log("val_acc", right.float().mean(), prog_bar=True)

    def configure_optimizers(self) -> Any:
        decayed = [p for n, p in self.named_parameters() if "bias" not in n and "norm" not in n]
        others = [p for n, p in self.named_parameters() if "bias" in n or "norm" in n]
        groups = [{"params": decayed, "weight_decay": 0.01}, {"params": others, "weight_decay": 0.0}]
        optimizer = torch.optim.AdamW(groups, lr=1e-2, eps=1e-6)
        total, warmup = self.trainer.estimated_stepping_batches, self.hparams.warmup

        def rate(step: int) -> float:
            return step / warmup if step < warmup else max(0.0, (total - step) / max(1, total - warmup))

        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, rate)
        return [optimizer], [{"scheduler": scheduler, "interval": "step", "frequency": 1}]


def sentences() -> Sets:
    generator = drawn()
    items = []
    for _ in range(56):
        length = int(torch.randint(3, LENGTH + 1, (), generator=generator))
        ids = torch.zeros(LENGTH, dtype=torch.long)
        ids[:length] = torch.randint(1, VOCABULARY, (length,), generator=generator)
        items.append({"input_ids": ids, "attention_mask": (ids > 0).long(), "labels": (ids[1] > 5).long()})
    return Sets(Items(items[:44]), Items(items[44:]))


class Carried(L.LightningModule):
    """Carries a recurrent network's state from batch to batch, in an attribute, from the epoch's first batch on."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net, self.head = nn.LSTM(1, WIDTH, batch_first=True), nn.Linear(WIDTH, 1)
        self.state: Any = None

    def on_train_epoch_start(self) -> None:
        self.state = None

    def forward(self, x: Tensor, state: Any = None) -> tuple[Tensor, Any]:
        out, state = self.net(x, state)
        return self.head(out), state

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        out, state = self(x, self.state)
        self.state = tuple(part.detach() for part in state)
        return nn.functional.mse_loss(out, y)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        x, y = batch
        self.log("val_loss", nn.functional.mse_loss(self(x)[0], y))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def series() -> Sets:
    """32 and 16 training samples, so that all batches are full: a carried state has the batch's size."""
    phase = torch.rand(60, 1, generator=drawn())
    wave = torch.sin(6 * (phase + torch.arange(13) / 13))[..., None]
    pairs = TensorDataset(wave[:, :-1], wave[:, 1:])
    return Sets(TensorDataset(*pairs[:48]), TensorDataset(*pairs[48:]))


KINDS = {
    # In double precision, or Adam makes steps of the rounding noise that the keys' bias has for a gradient.
    "glue": Kind(GLUE, sentences, trainer={"precision": "64-true"}, tolerance=1e-9),
    "carried-lstm-state": Kind(Carried, series),
}
