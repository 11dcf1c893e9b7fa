"""Lightning's validation without side effects on the fit's trainer.

During validation a module reads its trainer, logs to it, and gets its batches from it. Therefore the module gets a
shallow copy of the trainer, with its own validation loop, results and strategy.
"""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import islice
from typing import Any

import lightning as L
import torch
from lightning.fabric.utilities import move_data_to_device
from lightning.fabric.utilities.data import sized_len
from lightning.pytorch.loops.evaluation_loop import _EvaluationLoop
from lightning.pytorch.profilers import PassThroughProfiler
from lightning.pytorch.trainer.connectors.data_connector import _DataHookSelector, _DataLoaderSource
from lightning.pytorch.trainer.connectors.logger_connector import _LoggerConnector
from lightning.pytorch.trainer.states import RunningStage, TrainerFn
from lightning.pytorch.utilities.data import extract_batch_size
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor

from flsv._lightning.data_source import data_of, generators_of, kept_data_generators
from flsv._lightning.evaluation import as_module_input, list_loaders, validating
from flsv.isolation.pickles import copy_of_data_module
from flsv.isolation.silent_logger import silent_arguments, silent_logger
from flsv.utilities.errors import ConfigurationError
from flsv.utilities.seeding import kept_generators

_TRANSFER_HOOKS = (
    "on_before_batch_transfer",
    "transfer_batch_to_device",
    "on_after_batch_transfer",
)
#: Properties of a copied Trainer that return the values of the fit's Trainer.
_SHOWN_PROPERTIES = (
    "val_dataloaders",
    "checkpoint_callback",
    "checkpoint_callbacks",
    "early_stopping_callback",
    "early_stopping_callbacks",
)


class StoredBatches:
    """Batches of one validation loader, read once and stored."""

    def __init__(self, batches: Iterable[Any]) -> None:
        # Tensors are cloned, since a view of a data set would copy the whole data set every time.
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
def store_batches(trainer: L.Trainer, loaders: Any) -> list[StoredBatches]:
    """Read and store the batches of one or several validation loaders."""
    has_hooks = _has_transfer_hooks(trainer)
    device = trainer.lightning_module.device
    stored_loaders = []
    # Generators are restored, so that the run's own validation reads the same batches.
    with kept_generators(generators_of(loaders)):
        for loader in list_loaders(loaders):
            batches = _limited(loader, trainer.limit_val_batches)
            if not has_hooks:  # hooks move batches themselves
                batches = (move_data_to_device(batch, device) for batch in batches)
            stored_loaders.append(StoredBatches(batches))

    _check_copies(stored_loaders)
    if not any(len(loader) for loader in stored_loaders):
        raise ConfigurationError(
            "models are evaluated on validation batches, but the validation loaders are empty. Add validation samples."
        )
    return stored_loaders


def _limited(loader: Any, limit: Any) -> Iterable[Any]:
    # A loader without a length may be infinite.
    has_limit = isinstance(limit, int) and limit > 0
    if has_limit and sized_len(loader) is None:
        return islice(loader, limit)
    return loader


def _has_transfer_hooks(trainer: L.Trainer) -> bool:
    for owner in (trainer.lightning_module, getattr(trainer, "datamodule", None)):
        if owner is not None and any(is_overridden(hook, owner) for hook in _TRANSFER_HOOKS):
            return True
    return False


def _check_copies(stored_loaders: Sequence[StoredBatches]) -> None:
    try:
        for stored_loader in stored_loaders:
            next(iter(stored_loader), None)
    except Exception as error:
        raise ConfigurationError(
            f"a validation batch cannot be copied ({error}), but every model is evaluated on copies of the batches, "
            "because a step may change them. Remove tensors with gradients and open files from batches."
        ) from error


