"""Options of a federation's data that belong together, each set an object that checks itself."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from flsv.arguments import check_number
from flsv.errors import ConfigurationError
from flsv.valuation import FedBary


@dataclass(frozen=True)
class Splits:
    """What is set aside before and after partitioning, and what is left out.

    Args:
        server_val: share of the training data that the server validates on, taken out before partitioning, unless the
            source has validation data of its own; 0 for none.
        client_val: share of each client's samples for its own validation set, at least one sample unless 0.
        client_test: the same for its own test set.
        max_samples: use a random subset of so many training samples (the server's included); None for all.
        drop_flagged: leave out the training samples that the clients flag when they value them against the server's
            validation set (or, without one, each other), see :class:`flsv.valuation.FedBary`; True for its defaults.
        seed: seed of all splits but the partition, which has its own.

    Raises:
        ConfigurationError: a share outside ``[0, 1)``, nothing left for training, or ``max_samples`` below 1.

    Example:
        >>> Splits(client_test=1.0)
        Traceback (most recent call last):
        ...
        flsv.errors.ConfigurationError: Splits(client_test=1.0): a share lies in [0, 1); 0.1 is 10 %.
    """

    server_val: float = 0.1
    client_val: float = 0.0
    client_test: float = 0.0
    max_samples: int | None = None
    drop_flagged: bool | FedBary = False
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("server_val", "client_val", "client_test"):
            if not 0 <= getattr(self, name) < 1:
                raise ConfigurationError(f"Splits({name}={getattr(self, name)}): a share lies in [0, 1); 0.1 is 10 %.")
        if self.client_val + self.client_test >= 1:
            raise ConfigurationError(
                f"Splits(client_val={self.client_val}, client_test={self.client_test}) leaves nothing to train on. "
                "Their sum must be below 1."
            )
        if self.max_samples is not None and self.max_samples < 1:
            raise ConfigurationError(f"Splits(max_samples={self.max_samples}): it must be at least 1, or null for all.")

    @cached_property
    def detector(self) -> FedBary | None:
        """What flags samples; None: none are left out."""
        return FedBary() if self.drop_flagged is True else self.drop_flagged or None


@dataclass(frozen=True)
class Files:
    """Where the source's files are, and how images are read.

    Args:
        root: folder of the data sets and files that are named.
        download: fetch torchvision's data sets if they are missing.
        image_size: side in pixels to which the images of a folder are resized.

    Raises:
        ConfigurationError: an ``image_size`` below 1.
    """

    root: str = "data"
    download: bool = False
    image_size: int = 224

    def __post_init__(self) -> None:
        check_number(self, "image_size", self.image_size, least=1, whole=True)


@dataclass(frozen=True)
class Loader:
    """How batches are read, in ``DataLoader``'s own names; where an option is None, as the wrapped loader reads them.

    Args:
        eval_batch_size: samples per evaluation batch; None for the wrapped loader's, else ``batch_size``, and at least
            256 for data held as tensors.
        drop_last: leave out a client's last training batch if not full; None for the wrapped loader's, else False.
        num_workers: processes that read data that are not tensors; None for the wrapped loader's, else 0.
        pin_memory: likewise; None for the wrapped loader's, else False.
        preload: read every sample once and keep it as tensors; not for data sets that augment at random.
        on_device: whether data held as tensors lie on the trainer's accelerator during a federated fit, where batches
            are gathered without a copy, the same to the bit. ``"auto"``: if they take at most a quarter of the memory
            that is free there when the fit begins, and neither module has hooks that are handed batches before they are
            there; training data with a ``train_transform`` are left where they are, since it may draw random numbers.
            True: always; the transform and the hooks are then given the accelerator's tensors. The batches of clients
            with corrupted inputs are copied one by one as ever.

    Raises:
        ConfigurationError: an ``eval_batch_size`` below 1, another ``on_device``.
    """

    eval_batch_size: int | None = None
    drop_last: bool | None = None
    num_workers: int | None = None
    pin_memory: bool | None = None
    preload: bool = False
    on_device: bool | Literal["auto"] = "auto"

    def __post_init__(self) -> None:
        check_size("eval_batch_size", self.eval_batch_size)
        if not (isinstance(self.on_device, bool) or self.on_device == "auto"):
            raise ConfigurationError(f'Loader(on_device={self.on_device!r}): expected "auto", True or False.')

    def said(self) -> dict[str, bool | int]:
        """What replaces the options of the source's own loaders."""
        given = {"drop_last": self.drop_last, "num_workers": self.num_workers, "pin_memory": self.pin_memory}
        return {name: value for name, value in given.items() if value is not None}


def check_size(name: str, size: int | None) -> None:
    """Raise ConfigurationError for a batch size below 1."""
    if size is not None and size < 1:
        raise ConfigurationError(f"{name}={size}: it must be at least 1.")
