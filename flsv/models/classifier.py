"""ClassifierClient, a ready-made LightningModule around any classifier, and its base class.

Both can also be trained alone. In a federation they are treated like a user's own module.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from copy import deepcopy
from typing import Any, Literal

import lightning as L
import torch
import torch.nn.functional as F
from lightning.pytorch.cli import LRSchedulerCallable, OptimizerCallable
from torch import Tensor, nn
from torch.optim.lr_scheduler import ReduceLROnPlateau

from flsv._lightning.data_source import data_of
from flsv._lightning.private import trainer_of
from flsv.models.factory import build_network, network_maker
from flsv.models.linear import Classes, check_output
from flsv.scores.class_scores import EpochScores
from flsv.utilities.declared import Positive, Share, check_argument, check_arguments
from flsv.utilities.errors import ConfigurationError, need_classes


def datamodule_of(module: L.LightningModule) -> Any:
    """Return the data module of the module's trainer, or None without a trainer."""
    trainer = trainer_of(module)
    return None if trainer is None else data_of(trainer)


def balanced_weights(datamodule: Any, num_classes: int) -> Tensor:
    """Compute balanced class weights N / (M N_c), float32 ``[M]``. The weight is 1 if a class has no samples."""
    counts = getattr(datamodule, "known_class_counts", None)
    if counts is None or counts.shape[1] != num_classes:
        raise ConfigurationError(
            f"ClassifierClient(class_weights='balanced') needs the number of all clients' samples of each class, but "
            f"{type(datamodule).__name__} does not know it. Set class_weights to {num_classes} numbers, the same at "
            "all clients."
        )
    counts = counts.sum(0).double()
    weights = counts.sum() / (num_classes * counts)
    return torch.where(counts > 0, weights, 1.0).float()


def _check_module(module: Any, network_args: dict[str, Any] | None) -> None:
    check_argument("ClassifierClient", "network", module, nn.Module | None)
    if module is not None and network_args:
        raise ConfigurationError(
            "ClassifierClient: network_args are for networks given by name, but network is a module. Remove them."
        )


class ReadyClient(L.LightningModule):
    """Base class of ready-made LightningModules, with validation, test and optimizer."""

    _make_optimizer: OptimizerCallable
    _make_scheduler: LRSchedulerCallable | None
    _scheduler_interval = "epoch"

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self._score("val", batch)

    def test_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self._score("test", batch)

    def configure_optimizers(self) -> Any:
        """Return the optimizer of all parameters and, if configured, the scheduler."""
        optimizer = self._make_optimizer(self.parameters())
        if self._make_scheduler is None:
            return optimizer
        scheduler = self._make_scheduler(optimizer)
        config: dict[str, Any] = {"scheduler": scheduler, "interval": self._scheduler_interval}
        if isinstance(scheduler, ReduceLROnPlateau):
            config["monitor"] = getattr(scheduler, "monitor", "val_loss")
        return {"optimizer": optimizer, "lr_scheduler": config}

    @abstractmethod
    def _score(self, stage: str, batch: Any) -> None: ...


class NotBuilt(nn.Module):
    """Placeholder for a network until classes and input shape are known."""

    def forward(self, x: Tensor) -> Tensor:
        raise ConfigurationError(
            "The client has no network before training starts, when it is built for the data module's classes and "
            "shape. To use it earlier, set num_classes and input_shape."
        )


