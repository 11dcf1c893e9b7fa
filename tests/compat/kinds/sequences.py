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


class LanguageModel(L.LightningModule):
    """Predicts the next token; a sample is a line of text and nothing else."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.block = nn.TransformerEncoderLayer(WIDTH, 2, 16, dropout=0.0, batch_first=True)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("mask", torch.full((LENGTH, LENGTH), -torch.inf).triu(1), persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        n = tokens.shape[1]
        return self.head(self.block(self.embedding(tokens), src_mask=self.mask[:n, :n]))

    def _loss(self, batch: Any) -> Tensor:
        (tokens,) = batch
        logits = self(tokens[:, :-1])
        return nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self._loss(batch)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self._loss(batch), batch_size=len(batch[0]))

    def configure_optimizers(self) -> Any:
        # Not Adam: the keys' bias has no gradient but rounding noise, of which Adam would make full steps.
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


def lines() -> Sets:
    start = torch.randint(0, VOCABULARY, (56, 1), generator=drawn())
    text = (start + torch.arange(LENGTH) * (1 + start % 2)) % VOCABULARY
    return Sets(TensorDataset(text[:44]), TensorDataset(text[44:]))


class Forecast(L.LightningModule):
    """An LSTM that goes through a series in pieces: the state goes on from piece to piece, its gradient does not."""

    def __init__(self, piece: int = 4) -> None:
        super().__init__()
        self.automatic_optimization, self.piece = False, piece
        torch.manual_seed(0)
        self.lstm, self.head = nn.LSTM(1, WIDTH, batch_first=True), nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor, state: Any = None) -> tuple[Tensor, Any]:
        out, state = self.lstm(x, state)
        return self.head(out), state

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        optimizer, state, total = self.optimizers(), None, torch.zeros(())
        for inputs, targets in zip(x.split(self.piece, 1), y.split(self.piece, 1)):
            out, state = self(inputs, state)
            loss = nn.functional.mse_loss(out, targets)
            optimizer.zero_grad()
            self.manual_backward(loss)
            self.clip_gradients(optimizer, gradient_clip_val=1.0, gradient_clip_algorithm="norm")
            optimizer.step()
            state = tuple(part.detach() for part in state)
            total = total + loss.detach()
        return total

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        x, y = batch
        self.log("val_loss", nn.functional.mse_loss(self(x)[0], y))

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=1e-2)


class Carried(L.LightningModule):
    """Carries a recurrent network's state from batch to batch, in an attribute, from the epoch's first batch on."""

    def __init__(self, network: type[nn.LSTM] | type[nn.GRU]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net, self.head = network(1, WIDTH, batch_first=True), nn.Linear(WIDTH, 1)
        self.state: Any = None

    def on_train_epoch_start(self) -> None:
        self.state = None

    def forward(self, x: Tensor, state: Any = None) -> tuple[Tensor, Any]:
        out, state = self.net(x, state)
        return self.head(out), state

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        out, state = self(x, self.state)
        self.state = tuple(part.detach() for part in state) if isinstance(state, tuple) else state.detach()
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
    "language-model": Kind(LanguageModel, lines),
    "forecasting": Kind(Forecast, series),
    "carried-lstm-state": Kind(lambda: Carried(nn.LSTM), series),
    "carried-gru-state": Kind(lambda: Carried(nn.GRU), series),
}
