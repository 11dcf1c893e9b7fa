"""Image data by name: scikit-learn's digits, Gaussians, torchvision's sets, and MedMNIST-style ``.npz`` files, with the
arrays ``train_images``, ``train_labels``, ``test_...`` and perhaps ``val_...``."""

from __future__ import annotations

import difflib
import re
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from lightning.pytorch.utilities import rank_zero_warn
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import Tensor

from flsv.data.labels import check_largest, whole_numbers
from flsv.data.sources.base import ImageData, image_tensor, tensor_set
from flsv.data.sources.images import folder
from flsv.data.sources.table import find_place, looked_at
from flsv.errors import ConfigurationError, in_words
from flsv.seeding import generator_for


def digits() -> ImageData:
    """1,437 training and 360 test images ``[1, 8, 8]`` in 0 .. 1; the split is fixed and stratified.

    Example:
        >>> data = digits()
        >>> len(data.train), len(data.test), data.train[0][0].shape
        (1437, 360, torch.Size([1, 8, 8]))
    """
    pixels, labels = load_digits(return_X_y=True)
    train_x, test_x, train_y, test_y = train_test_split(pixels, labels, test_size=0.2, stratify=labels, random_state=0)
    sets = [
        tensor_set(torch.tensor(x, dtype=torch.float32).view(-1, 1, 8, 8) / 16, y)
        for x, y in ((train_x, train_y), (test_x, test_y))
    ]
    return ImageData(sets[0], sets[1], None, 10, tuple(map(str, range(10))))


#: Classes 0 and 1 lie on one axis, 2 and 3 on the other, each a little off it.
CENTRES = ((2.0, 0.2), (-2.0, -0.2), (0.2, 2.0), (-0.2, -2.0))
SPREAD = 0.8
TRAIN, TEST = 4000, 2000


def gaussians() -> ImageData:
    """4,000 training and 2,000 test points of four equally large classes, always the same ones.

    Items are ``(float32 [5], class)``: x, y, x^2, y^2, xy of a point.

    Example:
        >>> data = gaussians()
        >>> len(data.train), data.train[0][0].shape, data.num_classes
        (4000, torch.Size([5]), 4)
    """
    sets = [tensor_set(*_draw(size, split)) for size, split in ((TRAIN, "train"), (TEST, "test"))]
    return ImageData(sets[0], sets[1], None, 4, ("0", "1", "2", "3"))


def _draw(size: int, split: str) -> tuple[Tensor, Tensor]:
    labels = torch.arange(size) % 4
    noise = torch.randn(size, 2, generator=generator_for(0, "gaussians", split))
    x, y = (torch.tensor(CENTRES)[labels] + SPREAD * noise).unbind(1)
    return torch.stack([x, y, x * x, y * y, x * y], dim=1), labels


class _Kind(NamedTuple):
    cls: str  # of torchvision.datasets
    folder: str
    mean: tuple[float, ...]
    std: tuple[float, ...]


# Mean and standard deviation by channel of the training pixels in 0 .. 1.
KINDS = {
    "mnist": _Kind("MNIST", "MNIST/raw", (0.1307,), (0.3081,)),
    "fashion_mnist": _Kind("FashionMNIST", "FashionMNIST/raw", (0.2860,), (0.3530,)),
    "cifar10": _Kind("CIFAR10", "cifar-10-batches-py", (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)),
    "cifar100": _Kind("CIFAR100", "cifar-100-python", (0.5071, 0.4865, 0.4409), (0.2673, 0.2564, 0.2762)),
}


def vision(name: str, root: str, download: bool = False) -> ImageData:
    """The set called ``name`` below the torchvision-style folder ``root``, normalised by its mean and deviation.

    Args:
        name: a key of ``KINDS``.
        root: the folder that holds ``MNIST``, ``FashionMNIST``, ``cifar-10-batches-py``, ``cifar-100-python``.
        download: fetch what is missing.

    Raises:
        ConfigurationError: files missing, damaged, or not to be had from the network.
    """
    from torchvision import datasets

    kind = KINDS[name]
    place = Path(root).absolute() / kind.folder
    sets = []
    for train in (True, False):
        try:
            part = getattr(datasets, kind.cls)(root, train=train, download=download)
        except Exception as error:  # junk ends in whatever comes first: assertions, key and type errors, ends of files
            raise ConfigurationError(_unreadable(name, place, download, error)) from error
        labels = torch.as_tensor(part.targets)
        if len(part.data) != len(labels) or (len(labels) and not 0 <= labels.min() <= labels.max() < len(part.classes)):
            why = f"{len(part.data)} images, and {len(labels)} labels in 0 .. {len(part.classes) - 1} are expected"
            raise ConfigurationError(_unreadable(name, place, download, ValueError(why)))
        sets.append(tensor_set(image_tensor(part.data, kind.mean, kind.std), labels))
    names = tuple(part.classes)
    return ImageData(sets[0], sets[1], None, len(names), names)