class ClassifierClient(ReadyClient):
    """LightningModule that trains any classifier with cross-entropy.

    Batches are ``(x [B, *input_shape], y int64 [B])``. ``training_step`` returns the mean cross-entropy and logs
    nothing. Validation logs, once an epoch and over all dataloaders, ``val_loss``, ``val_accuracy`` (share of samples),
    ``val_balanced_accuracy`` (mean recall over the classes that occur) and, for up to 100 classes, ``val_auroc`` (of
    each class against the other classes, averaged over the classes that occur). The test logs the same as ``test_...``.
    The logged loss includes label smoothing and class weights, as in training. ``predict_step`` returns probabilities
    ``[B, M]`` in single precision or better.

    The network is built at construction if its name, number of classes and input shape are known. Otherwise it is built
    in ``configure_model``, after the data module's ``setup`` and before a checkpoint is restored. Number of classes and
    input shape are saved with the hyper-parameters, so ``ClassifierClient.load_from_checkpoint(path)`` needs no data
    module. Optimizer and scheduler are saved if they come from YAML, but not if they are Python callables. A network
    object is not saved: use ``load_from_checkpoint(path, network=...)``.

    Args:
        network: name of a network for :func:`flsv.models.build_network`, or any module that returns logits ``[B, M]``.
        network_args: options of the network if it is given by name.
        num_classes: number of classes M. None: the data module's ``num_classes``.
        input_shape: shape of one sample without the batch. None: the data module's ``input_shape``.
        optimizer: function that returns an optimizer of the parameters. In YAML: ``class_path`` and ``init_args``. The
            learning rate is 0.01 unless it is set there.
        scheduler: function that returns a learning-rate scheduler of the optimizer. None: constant learning rate.
            ``ReduceLROnPlateau`` monitors ``val_loss``, or the value that its option ``monitor`` names.
        scheduler_interval: whether the scheduler steps after every ``"epoch"`` (every round in a federation) or after
            every batch (``"step"``).
        label_smoothing: label smoothing in [0, 1], as in :class:`torch.nn.CrossEntropyLoss`.
        class_weights: positive weight of each class in the loss. None: all 1. ``"balanced"``: (1 / M) / (the class's
            share of all clients' training samples), as in scikit-learn. A coalition is trained with the weights of
            its members' samples, and its logged loss has the weights of all clients' samples.

    Raises:
        ConfigurationError: the network is unknown, the number of classes or the shape is missing or contradicts the
            data module or the network, or an option is wrong. At construction or, if this depends on the data module,
            before training starts.

    Example:
        >>> client = ClassifierClient("lenet5", {"padding": 2}, num_classes=10, input_shape=(1, 8, 8))
        >>> client(torch.rand(5, 1, 8, 8)).shape
        torch.Size([5, 10])
        >>> client.training_step((torch.rand(5, 1, 8, 8), torch.arange(5)), 0).shape
        torch.Size([])
    """

    class_weights: Tensor | None

    def __init__(
        self,
        network: str | nn.Module = "lenet5",
        network_args: dict[str, Any] | None = None,
        num_classes: int | None = None,
        input_shape: tuple[int, ...] | None = None,
        optimizer: OptimizerCallable = lambda params: torch.optim.SGD(params, lr=0.01),
        scheduler: LRSchedulerCallable | None = None,
        scheduler_interval: Literal["epoch", "step"] = "epoch",
        label_smoothing: Share = 0.0,
        class_weights: Literal["balanced"] | list[Positive] | None = None,
    ) -> None:
        super().__init__()
        module = None if isinstance(network, str) else network
        network_name = self._checked_name(network)  # hyper-parameters hold plain types only

        # save_hyperparameters reads plain Python values from these names.
        arguments = check_arguments("ClassifierClient", ClassifierClient.__init__, locals())
        num_classes = arguments["num_classes"]
        input_shape = arguments["input_shape"]
        scheduler_interval = arguments["scheduler_interval"]
        label_smoothing = arguments["label_smoothing"]
        class_weights = arguments["class_weights"]
        self.is_balanced = isinstance(class_weights, str)
        if class_weights is not None and not isinstance(class_weights, str):
            class_weights = [float(weight) for weight in class_weights]
        _check_module(module, network_args)

        self.save_hyperparameters(ignore=["network", "optimizer", "scheduler"])
        if "_instantiator" in self.hparams:
            # Built from YAML: Lightning saves the configuration, in which these three are plain types, too.
            self.save_hyperparameters()
        else:
            self._add_hyperparameters(network=network_name, class_weights=class_weights)

        self._network_name = network_name
        self._network_args = dict(network_args or {})
        self._make_optimizer = optimizer
        self._make_scheduler = scheduler
        self._scheduler_interval = scheduler_interval
        self._label_smoothing = label_smoothing
        weights = None
        if isinstance(class_weights, list):
            weights = torch.tensor(class_weights)
        self.register_buffer("class_weights", weights, persistent=False)

        # `configure_model` builds the network if only the data module knows its classes, shape or class weights.
        self._num_classes = num_classes
        self._input_shape = None if input_shape is None else tuple(input_shape)
        self.network: nn.Module = NotBuilt() if module is None else module
        can_build = module is not None or input_shape is not None
        if num_classes is not None and can_build and not self.is_balanced:
            self._build(num_classes, self._input_shape)

    def _checked_name(self, network: str | nn.Module) -> str:
        if not isinstance(network, str):
            return f"{type(network).__module__}.{type(network).__qualname__}"
        # A subclass with networks of its own knows their names.
        if type(self)._make_network.__module__.startswith("flsv."):
            network_maker(network)
        return network

    def configure_model(self) -> None:
        """Build the network, and check that classes and input shape are those of the data module."""
        datamodule = datamodule_of(self)
        no_classes = getattr(datamodule, "no_classes", None)
        if no_classes is not None:
            raise need_classes(
                "ClassifierClient learns classes", no_classes, "train a LightningModule of your own"
            )
        num_classes = agreed_with_data("num_classes", self._num_classes, datamodule)
        input_shape = agreed_with_data("input_shape", self._input_shape, datamodule)
        if self.is_balanced and num_classes is not None:
            self.class_weights = balanced_weights(datamodule, num_classes)
            self._add_hyperparameters(class_weights=self.class_weights.tolist())

        needs_shape = isinstance(self.network, NotBuilt)
        if num_classes is None or (needs_shape and input_shape is None):
            missing = "num_classes" if num_classes is None else "input_shape"
            raise ConfigurationError(
                f"ClassifierClient: {missing} is not known. Set it (such as num_classes=10, input_shape=(1, 28, 28)), "
                f"or train with a data module that has the attribute {missing} after its setup()."
            )

        is_changed = (num_classes, input_shape) != (self._num_classes, self._input_shape)
        if needs_shape or is_changed:
            self._build(num_classes, input_shape)

    @contextmanager
    def weighing_for_all(self) -> Iterator[None]:
        """Weigh classes by all clients' samples, so that the losses of coalitions' models can be compared."""
        if not self.is_balanced:
            yield
            return

        weights_in_training = self.class_weights
        self.class_weights = self._weights_of(members=None)  # of every client
        try:
            yield
        finally:
            self.class_weights = weights_in_training

    def constants_of(self, coalitions: Sequence[Sequence[int]]) -> dict[str, Tensor]:
        """Return the tensors of the module that training reads and that differ between K coalitions of clients, as
        ``{name: tensor [K, ...]}``: the class weights if they are balanced.
        """
        if not self.is_balanced:
            return {}
        return {"class_weights": torch.stack(list(map(self._weights_of, coalitions)))}

    def _weights_of(self, members: Sequence[int] | None) -> Tensor:
        """Compute balanced class weights ``[M]`` by the samples of some clients, of None by those of all."""
        datamodule = datamodule_of(self)
        assert self.class_weights is not None
        with datamodule.counting(members):
            return balanced_weights(datamodule, len(self.class_weights)).to(self.class_weights)

    def _build(self, num_classes: int, input_shape: tuple[int, ...] | None) -> None:
        """Build the network, or check an existing one's output, and create the scores."""
        check_argument("ClassifierClient", "num_classes", num_classes, Classes)
        if isinstance(self.network, NotBuilt):
            assert input_shape is not None
            # Build it on the CPU, not on Lightning's device, so that a seed gives the same weights everywhere.
            with torch.device("cpu"):
                self.network = self._make_network(num_classes, input_shape)
        elif input_shape is not None:
            check_output(self.network, type(self.network).__name__, num_classes, input_shape)
        self.val_scores = EpochScores(num_classes)
        self.test_scores = EpochScores(num_classes)
        self._num_classes = num_classes
        self._input_shape = input_shape
        plain_shape = None if input_shape is None else list(input_shape)
        self._add_hyperparameters(num_classes=num_classes, input_shape=plain_shape)

    def _make_network(self, num_classes: int, input_shape: tuple[int, ...]) -> nn.Module:
        return build_network(self._network_name, num_classes, input_shape, **self._network_args)

    def _add_hyperparameters(self, **plain: Any) -> None:
        self.hparams.update(plain)
        # Loggers write this copy, which Lightning makes at construction. save_hyperparameters(plain) would update it,
        # too, but compares `plain` to the arguments of every module's __init__ on the stack, including arrays.
        self._hparams_initial = deepcopy(self.hparams)

    def forward(self, x: Tensor) -> Tensor:
        """Compute logits ``[B, M]`` of a batch ``[B, *input_shape]``."""
        return self.network(x)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        """Return the mean cross-entropy of the batch, a scalar."""
        # Nothing is logged: self.log takes longer than the step of a small network. The loop averages the returned
        # losses.
        x, y = batch[0], batch[1]
        return self._loss(self(x), y)

    def on_validation_epoch_start(self) -> None:
        """Reset the scores, which may hold batches of an interrupted validation."""
        self.val_scores.reset()

    def on_test_epoch_start(self) -> None:
        """Reset the scores, which may hold batches of an interrupted test."""
        self.test_scores.reset()

    def on_validation_epoch_end(self) -> None:
        """Log ``val_loss``, ``val_accuracy``, ``val_balanced_accuracy`` and, if it is defined, ``val_auroc``."""
        self._log_scores("val")

    def on_test_epoch_end(self) -> None:
        """Log ``test_loss``, ``test_accuracy``, ``test_balanced_accuracy`` and, if it is defined, ``test_auroc``."""
        self._log_scores("test")

    def predict_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Tensor:
        """Return class probabilities ``[B, M]`` for a batch, whose labels, if any, are ignored."""
        x = batch
        if isinstance(batch, (tuple, list)):
            x = batch[0]
        logits = _at_least_float32(self(x))
        return logits.softmax(dim=1)

    def _loss(self, logits: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(
            _at_least_float32(logits),
            y,
            weight=self.class_weights,
            label_smoothing=self._label_smoothing,
        )

    def _score(self, stage: str, batch: tuple[Tensor, Tensor]) -> None:
        x, y = batch
        logits = self(x)
        # A batch's loss is divided by the sum of its samples' weights, which is its weight in the epoch's mean.
        weight_of_batch: Tensor | int
        if self.class_weights is None:
            weight_of_batch = len(y)
        else:
            weight_of_batch = self.class_weights[y].sum()
        loss = self._loss(logits, y)
        self._scores(stage).update(logits, y, loss, weight_of_batch)

    def _scores(self, stage: str) -> EpochScores:
        if stage == "val":
            return self.val_scores
        return self.test_scores

    def _log_scores(self, stage: str) -> None:
        scores = self._scores(stage)
        for name, value in scores.compute().items():
            is_shown = stage == "val" and name == "accuracy"
            self.log(f"{stage}_{name}", value, prog_bar=is_shown)
        scores.reset()


def agreed_with_data(name: str, value: Any, datamodule: Any) -> Any:
    """Return ``value``, or the data module's attribute ``name`` if ``value`` is None. They must not differ."""
    value_of_data = getattr(datamodule, name, None)
    if value_of_data is None:
        return value
    if name == "input_shape":
        value_of_data = tuple(int(size) for size in value_of_data)
    else:
        value_of_data = int(value_of_data)

    if value is None:
        return value_of_data
    if value != value_of_data:
        raise ConfigurationError(
            f"The model has {name}={value}, but the data ({type(datamodule).__name__}) has {name}={value_of_data}. "
            f"Remove the model's {name}, so that it is taken from the data."
        )
    return value


def _at_least_float32(logits: Tensor) -> Tensor:
    """Convert half-precision logits to float32, since log-sum-exp in bfloat16 errs in the second digit."""
    if logits.dtype in (torch.bfloat16, torch.float16):
        return logits.float()
    return logits
