"""Image data by name: scikit-learn's digits, Gaussians, torchvision's sets, and MedMNIST-style ``.npz`` files, with the
arrays ``train_images``, ``train_labels``, ``test_...`` and perhaps ``val_...``."""

from __future__ import annotations

import difflib
import re
import zipfile
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import Tensor

from flsv.data.labels import whole_numbers
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
    """The set called ``name`` below the torchvision-style folder ``root``, normalized by its mean and deviation.

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
            labels = torch.as_tensor(part.targets)
            if len(part.data) != len(labels) or not 0 <= labels.min() <= labels.max() < len(part.classes):
                raise ValueError(
                    f"{len(part.data)} images, and {len(labels)} labels in 0 .. {len(part.classes) - 1} are expected"
                )
        except Exception as error:  # junk ends in whatever comes first: assertions, key and type errors, ends of files
            if download and isinstance(error, RuntimeError | OSError):
                message = f"was not found: looked in {place}. The download failed ({error}). Fetch it by hand"
            elif place.is_dir():
                why = f"{type(error).__name__}: {error}".strip().rstrip(":")
                message = f"cannot be read: the files in {place} are damaged or others ({why}). Remove them"
            else:
                message = f"was not found: looked in {place}. Give root the folder that holds it"
            raise ConfigurationError(f"{name} {message}, or say download: true.") from error
        sets.append(tensor_set(image_tensor(part.data, kind.mean, kind.std), labels))
    names = tuple(part.classes)
    return ImageData(sets[0], sets[1], None, len(names), names)


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
    MedMNIST; floating-point ones are taken as they are. Labels are one integer per image in 0 .. M-1, ``[N]`` or
    ``[N, 1]``. Any other array ``train_<name>`` with one entry per training image becomes the attribute ``<name>`` of
    the training set, so that ``groups: <name>`` can name it.

    Raises:
        ConfigurationError: a file that is not such an archive, a missing array, shapes that do not fit, labels or
            pixels that are no such numbers.
    """
    arrays = _arrays(path)
    splits = ["train", "test", *(["val"] if {"val_images", "val_labels"} & arrays.keys() else [])]
    needed = [f"{split}_{part}" for split in splits for part in ("images", "labels")]
    missing = [name for name in needed if name not in arrays]
    if missing:
        raise ConfigurationError(
            f"{path} has no array {', '.join(missing)}; it has {', '.join(sorted(arrays)) or 'none'}. A MedMNIST-style "
            f"file has train_images, train_labels, test_images, test_labels and, if there is a validation set, "
            f"val_images and val_labels."
        )
    sets, present = {}, np.array([], np.int64)
    for split in splits:
        images, labels = arrays[f"{split}_images"], arrays[f"{split}_labels"]
        kinds = [f"{each.dtype} {list(each.shape[1:])}" for each in (arrays["train_images"], images)]
        if kinds[0] != kinds[1]:
            raise ConfigurationError(
                f"{path}: train_images are {kinds[0]} each, {split}_images {kinds[1]}. All must be alike."
            )
        pixels = _pixels(f"{path}: {split}_images", images)
        classes = _classes(f"{path}: {split}_labels", labels, len(images))
        present = np.union1d(present, classes)
        sets[split] = tensor_set(pixels, classes)
    number = int(present.max(initial=0)) + 1
    if len(present) < number:
        raise ConfigurationError(
            f"{path}: the labels are {in_words(present.tolist())}, not 0 .. {len(present) - 1}. Number them anew, such "
            "as by numpy.unique with return_inverse=True."
        )
    train = sets["train"]
    for name, array in arrays.items():
        attribute = name.removeprefix("train_")
        if name.startswith("train_") and array.shape[:1] == (len(train),) and not hasattr(train, attribute):
            setattr(train, attribute, array)
    return ImageData(train, sets["test"], sets.get("val"), number, tuple(map(str, range(number))))


def _arrays(path: Path) -> dict[str, np.ndarray]:
    if not zipfile.is_zipfile(path):  # numpy would advise to unpickle it
        raise ConfigurationError(f"{path} cannot be read as an .npz archive of plain arrays: it is no zip file.")
    try:
        with np.load(path) as archive:
            return {name: np.asarray(archive[name]) for name in archive.files}
    except Exception as error:  # zlib's, zipfile's, numpy's own and memory's: whichever, the file cannot be used
        raise ConfigurationError(
            f"{path} cannot be read as an .npz archive of plain arrays: {error}. Write it by numpy.savez, or fetch it "
            "again."
        ) from error


def _pixels(where: str, images: np.ndarray) -> Tensor:
    """Float32 ``[N, C, H, W]``."""
    if images.ndim != 3 and not (images.ndim == 4 and images.shape[3] in (1, 3)):
        raise ConfigurationError(
            f"{where} has shape {list(images.shape)}; [N, H, W], [N, H, W, 1] or [N, H, W, 3] is needed."
        )
    if images.dtype == np.uint8:
        return image_tensor(images, mean=[0.5], std=[0.5])
    if images.dtype.kind != "f":
        raise ConfigurationError(
            f"{where} is {images.dtype}, whose scale is unknown. Save pixels as uint8 in 0 .. 255, or as "
            "floating-point numbers as the model shall see them."
        )
    pixels = torch.from_numpy(images.astype(np.float32))
    bad = (~torch.isfinite(pixels)).flatten(1).any(1).nonzero().flatten().tolist()
    if bad:
        raise ConfigurationError(
            f"{where}: {len(bad)} of {len(pixels)} images have NaN or infinite pixels: {in_words(bad)}. Repair them or "
            "leave them out."
        )
    return pixels[:, None] if pixels.ndim == 3 else pixels.permute(0, 3, 1, 2).contiguous()


def _classes(where: str, labels: np.ndarray, length: int) -> np.ndarray:
    """Int64 ``[N]``."""
    labels = labels[:, 0] if labels.ndim == 2 and labels.shape[1] == 1 else labels
    if labels.shape != (length,):
        raise ConfigurationError(
            f"{where} has shape {list(labels.shape)} for {length} images. One class per image is needed, [N] or "
            f"[N, 1]; multi-label data are not supported."
        )
    try:
        return whole_numbers(labels)
    except ValueError as error:
        raise ConfigurationError(f"{where}: {error}. One whole number from 0 up is needed per image.") from error
