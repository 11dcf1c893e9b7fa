"""The server's validation batches, checked once and kept on the device."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from lightning.fabric.utilities import move_data_to_device
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor

from flsv.errors import ConfigurationError


class ValidationBatches:
    """Batches ``(x, y)`` on one device.

    Args:
        batches: pairs of an input (a tensor, or whatever the module's forward takes) and integer labels ``[B]``. They
            are read once.
        device: where they are kept.
        num_classes: M.
        size: tensors of one shape are put together and cut into batches of this many samples; None: batches stay as
            they are.

    Attributes:
        support: int64 ``[M]`` on the CPU, samples per class.

    Raises:
        ConfigurationError: no samples; not pairs; labels that are no integers ``[B]`` in 0 .. M-1.
    """

    @torch.inference_mode(False)
    def __init__(self, batches: Iterable[Any], device: torch.device, num_classes: int, size: int | None = None) -> None:
        self._batches: list[tuple[Any, Tensor]] = []
        self.support = torch.zeros(num_classes, dtype=torch.int64)
        for batch in batches:
            x, y = checked_pair(batch, num_classes)
            if not len(y):
                continue
            self.support += torch.bincount(y.cpu(), minlength=num_classes)
            x, y = apply_to_collection(move_data_to_device((x, y), device), Tensor, _plain)
            self._batches.append((x, y))
        if not self.support.any():
            raise ConfigurationError("there are no validation samples: coalitions cannot be evaluated on nothing.")
        kinds = {(x.shape[1:], x.dtype) if isinstance(x, Tensor) else None for x, _ in self._batches}
        if size is not None and len(kinds) == 1 and None not in kinds:
            inputs, labels = (torch.cat(parts).split(size) for parts in zip(*self._batches))
            self._batches = list(zip(inputs, labels))

    def channels_last(self) -> None:
        """Keep images in this memory layout from now on."""
        self._batches = [(x.contiguous(memory_format=torch.channels_last), y) for x, y in self._batches]

    def __len__(self) -> int:
        return len(self._batches)

    def __getitem__(self, position: int) -> tuple[Any, Tensor]:
        return self._batches[position]


def _plain(tensor: Tensor) -> Tensor:
    """A tensor made in inference mode could not be differentiated through."""
    return tensor.clone() if tensor.is_inference() else tensor


def checked_pair(batch: Any, num_classes: int) -> tuple[Any, Tensor]:
    """A batch, if it is an input and integer labels ``[B]`` in 0 .. M-1."""
    if not isinstance(batch, (tuple, list)) or len(batch) != 2:
        raise ConfigurationError(f"a validation batch is a {type(batch).__name__}, expected a pair (x, y).")
    x, y = batch
    if not isinstance(y, Tensor) or y.ndim != 1 or y.is_floating_point() or y.dtype == torch.bool:
        what = f"{y.dtype} {list(y.shape)}" if isinstance(y, Tensor) else type(y).__name__
        raise ConfigurationError(f"the labels of a validation batch are {what}, expected integer classes [B].")
    if isinstance(x, Tensor) and len(x) != len(y):
        raise ConfigurationError(f"a validation batch has {len(x)} inputs and {len(y)} labels.")
    if len(y) and (int(y.min()) < 0 or int(y.max()) >= num_classes):
        raise ConfigurationError(
            f"validation labels lie in {int(y.min())} .. {int(y.max())}, but num_classes={num_classes}: expected "
            f"0 .. {num_classes - 1}."
        )
    return x, y.long()