class ValidationRun:
    """Validation of a module on batches that are already stored.

    Args:
        trainer: the fit's trainer.
        trainer_copy: a copy of it from :func:`copy_of_trainer`, with the module.
        loaders: the batches.
    """

    def __init__(
        self, trainer: L.Trainer, trainer_copy: Any, loaders: Sequence[StoredBatches]
    ) -> None:
        self._trainer = trainer
        self.module = trainer_copy.lightning_module
        self._loaders = loaders
        self._trainer_copy = trainer_copy
        # Validate on all stored batches, not on training batches.
        self._trainer_copy.limit_val_batches = 1.0
        self._trainer_copy.overfit_batches = 0.0
        inference_mode = trainer.fit_loop.epoch_loop.val_loop.inference_mode
        self._loop = _Loop(self._trainer_copy, loaders, inference_mode)
        self._trainer_copy.fit_loop.epoch_loop.val_loop = self._loop

    def logged(self) -> dict[str, Tensor]:
        """Run the validation, and return all logged values by name."""
        with validating(self._trainer), kept_data_generators(self._trainer):
            self._loop.run()
        # The trainer's copy has the values by Lightning's names. `weighted_values` has those of several loaders.
        logged_values = dict(self._trainer_copy._logger_connector._callback_metrics)
        for name, weighted_values in self._loop.weighted_values.items():
            if name not in logged_values:
                logged_values[name] = _weighted_mean(weighted_values)
        return logged_values

    def steps(self) -> Generator[tuple[tuple[Any, ...], int | None], None, None]:
        """Yield the arguments of ``validation_step``, which the caller calls, for each batch, and the loader's index
        (None for a single loader)."""
        self.module.on_validation_model_eval()
        precision = self._trainer_copy.precision_plugin
        has_several_loaders = len(self._loaders) > 1
        kept_data = kept_data_generators(self._trainer)
        with validating(self._trainer), kept_data, torch.no_grad():
            for loader_index, loader in enumerate(self._loaders):
                for batch_index, batch in enumerate(loader):
                    module_input = as_module_input(self._trainer_copy, batch, loader_index)
                    hook_arguments = OrderedDict(batch=module_input, batch_idx=batch_index)
                    if has_several_loaders:
                        hook_arguments["dataloader_idx"] = loader_index
                    step_arguments = self._loop._build_step_args_from_hook_kwargs(
                        hook_arguments, "validation_step"
                    )
                    logged_index = loader_index if has_several_loaders else None
                    with precision.val_step_context():
                        yield step_arguments, logged_index


class _Loop(_EvaluationLoop):
    """Lightning's evaluation loop, which also records each loader's values and weights."""

    weighted_values: dict[str, list[tuple[Tensor, float]]]

    def __init__(
        self, trainer: L.Trainer, loaders: Sequence[StoredBatches], inference_mode: bool
    ) -> None:
        super().__init__(
            trainer,
            TrainerFn.FITTING,
            RunningStage.VALIDATING,
            verbose=False,
            inference_mode=inference_mode,
        )
        # Lightning needs the name of a hook only if the instance is a module.
        self._data_source = _DataLoaderSource(instance=list(loaders), name="")
        self._loaders = loaders
        self.weighted_values = {}

    def _store_dataloader_outputs(self) -> None:
        super()._store_dataloader_outputs()
        for _, result in self._results.valid_items():
            meta = result.meta
            loader_index = meta.dataloader_idx
            if loader_index is None or not meta.add_dataloader_idx:
                continue  # the value is of all loaders
            if not meta.on_epoch:
                continue  # the value is of a step
            if result.is_tensor and meta.is_mean_reduction:
                weight = float(result.cumulated_batch_size)
            else:
                weight = float(self._loaders[loader_index].samples)
            names = (meta.name, meta.forked_name(on_step=False))
            for name in dict.fromkeys(names):  # one name, unless steps are logged, too
                weighted_values = self.weighted_values.setdefault(name, [])
                weighted_values.append((result.compute(), weight))


def _weighted_mean(weighted_values: Sequence[tuple[Tensor, float]]) -> Tensor:
    total = sum(weight for _, weight in weighted_values)
    summands = [value * (weight / total) for value, weight in weighted_values]
    return torch.stack(summands).sum(0)


