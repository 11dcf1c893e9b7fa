"""Data held as tensors can stay on the accelerator for the length of a fit: a batch is gathered there, and nothing is
copied but the order of a client's samples, once a local epoch. What is gathered is the same to the bit."""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from copy import copy
from typing import Any, Literal

import torch
from torch import Tensor

from flsv._lightning.evaluation import free_memory
from flsv.data.federated_data import FederatedData
from flsv.data.loaders import TensorBatches, tensors_of
from flsv.errors import ConfigurationError

#: Of the free memory, how much ``"auto"`` takes at most: models, activations and the cohort's matrix need the rest.
SHARE = 0.25


class DeviceCache:
    """Copies of tensors on a device, and loaders that read them there.

    Args:
        tensors: that may be read.
        device: where to.

    Example:
        >>> data = torch.arange(4.0)
        >>> near = DeviceCache([data], torch.device("meta")).near(TensorBatches([data], None, batch_size=3))
        >>> [x.device.type for (x,) in near]
        ['meta', 'meta']
    """

    def __init__(self, tensors: Iterable[Tensor], device: torch.device) -> None:
        self.device = device
        # The tensors too: an id is one tensor's for as long as it lives.
        self._near = {id(tensor): (tensor, tensor.to(device)) for tensor in tensors}
        self._kept: dict[Hashable, tuple[Any, Any]] = {}

    def near(self, loader: Any, key: Hashable = None) -> Any:
        """``loader``, reading the copies; as it is, if it reads anything else.

        Args:
            loader: any.
            key: by which the result is remembered, for a loader that is asked for again and again.
        """
        kept, found = self._kept.get(key, (None, None))
        if key is not None and kept is loader:
            return found
        if not isinstance(loader, TensorBatches) or not all(id(tensor) in self._near for tensor in loader.tensors):
            return loader
        found = copy(loader)
        found.tensors = tuple(self._near[id(tensor)][1] for tensor in loader.tensors)
        if not loader.shuffle:
            found.indices = loader.indices.to(self.device)
        if key is not None:
            self._kept[key] = loader, found
        return found


def reside(
    data: FederatedData, on_device: bool | Literal["auto"], device: torch.device, source: str
) -> DeviceCache | None:
    """The training and validation data on ``device``, if they are to be there.

    Args:
        data: dealt out.
        on_device: True: they are; False: they are not; ``"auto"``: if they are tensors on the CPU and take at most
            :data:`SHARE` of the memory that the device says is free.
        device: of the fit.
        source: name of the data, for messages.

    Raises:
        ConfigurationError: ``on_device=True`` for data that are not held as tensors.
    """
    if device.type == "cpu" or on_device is False:
        return None
    tensors = {id(tensor): tensor for tensor in _tensors(data)}
    if on_device is True and not tensors:
        raise ConfigurationError(
            f"on_device=True: {source} is read sample by sample, and only data held as tensors can stay on {device}. "
            'Say preload: true to read it once into memory, or on_device: "auto".'
        )
    far = [tensor for tensor in tensors.values() if tensor.device.type == "cpu"]
    if on_device == "auto":
        free = free_memory(device)
        if free is None or sum(tensor.nbytes for tensor in far) > SHARE * free:
            return None
    return DeviceCache(far, device) if far else None


def _tensors(data: FederatedData) -> Iterable[Tensor]:
    """What batches are gathered from."""
    read = [(data.train, data.train_options), (data.train, data.eval_options)]
    if data.val_data is not None:
        read.append((data.val_data[0], data.eval_options))
    for dataset, options in read:
        yield from tensors_of(dataset, None, options.get("collate_fn"))[0] or ()
