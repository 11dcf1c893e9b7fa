"""What every source of data is brought to, and every data set by name."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeAlias

import lightning as L
import numpy as np
import pandas as pd
import torch
from torch import Tensor
from torch.utils.data import Dataset, TensorDataset

from flsv.data.sources.columns import Columns
from flsv.data.sources.table import Table, data_root
from flsv.declared import Count, checked
from flsv.errors import ConfigurationError, listed

if TYPE_CHECKING:  # arrays, a DataFrame, a path, what a package of somebody else's reads
    Whole: TypeAlias = Any
else:
    # What the command line can make. A data module before str, so that YAML may give it as a bare class path; Dataset
    # after str, or the names of torchvision's sets would be taken for its classes.
    Whole = L.LightningDataModule | str | Dataset | Sequence[Dataset]


@dataclass(frozen=True)
class ColumnCard:
    """What became of a column of a table.

    Args:
        name: of it.
        kind: what it was taken for, such as ``"numbers"``, ``"categories"``, ``"left out"``.
        values: of the training samples, numbers or words, ``[N]``; NaN where there is none.
        categories: of words, those that the training rows have, sorted; None for others.
    """

    name: str
    kind: str
    values: pd.Series
    categories: Sequence[str] | None = None

    @property
    def became(self) -> str:
        """In words."""
        if self.categories is not None:
            return f"{len(self.categories)} categories"
        return {"numbers": "a number", "truth values": "0 or 1"}.get(self.kind, self.kind)


@dataclass(frozen=True)
class SourceData:
    """What every source provides.

    Args:
        train: the training data, map-style.
        val: the source's own validation data, or None.
        val_loaders: a loader, or several, to validate with as they are, where ``val`` would not do them justice.
        test: test data, or None.
        indices: which samples of ``train`` may be used, int64 ``[n]``; None for all.
        class_names: names of the classes, empty where the source has none.
        train_options: ``batch_size`` and what else a ``DataLoader`` is told, as far as the source says.
        eval_options: the same for evaluation.
        groups: number of each training sample's group, int64 ``[N]``, where the source itself says what they are.
        group_names: their names, by number.
        clients: whether these groups are the clients that somebody gave: none may be lost, none dealt anew.
        labeled: whether the targets are the column that ``labels`` names.
        pooled: whether inputs were made with numbers of all training samples, such as their means.
        columns: what became of the columns, of a table.
        fitted: gives the same data with inputs that could not be made before it was known on which samples the clients
            train (their indices, client by client); None where the inputs are there.
    """

    train: Dataset
    val: Dataset | None = None
    val_loaders: Iterable[Any] | None = None
    test: Dataset | None = None
    indices: Tensor | None = None
    class_names: tuple[str, ...] = ()
    train_options: dict[str, Any] = field(default_factory=dict)
    eval_options: dict[str, Any] = field(default_factory=dict)
    groups: Tensor | None = None
    group_names: tuple[str, ...] = ()
    clients: bool = False
    labeled: bool = False
    pooled: bool = False
    columns: tuple[ColumnCard, ...] = ()
    fitted: Callable[[Sequence[Tensor]], SourceData] | None = None

    @property
    def num_classes(self) -> int:
        """Number of classes that have names."""
        return len(self.class_names)


@checked
@dataclass(frozen=True)
class Files:
    """Where the source's files are, and how images are read.

    Args:
        root: folder of the data sets and files that are named; None: ``$FLSV_DATA_ROOT``, else ``data``.
        download: fetch torchvision's data sets if they are missing.
        image_size: side in pixels to which the images of a folder are resized.

    Raises:
        ConfigurationError: an ``image_size`` below 1, or anything of another type.
    """

    root: str | None = None
    download: bool = False
    image_size: Count = 224

    def __post_init__(self) -> None:
        object.__setattr__(self, "root", str(data_root(self.root)))


@dataclass(frozen=True)
class Reading:
    """How data are read.

    Args:
        files: where files are, and the size of a folder's images.
        label: the column to predict, of what has columns.
        group: the column that says whose the rows are.
        columns: how the other columns become inputs.
    """

    files: Files = field(default_factory=Files)
    label: str | None = None
    group: str | None = None
    columns: Columns = field(default_factory=Columns)

    def table_label(self, table: Table) -> str:
        """The column to predict of a table.

        Raises:
            ConfigurationError: it was not said, or there is none of that name.
        """
        if self.label is None:
            has = f"It has {listed(table.frame.columns, 20)}."
            raise ConfigurationError(f"{table.path} is a table: say labels, the column to predict. {has}")
        table.column(self.label, "labels")
        return self.label


def image_tensor(images: Any, mean: Sequence[float] = (0.0,), std: Sequence[float] = (1.0,)) -> Tensor:
    """8-bit images as a normalized float32 tensor ``[N, C, H, W]``: ``(pixel / 255 - mean) / std`` by channel.

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
