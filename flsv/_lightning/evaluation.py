"""Evaluation of models within a fit, and Lightning's validation without side effects on the fit's trainer.

During validation a module reads its trainer, logs to it, and gets its batches from it. Therefore the module gets a
shallow copy of the trainer, with its own validation loop, results and strategy, until
:func:`flsv.games.lent_module.lent` restores the fit's.
"""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import islice
from typing import Any

import lightning as L
import torch
from lightning.fabric.utilities import move_data_to_device
from lightning.fabric.utilities.data import sized_len
from lightning.pytorch.loggers.logger import DummyLogger
from lightning.pytorch.loops.evaluation_loop import _EvaluationLoop
from lightning.pytorch.profilers import PassThroughProfiler
from lightning.pytorch.trainer.connectors.data_connector import _DataHookSelector, _DataLoaderSource
from lightning.pytorch.trainer.connectors.logger_connector import _LoggerConnector
from lightning.pytorch.trainer.states import RunningStage, TrainerFn
from lightning.pytorch.utilities import CombinedLoader
from lightning.pytorch.utilities.data import extract_batch_size
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor, nn
from torchmetrics import Metric

from flsv.core import ALONE
from flsv.utilities.errors import ConfigurationError


def on_device(
    trainer: L.Trainer, batches: Iterable[Any], dataloader_idx: int = 0
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the batches ``(x, y)`` as validation gets them, on the module's device."""
    for batch in batches:
        with validating(trainer):
            batch = as_given(trainer, batch, dataloader_idx)
        if not isinstance(batch, (tuple, list)) or len(batch) != 2:
            what = (
                f"{len(batch)} parts" if isinstance(batch, (tuple, list)) else type(batch).__name__
            )
            raise ConfigurationError(
                f"models are evaluated on batches (x, y), and a batch is {what}."
            )
        x, y = batch
        yield x, y


def as_given(trainer: L.Trainer, batch: Any, dataloader_idx: int = 0) -> Any:
    """Convert a batch to the form in which the trainer's module gets it."""
    batch = trainer.strategy.precision_plugin.convert_input(batch)
    batch = trainer.lightning_module._on_before_batch_transfer(batch, dataloader_idx)
    return trainer.strategy.batch_to_device(batch, dataloader_idx=dataloader_idx)


def all_on_device(trainer: L.Trainer, loaders: Any) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the batches of one or several loaders, each as :func:`on_device` does."""
    for index, loader in enumerate(each_loader(loaders)):
        yield from on_device(trainer, loader, index)


def each_loader(loaders: Any) -> Sequence[Any]:
    """List the dataloaders in ``loaders`` in Lightning's order."""
    if isinstance(loaders, CombinedLoader) and loaders._mode != "sequential":
        return [[batch for batch, _, _ in loaders]]  # each batch combines all loaders
    combined = (
        loaders if isinstance(loaders, CombinedLoader) else CombinedLoader(loaders, "sequential")
    )
    return combined.flattened


@contextmanager
def validating(trainer: L.Trainer) -> Iterator[None]:
    """Set the trainer's stage to validation within the context."""
    before = trainer.state.stage
    trainer.state.stage = RunningStage.VALIDATING
    try:
        yield
    finally:
        trainer.state.stage = before


@contextmanager
def evaluating(module: nn.Module) -> Iterator[None]:
    """Put ``module`` into evaluation mode within the context, and restore each layer's mode afterwards."""
    training = [layer for layer in module.modules() if layer.training]
    module.eval()
    try:
        yield
    finally:
        for layer in training:
            layer.training = True


@torch.no_grad()
def count_answers(trainer: L.Trainer, batches: Iterable[Any], counts: Metric) -> None:
    """Update the metric ``counts`` with the labels of all batches and the outputs of the trainer's module."""
    module = trainer.lightning_module
    counts.to(module.device)
    with evaluating(module), trainer.strategy.precision_plugin.forward_context():
        for x, y in on_device(trainer, batches):
            counts.update(module(x), y)


def free_cached(device: torch.device) -> None:
    """Release the memory that torch holds on a device without using it."""
    backend: Any = getattr(torch, device.type, None)
    if hasattr(backend, "empty_cache"):
        backend.empty_cache()


_TRANSFER_HOOKS = (
    "on_before_batch_transfer",
    "transfer_batch_to_device",
    "on_after_batch_transfer",
)


class KeptBatches:
    """Batches of one validation loader, read once and stored."""

    def __init__(self, batches: Iterable[Any]) -> None:
        # Clones: a slice of a data set would carry the whole data set into every copy.
        self._batches = [apply_to_collection(batch, Tensor, torch.clone) for batch in batches]

    def __iter__(self) -> Iterator[Any]:
        return map(copy.deepcopy, self._batches)

    def __len__(self) -> int:
        return len(self._batches)

    @property
    def samples(self) -> int:
        """Count the samples as Lightning does, by the first dimension of a batch's tensors."""
        return sum(extract_batch_size(batch) for batch in self._batches)


@torch.inference_mode(False)
def keep_batches(trainer: L.Trainer, loaders: Any) -> list[KeptBatches]:
    """Read and store the batches of one or several validation loaders."""
    module, data = trainer.lightning_module, getattr(trainer, "datamodule", None)
    hooked = any(
        is_overridden(h, o) for h in _TRANSFER_HOOKS for o in (module, data) if o is not None
    )
    kept = []
    limit: Any = trainer.limit_val_batches
    for loader in each_loader(loaders):
        if isinstance(limit, int) and limit and sized_len(loader) is None:
            loader = islice(loader, limit)  # the loader may be infinite
        batches: Iterable[Any] = (
            loader if hooked else (move_data_to_device(batch, module.device) for batch in loader)
        )
        kept.append(KeptBatches(batches))
    try:
        for loader in kept:
            next(iter(loader), None)
    except Exception as error:
        raise ConfigurationError(
            f"a validation batch cannot be copied ({error}), and every model is evaluated on batches of its own, "
            "because a step may change them. Keep tensors with gradients and open files out of batches."
        ) from error
    if not sum(map(len, kept)):
        raise ConfigurationError(
            "there are no validation batches: models cannot be evaluated on nothing."
        )
    return kept


class ValidationRun:
    """Validation of a module on batches that are already stored."""

    def __init__(
        self, trainer: L.Trainer, module: L.LightningModule, loaders: Sequence[KeptBatches]
    ) -> None:
        self._trainer, self.module, self._loaders = trainer, module, loaders
        self._stand_in = own = stand_in(trainer, module)
        own.limit_val_batches, own.overfit_batches = 1.0, 0.0
        self._loop = _Loop(own, loaders, trainer.fit_loop.epoch_loop.val_loop.inference_mode)
        own.fit_loop.epoch_loop.val_loop = self._loop

    def logged(self) -> dict[str, Tensor]:
        """Run the validation, and return all logged values by name."""
        with validating(self._trainer):
            self._loop.run()
        values = dict(self._stand_in._logger_connector._callback_metrics)
        for name, parts in self._loop.parts.items():
            if name not in values:
                total = sum(weight for _, weight in parts)
                values[name] = torch.stack(
                    [value * (weight / total) for value, weight in parts]
                ).sum(0)
        return values

    def steps(self) -> Generator[tuple[tuple[Any, ...], int | None], None, None]:
        """Yield ``validation_step``'s arguments for each batch, so that the caller calls it, and the loader's index,
        None for a single loader."""
        self.module.on_validation_model_eval()
        plugin, several = self._stand_in.precision_plugin, len(self._loaders) > 1
        with validating(self._trainer), torch.no_grad():
            for index, loader in enumerate(self._loaders):
                for position, batch in enumerate(loader):
                    batch = self.module._on_before_batch_transfer(
                        plugin.convert_input(batch), index
                    )
                    batch = self._stand_in.strategy.batch_to_device(batch, dataloader_idx=index)
                    told = OrderedDict(batch=batch, batch_idx=position)
                    if several:
                        told["dataloader_idx"] = index
                    arguments = self._loop._build_step_args_from_hook_kwargs(
                        told, "validation_step"
                    )
                    with plugin.val_step_context():
                        yield arguments, index if several else None


class _Loop(_EvaluationLoop):
    """Lightning's evaluation loop, which also records each loader's values and weights."""

    parts: dict[str, list[tuple[Tensor, float]]]

    def __init__(
        self, trainer: L.Trainer, loaders: Sequence[KeptBatches], inference_mode: bool
    ) -> None:
        super().__init__(
            trainer,
            TrainerFn.FITTING,
            RunningStage.VALIDATING,
            verbose=False,
            inference_mode=inference_mode,
        )
        self._data_source = _DataLoaderSource(list(loaders), "")
        self._loaders, self.parts = loaders, {}

    def _store_dataloader_outputs(self) -> None:
        super()._store_dataloader_outputs()
        for _, result in self._results.valid_items():
            meta = result.meta
            if meta.dataloader_idx is None or not meta.add_dataloader_idx or not meta.on_epoch:
                continue
            if result.is_tensor and meta.is_mean_reduction:
                weight = float(result.cumulated_batch_size)
            else:
                weight = float(self._loaders[meta.dataloader_idx].samples)
            for name in dict.fromkeys((meta.name, meta.forked_name(on_step=False))):
                self.parts.setdefault(name, []).append((result.compute(), weight))


def stand_in(trainer: L.Trainer, module: L.LightningModule) -> Any:
    """Return a shallow copy of the trainer, without callbacks and loggers, to evaluate ``module`` in."""
    own: Any = copy.copy(trainer)
    own._accelerator_connector = copy.copy(own._accelerator_connector)
    own._accelerator_connector.strategy = copy.copy(own._accelerator_connector.strategy)
    own.strategy.connect(module)
    # The ranks validate different models, in different numbers: no rank may wait for another.
    own.strategy.ranks = ALONE
    own._data_connector = copy.copy(own._data_connector)
    own._data_connector.trainer = own
    own._data_connector._datahook_selector = _DataHookSelector(module, own.datamodule)
    own._logger_connector = _LoggerConnector(own)
    own.callbacks, own.loggers = [], [DummyLogger() for _ in trainer.loggers]
    own.profiler = PassThroughProfiler()
    own.fit_loop = copy.copy(own.fit_loop)
    own.fit_loop.epoch_loop = copy.copy(own.fit_loop.epoch_loop)
    own.fit_loop.trainer = own.fit_loop.epoch_loop.trainer = own
    module.trainer = own
    module._metric_attributes = None  # it maps ids of the original module's metrics
    return own


def logged_number(name: str, logged: Mapping[str, Any]) -> float:
    """Return the single number in ``logged`` under ``name``."""
    value = torch.as_tensor(logged[name])
    if value.numel() != 1:
        raise ConfigurationError(f"{name!r} is logged as {list(value.shape)}, expected one number.")
    return float(value)
