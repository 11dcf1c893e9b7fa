"""What every data set by name is turned into."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset, TensorDataset


@dataclass(frozen=True)
class ImageData:
    """A labelled image data set.

    Args:
        train: training images; items are ``(image float32 [C, H, W], class)``.
        test: test images, held by nobody; None where a folder has no such split.
        val: the data set's own validation images, or None.
        num_classes: number of classes.
        class_names: their names, ``num_classes`` of them.
    """

    train: Dataset
    test: Dataset | None
    val: Dataset | None
    num_classes: int
    class_names: tuple[str, ...]


def image_tensor(images: Any, mean: Sequence[float] = (0.0,), std: Sequence[float] = (1.0,)) -> Tensor:
    """8-bit images as a normalised float32 tensor ``[N, C, H, W]``: ``(pixel / 255 - mean) / std`` by channel.

    Args:
        images: uint8 tensor or array ``[N, H, W]`` or ``[N, H, W, C]``.
        mean: one number, or one per channel, of pixels in 0 .. 1.
        std: likewise.

    Example:
        >>> image_tensor(np.full((2, 4, 4, 3), 255, np.uint8), mean=[0.5], std=[0.5])[1, 2].unique()
        tensor([1.])
    """
    pixels = torch.as_tensor(images)
    pixels = pixels[:, None] if pixels.ndim == 3 else pixels.permute(0, 3, 1, 2)
    # In place on one contiguous copy: the sets are large beside the memory of a laptop.
    floats = pixels.to(torch.float32, memory_format=torch.contiguous_format).div_(255)
    return floats.sub_(torch.tensor(mean).view(-1, 1, 1)).div_(torch.tensor(std).view(-1, 1, 1))


def tensor_set(images: Tensor, labels: Any) -> TensorDataset:
    """Images and their int64 classes as a data set that can be read a batch at a time."""
    return TensorDataset(images, torch.from_numpy(np.asarray(labels).astype(np.int64)))
