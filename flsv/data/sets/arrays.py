"""Pixels and labels as they come in files: converted where there is one way to, refused where there are several."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor

from flsv.data.labels import check_largest, in_words, whole_numbers
from flsv.data.sets.base import image_tensor
from flsv.errors import ConfigurationError


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
