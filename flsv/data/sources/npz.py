"""MedMNIST-style ``.npz`` files: arrays ``train_images``, ``train_labels``, ``test_...`` and perhaps ``val_...``."""

from __future__ import annotations

import zipfile
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor

from flsv.data.labels import check_largest, in_words, whole_numbers
from flsv.data.sources.base import ImageData, image_tensor, tensor_set
from flsv.errors import ConfigurationError


def npz(path: Path) -> ImageData:
    """Images of an ``.npz`` file.

    Images are ``[N, H, W]`` or ``[N, H, W, 3]`` (or ``1``). 8-bit pixels are brought to -1 .. 1, as is usual for
    MedMNIST; so are other integers whose scale is beyond doubt (:func:`~flsv.data.sources.npz.scaled_images`), with a
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
    _check_shapes(path, images)
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


def _check_shapes(path: Path, images: Mapping[str, np.ndarray]) -> None:
    """Check that all splits hold images, and of one shape.

    Raises:
        ConfigurationError: the first that does not.
    """
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


def class_numbers(path: Path, labels: Mapping[str, np.ndarray]) -> tuple[dict[str, np.ndarray], tuple[str, ...]]:
    """Labels numbered 0 .. M-1 over all arrays together, and the M classes' names, which are the labels of the file.

    A class that one of the arrays lacks is no gap. Labels 1 .. M, or with gaps, are numbered anew, with a warning.

    Args:
        path: the file, for messages.
        labels: arrays ``[N]`` by name.

    Raises:
        ConfigurationError: labels that are no whole numbers from 0 up, or one far above all others.

    Example:
        >>> import warnings
        >>> with warnings.catch_warnings(record=True):
        ...     class_numbers(Path("a.npz"), {"train_labels": np.array([2, 1]), "test_labels": np.array([4])})
        ({'train_labels': array([1, 0]), 'test_labels': array([2])}, ('1', '2', '4'))
    """
    found = {}
    for name, array in labels.items():
        try:
            found[name] = whole_numbers(array)
        except ValueError as error:
            raise ConfigurationError(
                f"{path}: {name}: {error}. One whole number from 0 up is needed per image."
            ) from error
    present = np.unique(np.concatenate(list(found.values())))
    if len(present) and len(present) <= present[-1]:
        check_largest(str(path), int(present[-1]), len(present))
        rank_zero_warn(
            f"{path}: the labels are {in_words(present.tolist())}, not 0 .. {len(present) - 1}. They are numbered "
            f"anew, in this order; the file's labels stay as the names of the {len(present)} classes."
        )
    numbered = {name: np.searchsorted(present, array) for name, array in found.items()}
    return numbered, tuple(map(str, present.tolist()))


def scaled_images(path: Path, images: Mapping[str, np.ndarray]) -> dict[str, Tensor]:
    """Images as float32 tensors ``[N, C, H, W]``: whole numbers brought to -1 .. 1, floating-point ones as they are.

    8-bit pixels are divided by 255. Wider integers are taken for 8-bit ones if the brightest pixel of all arrays is in
    128 .. 255, and for 16-bit ones if it is in 32768 .. 65535, with a warning: what lies between may be anything.

    Args:
        path: the file, for messages.
        images: arrays ``[N, H, W]`` or ``[N, H, W, C]`` by name.

    Raises:
        ConfigurationError: no real numbers, integers whose scale is unknown, arrays of several kinds, NaN or infinity.
    """
    kinds = {name: array.dtype.kind for name, array in images.items()}
    types = ", ".join(f"{name} {array.dtype}" for name, array in images.items())
    if not set(kinds.values()) <= set("biuf"):
        raise ConfigurationError(f"{path}: pixels must be real numbers; there are {types}.")
    if len({kind.replace("i", "u") for kind in kinds.values()}) > 1:
        raise ConfigurationError(
            f"{path}: {types}: floating-point pixels are taken as they are, whole ones are scaled to -1 .. 1. Save all "
            f"splits in one type."
        )
    if "f" in kinds.values():
        with np.errstate(over="ignore"):  # it is infinite then, which is looked for below
            floats = {name: array.astype(np.float32) for name, array in images.items()}
        scaled = {name: _channels_first(torch.from_numpy(array)) for name, array in floats.items()}
    else:
        white = _white(path, images, types)
        scaled = {name: _from_whole(array, white) for name, array in images.items()}
    for name, tensor in scaled.items():
        bad = (~torch.isfinite(tensor)).flatten(1).any(1).nonzero().flatten().tolist()
        if bad:
            raise ConfigurationError(
                f"{path}: {name}: {len(bad)} of {len(tensor)} images have NaN or infinite pixels: "
                f"{in_words(bad)}. Repair them or leave them out."
            )
    return scaled


def _white(path: Path, images: Mapping[str, np.ndarray], types: str) -> int:
    """The value of a white pixel."""
    for dtype, white in ((np.bool_, 1), (np.uint8, 255)):
        if all(array.dtype == dtype for array in images.values()):
            return white
    lowest = min((int(array.min()) for array in images.values() if array.size), default=0)
    highest = max((int(array.max()) for array in images.values() if array.size), default=0)
    for white, bits in ((255, 8), (65535, 16)):
        if lowest >= 0 and white // 2 < highest <= white:
            rank_zero_warn(
                f"{path}: {types}: the pixels are whole numbers {lowest} .. {highest}. They are taken for {bits}-bit "
                f"ones, 0 .. {white}, and brought to -1 .. 1 as such."
            )
            return white
    raise ConfigurationError(
        f"{path}: {types}: the pixels are whole numbers {lowest} .. {highest}, which are neither 8-bit nor 16-bit "
        f"ones, so that their scale is unknown. Save them as uint8 in 0 .. 255, or as floating-point numbers as the "
        f"model shall see them."
    )


def _from_whole(array: np.ndarray, white: int) -> Tensor:
    if white == 255:
        return image_tensor(array.astype(np.uint8), mean=[0.5], std=[0.5])
    return _channels_first(torch.from_numpy(array.astype(np.float32))).div_(white).sub_(0.5).div_(0.5)


def _channels_first(images: Tensor) -> Tensor:
    return images[:, None] if images.ndim == 3 else images.permute(0, 3, 1, 2).contiguous()
