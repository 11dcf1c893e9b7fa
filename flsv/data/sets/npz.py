"""MedMNIST-style ``.npz`` files: arrays ``train_images``, ``train_labels``, ``test_...`` and perhaps ``val_...``."""

from __future__ import annotations

import zipfile
from pathlib import Path

import numpy as np

from flsv.data.sets.arrays import class_numbers, scaled_images
from flsv.data.sets.base import ImageData, tensor_set
from flsv.errors import ConfigurationError


def npz(path: Path) -> ImageData:
    """Images of an ``.npz`` file.

    Images are ``[N, H, W]`` or ``[N, H, W, 3]`` (or ``1``). 8-bit pixels are brought to -1 .. 1, as is usual for
    MedMNIST; so are other integers whose scale is beyond doubt (:func:`~flsv.data.sets.arrays.scaled_images`), with a
    warning; floating-point ones are taken as they are. Labels are one integer per image, ``[N]`` or ``[N, 1]``; if they
    are not 0 .. M-1 they are numbered anew, with a warning. Any other array ``train_<name>`` with one entry per
    training image becomes the attribute ``<name>`` of the training set, so that ``groups: <name>`` can name it.

    Raises:
        ConfigurationError: a file that is not such an archive, a missing array, shapes that do not fit, labels or
            pixels that are no such numbers.
    """
    arrays = _read(path)
    splits = ["train", "test", *(["val"] if {"val_images", "val_labels"} & arrays.keys() else [])]
    needed = [f"{split}_{what}" for split in splits for what in ("images", "labels")]
    missing = [name for name in needed if name not in arrays]
    if missing:
        raise ConfigurationError(
            f"{path} has no array {', '.join(missing)}; it has {', '.join(sorted(arrays)) or 'none'}. A MedMNIST-style "
            f"file has train_images, train_labels, test_images, test_labels and, if there is a validation set, "
            f"val_images and val_labels."
        )
    images = {split: arrays[f"{split}_images"] for split in splits}
    shapes = {name: list(array.shape[1:]) for name, array in images.items()}
    for split, array in images.items():
        if array.ndim != 3 and not (array.ndim == 4 and array.shape[3] in (1, 3)):
            raise ConfigurationError(
                f"{path}: {split}_images has shape {list(array.shape)}; [N, H, W], [N, H, W, 1] or [N, H, W, 3] is "
                f"needed."
            )
        if shapes[split] != shapes["train"]:
            raise ConfigurationError(
                f"{path}: train_images are {shapes['train']} each, {split}_images {shapes[split]}. All must be alike."
            )
    given = {f"{split}_labels": _one_each(path, arrays, split) for split in splits}
    labels, class_names = class_numbers(path, given)
    pixels = scaled_images(path, {f"{split}_images": array for split, array in images.items()})
    sets = {split: tensor_set(pixels[f"{split}_images"], labels[f"{split}_labels"]) for split in splits}
    train = sets["train"]
    for name, array in arrays.items():
        attribute = name.removeprefix("train_")
        if name.startswith("train_") and array.shape[:1] == (len(train),) and not hasattr(train, attribute):
            setattr(train, attribute, array)
    return ImageData(train, sets["test"], sets.get("val"), len(class_names), class_names)


def _read(path: Path) -> dict[str, np.ndarray]:
    arrays: dict[str, np.ndarray] = {}
    at = ""
    try:
        if not zipfile.is_zipfile(path):
            with path.open("rb") as file:
                start = file.read(8)
            raise ValueError(f"it begins with {start!r}" if start else "it is empty")
        with np.load(path) as archive:
            for name in archive.files:
                at = f"{name}: "
                arrays[name] = archive[name]
                if not isinstance(arrays[name], np.ndarray):  # bytes, where an entry is none
                    raise ValueError("no array")
    except Exception as error:  # zlib's, zipfile's, numpy's own and memory's: whichever, the file cannot be used
        raise ConfigurationError(
            f"{path} cannot be read as an .npz archive of plain arrays: {at}{error}. Write it by numpy.savez, or fetch "
            f"it again."
        ) from error
    return arrays


def _one_each(path: Path, arrays: dict[str, np.ndarray], split: str) -> np.ndarray:
    """A split's labels, ``[N]``."""
    labels, length = arrays[f"{split}_labels"], len(arrays[f"{split}_images"])
    if labels.ndim == 2 and labels.shape[1] == 1:
        labels = labels[:, 0]
    if labels.shape != (length,):
        raise ConfigurationError(
            f"{path}: {split}_labels has shape {list(labels.shape)} for {length} images. One class per image is "
            f"needed, [N] or [N, 1]; multi-label data are not supported."
        )
    return labels