def _unreadable(name: str, place: Path, download: bool, error: Exception) -> str:
    # torchvision says "not found" by a RuntimeError, a failed download also by URLError (an OSError).
    if download and isinstance(error, RuntimeError | OSError):
        return (
            f"{name} was not found: looked in {place}. The download failed ({error}). Fetch it by hand, or try again "
            f"with a network."
        )
    # Of CIFAR it says "not found or corrupted" in both cases.
    there = "corrupted" in str(error) and place.is_dir()
    if isinstance(error, RuntimeError) and "not found" in str(error) and not there:
        return f"{name} was not found: looked in {place}. Give root the folder that holds it, or say download: true."
    why = f"{type(error).__name__}: {error}".strip().rstrip(":")
    return (
        f"{name} cannot be read: the files in {place} are damaged or others ({why}). Remove them and say "
        f"download: true."
    )


#: The data sets known by name.
DATA_SETS = ("digits", *KINDS, "gaussians")


def load_image_data(name: str, root: str = "data", download: bool = False, image_size: int = 224) -> ImageData:
    """Load a data set by name or by path.

    Args:
        name: ``digits``, ``gaussians``, ``mnist``, ``fashion_mnist``, ``cifar10``, ``cifar100`` (in any case, with or
            without separators), a MedMNIST-style ``.npz`` file, or a folder with ``train/<class>`` and
            ``test/<class>`` images or with ``<class>`` images alone. Files and folders are looked up below ``root``,
            then as they are.
        root: folder of the data.
        download: fetch torchvision's sets if they are missing.
        image_size: side in pixels of the images of a folder.

    Raises:
        ConfigurationError: a name nobody knows, or data that are not there.

    Example:
        >>> data = load_image_data("digits")
        >>> data.num_classes, len(data.train)
        (10, 1437)
    """
    kind = known_as(name)
    if kind == "digits":
        return digits()
    if kind == "gaussians":
        return gaussians()
    if kind is not None:
        return vision(kind, root, download)
    place = find_place(name, root)
    if place is not None and place.is_dir():
        return folder(place, image_size)
    if place is not None and place.suffix.lower() == ".npz":
        return npz(place)
    if place is not None:
        raise ConfigurationError(
            f"{place} is a file, but not one of data: expected a MedMNIST-style .npz file, a CSV file, or a folder of "
            f"images or with data by client. (A configuration of a data module goes behind --config.)"
        )
    looked = looked_at(name, root)
    if name.endswith(".npz") or "/" in name:
        raise ConfigurationError(f"{name} was not found: looked at {looked}. Give root the folder that holds it.")
    close = difflib.get_close_matches(_plain(name), map(_plain, DATA_SETS))
    hint = f" Did you mean {known_as(close[0])!r}?" if close else ""
    raise ConfigurationError(
        f"No data set {name!r}.{hint} Known are {', '.join(DATA_SETS)}, any MedMNIST-style .npz file, any CSV file, "
        f"and any folder of images or with data by client (looked at {looked})."
    )


def known_as(name: object) -> str | None:
    """The name, as in :data:`DATA_SETS`, of the data set that is called so in any spelling; None: it may be a path.

    Example:
        >>> known_as("FashionMNIST"), known_as("hospitals")
        ('fashion_mnist', None)
    """
    return {_plain(kind): kind for kind in DATA_SETS}.get(_plain(name)) if isinstance(name, str) else None


def _plain(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.lower())


def npz(path: Path) -> ImageData:
    """Images of an ``.npz`` file.

    Images are ``[N, H, W]`` or ``[N, H, W, 3]`` (or ``1``). 8-bit pixels are brought to -1 .. 1, as is usual for
    MedMNIST; so are other integers whose scale is beyond doubt (:func:`~flsv.data.sources.named.scaled_images`), with a
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