def copy_of_trainer(trainer: L.Trainer, module: L.LightningModule) -> Any:
    """Return a shallow copy of the trainer, without callbacks and loggers, in which ``module`` is evaluated."""
    # Every object in Lightning's private attributes is copied that refers to the trainer or the module, or that a
    # validation changes, so that the original trainer does not change.
    trainer_copy = _copy_with_shown_properties(trainer)
    _copy_strategy(trainer_copy, module)
    _copy_data(trainer_copy, trainer, module)
    # The copy has its own logs and profiler, and no callbacks. Its loggers have the folders of the fit's loggers, where
    # hooks may write: scoring puts files back.
    trainer_copy._logger_connector = _LoggerConnector(trainer_copy)
    trainer_copy.callbacks = []
    trainer_copy.loggers = [silent_logger(*silent_arguments(logger)) for logger in trainer.loggers]
    trainer_copy.profiler = PassThroughProfiler()
    _copy_loops(trainer_copy)

    module.trainer = trainer_copy
    module._metric_attributes = None  # Lightning's map from ids of the original module's metrics
    return trainer_copy


def _copy_with_shown_properties(trainer: L.Trainer) -> Any:
    """Return a shallow copy in which hooks see the same loaders, and callbacks with folders, as in the fit."""
    trainer_class = type(trainer)
    properties = {}
    for name in _SHOWN_PROPERTIES:
        properties[name] = property(partial(_value_in_fit, trainer, name))
    class_of_copy = type(trainer_class.__name__, (trainer_class,), properties)
    trainer_copy: Any = object.__new__(class_of_copy)
    vars(trainer_copy).update(vars(trainer))
    return trainer_copy


def _value_in_fit(trainer: L.Trainer, name: str, trainer_copy: L.Trainer) -> Any:
    return getattr(trainer, name)


def _copy_strategy(trainer_copy: Any, module: L.LightningModule) -> None:
    # The strategy calls the module's steps.
    accelerator_connector = copy.copy(trainer_copy._accelerator_connector)
    trainer_copy._accelerator_connector = accelerator_connector
    strategy = copy.copy(accelerator_connector.strategy)
    accelerator_connector.strategy = strategy
    strategy.connect(module)
    # The ranks validate different numbers of models, so no rank may wait for another. A strategy without the attribute
    # `ranks` is alone.
    vars(strategy).pop("ranks", None)


def _copy_data(trainer_copy: Any, trainer: L.Trainer, module: L.LightningModule) -> None:
    # Hooks may set attributes of the data module, which must not change the run's.
    data = getattr(trainer_copy, "datamodule", None)
    if data is not None:
        is_users_own = data is not data_of(trainer)
        trainer_copy.datamodule = copy_of_data_module(data) if is_users_own else copy.copy(data)
        trainer_copy.datamodule.trainer = trainer_copy
    data_connector = copy.copy(trainer_copy._data_connector)
    trainer_copy._data_connector = data_connector
    data_connector.trainer = trainer_copy
    data_connector._datahook_selector = _DataHookSelector(module, trainer_copy.datamodule)


def _copy_loops(trainer_copy: Any) -> None:
    # The caller sets the validation loop.
    fit_loop = copy.copy(trainer_copy.fit_loop)
    trainer_copy.fit_loop = fit_loop
    fit_loop.epoch_loop = copy.copy(fit_loop.epoch_loop)
    fit_loop.trainer = trainer_copy
    fit_loop.epoch_loop.trainer = trainer_copy


def logged_number(name: str, logged: Mapping[str, Any]) -> float:
    """Return the single number in ``logged`` under ``name``."""
    value = torch.as_tensor(logged[name])
    if value.numel() != 1:
        raise ConfigurationError(
            f"{name!r} is logged with shape {list(value.shape)}, but one number is expected."
        )
    return float(value)
