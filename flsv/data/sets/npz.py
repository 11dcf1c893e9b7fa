"""MedMNIST-style ``.npz`` files: arrays ``train_images``, ``train_labels``, ``test_...`` and perhaps ``val_...``."""

from __future__ import annotations

import zipfile
from pathlib import Path

import numpy as np
import torch
from torch.utils.data import TensorDataset

from flsv.data.sets.base import ImageData, image_tensor, tensor_set
from flsv.errors import ConfigurationError


def npz(path: Path) -> ImageData:
    """Images of an ``.npz`` file.

    Images are ``[N, H, W]`` or ``[N, H, W, 3]`` (or ``1``). 8-bit pixels are brought to -1 .. 1, as is usual for
    MedMNIST; floating-point ones are taken as they are. Labels are one integer per image, ``[N]`` or ``[N, 1]``. Any
    other array ``train_<name>`` with one entry per training image becomes the attribute ``<name>`` of the training set,
    so that ``groups: <name>`` can name it.

    Raises:
        ConfigurationError: a file that is not such an archive, a missing array, or shapes that do not fit.
    """
    try:
        with np.load(path) as archive:
            arrays = {name: archive[name] for name in archive.files}
    except (OSError, ValueError, zipfile.BadZipFile) as error:
        raise ConfigurationError(f"{path} cannot be read as an .npz archive of plain arrays: {error}") from error
    needed = [f"{split}_{what}" for split in ("train", "test") for what in ("images", "labels")]
    missing = [name for name in needed if name not in arrays]
    if missing:
        raise ConfigurationError(
            f"{path} has no array {', '.join(missing)}; it has {', '.join(sorted(arrays)) or 'none'}. A MedMNIST-style "
            f"file has {', '.join(needed)} and, if there is a validation set, val_images and val_labels."
        )
    train, test = _split(path, arrays, "train"), _split(path, arrays, "test")
    val = _split(path, arrays, "val") if {"val_images", "val_labels"} <= arrays.keys() else None
    for name, array in arrays.items():
        attribute = name.removeprefix("train_")
        if name.startswith("train_") and len(array) == len(train) and attribute not in ("images", "labels"):
            setattr(train, attribute, array)
    num_classes = 1 + max(int(part.tensors[1].max()) for part in (train, test, val) if part is not None and len(part))
    return ImageData(train, test, val, num_classes, tuple(map(str, range(num_classes))))


def _split(path: Path, arrays: dict[str, np.ndarray], split: str) -> TensorDataset:
    images, labels = arrays[f"{split}_images"], arrays[f"{split}_labels"]
    if labels.ndim == 2 and labels.shape[1] == 1:
        labels = labels[:, 0]
    if labels.ndim != 1 or len(labels) != len(images):
        raise ConfigurationError(
            f"{path}: {split}_labels has shape {list(labels.shape)} for {len(images)} images. One class per image is "
            f"needed, [N] or [N, 1]; multi-label data are not supported."
        )
    if images.ndim != 3 and not (images.ndim == 4 and images.shape[3] in (1, 3)):
        raise ConfigurationError(
            f"{path}: {split}_images has shape {list(images.shape)}; [N, H, W], [N, H, W, 1] or [N, H, W, 3] is needed."
        )
    if images.dtype == np.uint8:
        return tensor_set(image_tensor(images, mean=[0.5], std=[0.5]), labels)
    floats = torch.from_numpy(images.astype(np.float32))
    channels_first = floats[:, None] if floats.ndim == 3 else floats.permute(0, 3, 1, 2).contiguous()
    return tensor_set(channels_first, labels)
