"""LightningModules for regression and for running text."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from lightning.pytorch.cli import LRSchedulerCallable, OptimizerCallable
from torch import Tensor, nn

from flsv.models.classifier import NotBuilt, ReadyClient, agreed_with_data, datamodule_of
from flsv.models.linear import dense_stack, flat_size
from flsv.utilities.declared import Count, check_arguments
from flsv.utilities.errors import ConfigurationError


class RegressorClient(ReadyClient):
    """LightningModule for regression by a linear model or multi-layer perceptron.

    Batches are ``(x [B, *input_shape], y [B])``. ``training_step`` returns the mean squared error. Validation logs
    ``val_loss`` (the mean squared error) and ``val_mae`` (the mean absolute error, in the target's unit). The test logs
    the same as ``test_...``. ``predict_step`` returns predictions ``[B]``.

    The network is built at construction if ``input_shape`` is given. Otherwise it is built in ``configure_model`` from
    the data module's ``input_shape``. The shape is saved with the hyper-parameters, so ``load_from_checkpoint(path)``
    needs no data module. Optimizer and scheduler are not saved.

    Args:
        hidden: width of each hidden layer, or empty for linear regression.
        input_shape: shape of one sample without the batch. None: the data module's ``input_shape``.
        optimizer: function that returns an optimizer of the parameters. In YAML: ``class_path`` and ``init_args``.
        scheduler: function that returns a learning-rate scheduler of the optimizer, stepped once an epoch. None:
            constant learning rate.

    Raises:
        ConfigurationError: the shape is missing, invalid or contradicts the data module, or a batch does not have one
            target number per sample.

    Example:
        >>> client = RegressorClient([16], input_shape=(5,))
        >>> client(torch.rand(3, 5)).shape
        torch.Size([3])
    """

    def __init__(
        self,
        hidden: list[Count] | None = None,
        input_shape: tuple[int, ...] | None = None,
        optimizer: OptimizerCallable = lambda params: torch.optim.SGD(params, lr=0.01),
        scheduler: LRSchedulerCallable | None = None,
    ) -> None:
        super().__init__()
        # The same arguments as plain values, in the order of the parameters.
        checked = check_arguments("RegressorClient", RegressorClient.__init__, locals())
        hidden, input_shape = checked.values()
        self.save_hyperparameters("hidden", "input_shape")
        self._hidden = list(hidden or [])
        self._make_optimizer = optimizer
        self._make_scheduler = scheduler
        self.network: nn.Module = NotBuilt()
        if input_shape is not None:
            self._build(input_shape)

    def configure_model(self) -> None:
        """Build the network, and check that the input shape is that of the data module."""
        configured_shape = self.hparams["input_shape"]
        if configured_shape is not None:
            configured_shape = tuple(configured_shape)
        shape = agreed_with_data("input_shape", configured_shape, datamodule_of(self))
        if shape is None:
            raise ConfigurationError(
                "RegressorClient: input_shape is not known. Set it (such as input_shape=(12,)), or train with a data "
                "module that has the attribute input_shape after its setup()."
            )
        if isinstance(self.network, NotBuilt):
            self._build(shape)

    def _build(self, input_shape: Sequence[int]) -> None:
        num_inputs = flat_size("RegressorClient", input_shape)
        # Build it on the CPU, not on Lightning's device, so that a seed gives the same weights everywhere.
        with torch.device("cpu"):
            self.network = dense_stack([num_inputs, *self._hidden, 1])
        self.hparams["input_shape"] = [int(size) for size in input_shape]

    def forward(self, x: Tensor) -> Tensor:
        """Compute predictions ``[B]`` of a batch ``[B, *input_shape]``."""
        return self.network(x.flatten(1)).squeeze(1)

    def training_step(
        self,
        batch: tuple[Tensor, Tensor],
        batch_idx: int,
    ) -> Tensor:
        """Return the mean squared error of the batch, a scalar."""
        predicted, y = self._predictions_and_targets(batch)
        return F.mse_loss(predicted, y)

    def predict_step(
        self,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> Tensor:
        """Return predictions ``[B]`` for a batch, whose targets, if any, are ignored."""
        return self(_inputs_of(batch))

    def _predictions_and_targets(
        self,
        batch: Sequence[Tensor],
    ) -> tuple[Tensor, Tensor]:
        x = batch[0]  # further fields may follow the targets
        y = batch[1]
        predicted = self(x)
        if y.shape != predicted.shape:  # the loss would broadcast them to [B, B]
            raise ConfigurationError(
                f"RegressorClient: targets have shape {list(y.shape)}, but one number per sample was expected, "
                f"{list(predicted.shape)}."
            )
        return predicted, y.to(predicted.dtype)

    def _score(self, stage: str, batch: tuple[Tensor, Tensor]) -> None:
        predicted, y = self._predictions_and_targets(batch)
        values = {
            f"{stage}_loss": F.mse_loss(predicted, y),
            f"{stage}_mae": F.l1_loss(predicted, y),
        }
        self.log_dict(values, batch_size=len(y))


#: Number of different characters, which are bytes.
NUM_CHARACTERS = 256


class CharacterModel(ReadyClient):
    """LightningModule of a character-level language model: embedding, gated recurrent units, linear layer.

    Its data are :class:`flsv.tables.CharacterData`. McMahan et al., "Communication-Efficient Learning of Deep Networks
    from Decentralized Data", AISTATS 2017, section 3: "The model takes a series of characters as input and embeds each
    of these into a learned 8 dimensional space. The embedded characters are then processed through 2 LSTM layers, each
    with 256 nodes. Finally the output of the second LSTM layer is sent to a softmax output layer with one node per
    character." Here a layer of gated recurrent units is the only one, its sizes are arguments, and characters are bytes
    of UTF-8.

    Batches are ``(characters int64 [B, L + 1],)``: the first L characters predict the last L. ``training_step`` returns
    the mean cross-entropy per character in nats. Validation logs it as ``val_loss``, and in bits as
    ``val_bits_per_character``. It also logs ``val_accuracy``, the share of characters predicted correctly. The test
    logs the same as ``test_...``.

    Args:
        width: length of the vector that embeds a character.
        hidden: number of units of the recurrent layer.
        optimizer: function that returns an optimizer of the parameters. In YAML: ``class_path`` and ``init_args``.
        scheduler: function that returns a learning-rate scheduler of the optimizer, stepped once an epoch. None:
            constant learning rate.

    Raises:
        ConfigurationError: a size is below 1.

    Example:
        >>> model = CharacterModel(hidden=16)
        >>> model(torch.tensor([list(b"once upon a")])).shape
        torch.Size([1, 11, 256])
    """

    def __init__(
        self,
        width: Count = 32,
        hidden: Count = 128,
        optimizer: OptimizerCallable = lambda params: torch.optim.Adam(params, lr=0.002),
        scheduler: LRSchedulerCallable | None = None,
    ) -> None:
        super().__init__()
        # The same arguments as plain values, in the order of the parameters.
        checked = check_arguments("CharacterModel", CharacterModel.__init__, locals())
        width, hidden = checked.values()
        self.save_hyperparameters("width", "hidden")
        self._make_optimizer = optimizer
        self._make_scheduler = scheduler
        self.embedding = nn.Embedding(NUM_CHARACTERS, width)
        self.recurrent = nn.GRU(width, hidden, batch_first=True)
        self.head = nn.Linear(hidden, NUM_CHARACTERS)

    def forward(self, characters: Tensor) -> Tensor:
        """Compute logits ``[B, L, characters]`` of the character that follows each of the characters ``[B, L]``."""
        embedded = self.embedding(characters)
        hidden, _ = self.recurrent(embedded)
        return self.head(hidden)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        """Return the mean cross-entropy per character in nats, a scalar."""
        loss, _ = self._loss_and_accuracy(batch)
        return loss

    def predict_step(
        self,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> Tensor:
        """Return probabilities ``[B, L + 1, characters]`` of the character that follows each character of a batch."""
        logits = self(_inputs_of(batch))
        return logits.softmax(-1)

    def _loss_and_accuracy(self, batch: Any) -> tuple[Tensor, Tensor]:
        """Return the mean loss per character, and the share of characters predicted correctly."""
        characters = _inputs_of(batch)  # [B, L]
        logits = self(characters[:, :-1])  # [B, L - 1, M]
        logits = logits.flatten(0, 1)
        next_characters = characters[:, 1:].flatten()
        loss = F.cross_entropy(logits.float(), next_characters)
        is_right = logits.argmax(1) == next_characters
        return loss, is_right.float().mean()

    def _score(self, stage: str, batch: Any) -> None:
        loss, accuracy = self._loss_and_accuracy(batch)
        values = {
            f"{stage}_loss": loss,
            f"{stage}_bits_per_character": loss / math.log(2),
            f"{stage}_accuracy": accuracy,
        }
        self.log_dict(values, batch_size=len(_inputs_of(batch)))


def _inputs_of(batch: Any) -> Any:
    if isinstance(batch, (tuple, list)):
        return batch[0]
    return batch
