"""Makes a Trainer's ``datamodule`` another one than the data module that makes its loaders."""

from __future__ import annotations

import weakref
from contextlib import AbstractContextManager
from typing import Any

import lightning as L
import numpy as np
from lightning.pytorch.trainer.connectors.data_connector import _DataHookSelector, _DataLoaderSource
from torch import Tensor

from flsv.isolation.reachable import find_generators
from flsv.utilities.seeding import kept_generators

#: Types of objects that are not searched for random generators of the data.
_TYPES_WITHOUT_DATA = (Tensor, np.ndarray, L.Trainer, L.LightningModule, L.Callback)
#: The random generators to which data modules refer, found once.
_generators_by_data: weakref.WeakKeyDictionary[Any, list[Any]] = weakref.WeakKeyDictionary()


class _LoadersOf(_DataLoaderSource):
    """Source of loaders that calls its own data module. Lightning's source calls ``trainer.datamodule``."""

    def dataloader(self) -> Any:
        if isinstance(self.instance, L.LightningDataModule):
            return getattr(self.instance, self.name)()
        return super().dataloader()


def show_data_module(
    trainer: Any,
    data: L.LightningDataModule,
    shown: Any,
) -> None:
    """Set ``shown`` as the data module that modules, callbacks and hooks see. ``data`` still makes the loaders."""
    loops = [
        trainer.fit_loop,
        trainer.fit_loop.epoch_loop.val_loop,
        trainer.validate_loop,
        trainer.test_loop,
        trainer.predict_loop,
    ]
    for loop in loops:
        loop._data_source = _LoadersOf(data, loop._data_source.name)

    selector = _DataHookSelector(trainer.lightning_module, shown)
    trainer._data_connector._datahook_selector = selector
    trainer.datamodule = shown
    shown.trainer = trainer


def data_of(trainer: L.Trainer) -> Any:
    """Return the data module that makes a Trainer's loaders, or None."""
    source = None
    if isinstance(trainer, L.Trainer):
        source = trainer.fit_loop._data_source.instance
    if isinstance(source, L.LightningDataModule):
        return source
    return getattr(trainer, "datamodule", None)


def kept_data_generators(trainer: L.Trainer) -> AbstractContextManager[None]:
    """Return a context that restores the random generators of a Trainer's data at its end. A hook may advance them by
    reading a loader or a data set."""
    data = data_of(trainer)
    if data is None:
        return kept_generators([])
    if data not in _generators_by_data:
        _generators_by_data[data] = generators_of(data)
    return kept_generators(_generators_by_data[data])


def generators_of(data: Any) -> list[Any]:
    """Return the random generators to which a data module, loaders or data sets refer."""
    return find_generators(data, closed=_TYPES_WITHOUT_DATA)
