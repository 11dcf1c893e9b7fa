"""A language model of characters: a recurrent network that predicts the next one.

McMahan et al., "Communication-Efficient Learning of Deep Networks from Decentralized Data", AISTATS 2017, section 3:
"The model takes a series of characters as input and embeds each of these into a learned 8 dimensional space. The
embedded characters are then processed through 2 LSTM layers, each with 256 nodes. Finally the output of the second LSTM
layer is sent to a softmax output layer with one node per character." Here: gated recurrent units, sizes as asked for,
and characters are bytes of UTF-8.
"""

from __future__ import annotations

import math
from typing import Any

import lightning as L
import torch
import torch.nn.functional as F
from lightning.pytorch.cli import LRSchedulerCallable, OptimizerCallable
from torch import Tensor, nn

from flsv.arguments import check_number
from flsv.models.packaged import optimizer_and_scheduler


class CharacterModel(L.LightningModule):
    """Embedding, gated recurrent units, linear layer; a client for :class:`flsv.data.CharacterData`.

    Batches are ``(characters int64 [B, L + 1],)``: the first L predict the last L. ``training_step`` returns the mean
    cross-entropy per character in nats; validation and test log it as ``val_loss``, in bits as
    ``val_bits_per_character``, and ``val_accuracy``, the share of characters predicted, or ``test_...``.

    Args:
        width: length of a character's vector.
        hidden: units of a recurrent layer.
        layers: recurrent layers.
        characters: how many there are; 256 for bytes.
        optimizer: from the parameters to an optimizer. In YAML, ``class_path`` and ``init_args``.
        scheduler: from the optimizer to a learning-rate scheduler, stepped once an epoch. None: constant rate.

    Raises:
        ConfigurationError: a size below 1.

    Example:
        >>> model = CharacterModel(hidden=16)
        >>> model(torch.tensor([list(b"once upon a")])).shape
        torch.Size([1, 11, 256])
    """

    def __init__(
        self,
        width: int = 32,
        hidden: int = 128,
        layers: int = 1,
        characters: int = 256,
        optimizer: OptimizerCallable = lambda params: torch.optim.Adam(params, lr=0.002),
        scheduler: LRSchedulerCallable | None = None,
    ) -> None:
        super().__init__()
        for name, size in (("width", width), ("hidden", hidden), ("layers", layers), ("characters", characters)):
            check_number(self, name, size, least=1, whole=True)
        self.save_hyperparameters("width", "hidden", "layers", "characters")
        self._make_optimizer, self._make_scheduler = optimizer, scheduler
        self.embedding = nn.Embedding(characters, width)
        self.recurrent = nn.GRU(width, hidden, layers, batch_first=True)
        self.head = nn.Linear(hidden, characters)

    def forward(self, characters: Tensor) -> Tensor:
        """Logits ``[B, L, characters]`` of the character after each of ``[B, L]``."""
        return self.head(self.recurrent(self.embedding(characters))[0])

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        """Mean cross-entropy per character, a scalar."""
        return self._predicted(batch)[0]

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        """Log ``val_loss``, ``val_bits_per_character`` and ``val_accuracy``."""
        self._log_scores("val", batch)

    def test_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        """Log the same of the test data."""
        self._log_scores("test", batch)

    def predict_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Tensor:
        """Probabilities ``[B, L + 1, characters]`` of the character after each."""
        return self(batch[0] if isinstance(batch, (tuple, list)) else batch).softmax(-1)

    def configure_optimizers(self) -> Any:
        """The optimizer over all parameters and, if there is one, the scheduler."""
        optimizer, scheduler = optimizer_and_scheduler(self._make_optimizer, self._make_scheduler, self.parameters())
        return optimizer if scheduler is None else ([optimizer], [scheduler])

    def _predicted(self, batch: Any) -> tuple[Tensor, Tensor]:
        """The loss, and the share of characters predicted."""
        pieces = batch[0] if isinstance(batch, (tuple, list)) else batch
        logits, following = self(pieces[:, :-1]).flatten(0, 1), pieces[:, 1:].flatten()
        return F.cross_entropy(logits.float(), following), (logits.argmax(1) == following).float().mean()

    def _log_scores(self, stage: str, batch: Any) -> None:
        loss, accuracy = self._predicted(batch)
        values = {"loss": loss, "bits_per_character": loss / math.log(2), "accuracy": accuracy}
        size = len(batch[0] if isinstance(batch, (tuple, list)) else batch)
        self.log_dict({f"{stage}_{name}": value for name, value in values.items()}, batch_size=size)
