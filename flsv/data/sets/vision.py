"""MNIST, Fashion-MNIST, CIFAR-10 and CIFAR-100 from torchvision's files, as tensors."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import torch
from torchvision import datasets

from flsv.data.sets.base import ImageData, image_tensor, tensor_set
from flsv.errors import ConfigurationError


class _Kind(NamedTuple):
    cls: Any
    folder: str
    mean: tuple[float, ...]
    std: tuple[float, ...]


# Mean and standard deviation by channel of the training pixels in 0 .. 1.
KINDS = {
    "mnist": _Kind(datasets.MNIST, "MNIST/raw", (0.1307,), (0.3081,)),
    "fashion_mnist": _Kind(datasets.FashionMNIST, "FashionMNIST/raw", (0.2860,), (0.3530,)),
    "cifar10": _Kind(datasets.CIFAR10, "cifar-10-batches-py", (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)),
    "cifar100": _Kind(datasets.CIFAR100, "cifar-100-python", (0.5071, 0.4865, 0.4409), (0.2673, 0.2564, 0.2762)),
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
    kind = KINDS[name]
    place = Path(root).absolute() / kind.folder
    sets = []
    for train in (True, False):
        try:
            part = kind.cls(root, train=train, download=download)
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
