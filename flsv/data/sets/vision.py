"""MNIST, Fashion-MNIST, CIFAR-10 and CIFAR-100 from torchvision's files, as tensors."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

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
    parts = []
    for train in (True, False):
        try:
            parts.append(kind.cls(root, train=train, download=download))
        # torchvision says "not found" and "corrupted" by RuntimeError, a failed download also by URLError (an OSError).
        except (RuntimeError, OSError) as error:
            place = Path(root).absolute() / kind.folder
            remedy = (
                f"The download failed ({error}). Fetch it by hand, or try again with a network."
                if download
                else f"Give root the folder that holds {kind.folder!r}, or say download: true."
            )
            raise ConfigurationError(f"{name} was not found: looked in {place}. {remedy}") from error
    sets = [tensor_set(image_tensor(part.data, kind.mean, kind.std), part.targets) for part in parts]
    names = tuple(parts[0].classes)
    return ImageData(sets[0], sets[1], None, len(names), names)
