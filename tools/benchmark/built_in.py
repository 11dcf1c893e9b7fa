"""Data and corruptions of the benchmark's federations that need no download."""
# Federations of clinics often have one common class and some rare ones, unlike public image data. So classes can be
# merged and made smaller, also in the server's validation set.

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Annotated, Any, Literal

import lightning as L
import numpy as np
import torch
from annotated_types import Gt, Le, Lt
from sklearn.datasets import load_diabetes, load_digits
from sklearn.model_selection import train_test_split
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from flsv.data import Corruption
from flsv.utilities.declared import Count, checked
from flsv.utilities.errors import ConfigurationError

LOADERS = {"diabetes": load_diabetes, "digits": load_digits}
#: Data sets whose target is a number.
REGRESSIONS = ("diabetes",)
#: A stratified split needs one sample of each class to train, and one to validate.
MIN_ROWS_PER_CLASS = 2


@checked
class BuiltInData(L.LightningDataModule):
    """Data module of ``"digits"`` or ``"diabetes"`` of scikit-learn, with a fixed split.

    Example:
        >>> data = BuiltInData("digits", merge=8, keep=[1.0, 0.5, 0.25], val_fraction=0.5)
        >>> torch.bincount(data.train_set.tensors[1])
        tensor([721,  43,  23])
        >>> data.train_set.tensors[0].shape
        torch.Size([787, 64])
    """

    # Samples are (float32 [D], int64 class or float32 number). Features and number targets are standardized over the
    # training samples. `merge` classes, from the first, become class 0, of which 1 merges none. `keep` is each class's
    # kept share after merging.

    def __init__(
        self,
        name: Literal["digits", "diabetes"] = "digits",
        merge: Count = 1,
        keep: list[Annotated[float, Gt(0), Le(1)]] | None = None,
        val_fraction: Annotated[float, Gt(0), Lt(1)] = 0.3,
    ) -> None:
        super().__init__()
        has_classes = name not in REGRESSIONS
        if not has_classes and (merge > 1 or keep is not None):
            raise ConfigurationError(
                f"BuiltInData({name!r}): merge and keep are of classes, and it has none."
            )
        inputs, targets = LOADERS[name](return_X_y=True)
        if has_classes:
            # The first `merge` classes become class 0.
            targets = np.maximum(targets - (merge - 1), 0)
            rows = _rows_by_share(targets, keep)
            inputs = inputs[rows]
            targets = targets[rows]
        train_rows, val_rows = train_test_split(
            np.arange(len(targets)),
            test_size=val_fraction,
            stratify=targets if has_classes else None,
            random_state=0,
        )

        x = _standardized(inputs, train_rows)
        if has_classes:
            y = torch.from_numpy(targets).long()
        else:
            y = _standardized(targets[:, None], train_rows)[:, 0]
        self.train_set = TensorDataset(x[train_rows], y[train_rows])
        self.val_set = TensorDataset(x[val_rows], y[val_rows])

    def train_dataloader(self) -> DataLoader[Any]:
        """Return a loader of shuffled training batches of 32 samples."""
        return DataLoader(self.train_set, batch_size=32, shuffle=True)

    def val_dataloader(self) -> DataLoader[Any]:
        """Return a loader of all validation samples in one batch."""
        return DataLoader(self.val_set, batch_size=len(self.val_set))


def _standardized(columns: np.ndarray, rows: np.ndarray) -> Tensor:
    """Subtract the columns' mean over these rows, and divide by their deviation."""
    mean = columns[rows].mean(0)
    deviation = columns[rows].std(0)
    divisor = np.where(deviation > 0, deviation, 1)
    return torch.tensor((columns - mean) / divisor, dtype=torch.float32)


def _rows_by_share(
    targets: np.ndarray,
    keep: Sequence[float] | None,
) -> np.ndarray:
    """Return the indices of each class's first samples: its fraction in ``keep``, at least two."""
    if keep is None:
        return np.arange(len(targets))
    num_classes = int(targets.max()) + 1
    if len(keep) != num_classes:
        raise ConfigurationError(
            f"BuiltInData(keep={keep}): expected a share in (0, 1] for each of {num_classes} classes."
        )
    rows = []
    for class_index, share in enumerate(keep):
        class_rows = np.flatnonzero(targets == class_index)
        num_rows = max(MIN_ROWS_PER_CLASS, round(share * len(class_rows)))
        rows.append(class_rows[:num_rows])
    return np.sort(np.concatenate(rows))


class Duplicates(Corruption):
    """Corruption that replaces most samples of a client by copies of its others.

    The first ``ceil(unique * n)`` of a client's n samples, in a random order, are copied about equally often. These
    copies replace all other samples. The client reports n samples.

    Args:
        unique: share of a client's samples that are not copies, above 0 and at most 1. At least one sample stays.
        clients: ids of the clients whose data are changed, see :class:`flsv.data.ClientChoice`.
        fraction: share of the clients whose data are changed, in place of ``clients``.
        seed: seed of the choice of clients and samples.

    Raises:
        ConfigurationError: a share is out of range.

    Example:
        >>> x, y = torch.arange(10.0)[:, None], torch.arange(10)
        >>> copies, _ = Duplicates(unique=0.2)(x, y, num_classes=10, generator=torch.Generator().manual_seed(0))
        >>> len(copies), len(copies.unique())
        (10, 2)
    """

    needs_classes = False

    def __init__(
        self,
        unique: Annotated[float, Gt(0), Le(1)] = 0.2,
        clients: list[int] | None = None,
        fraction: float | None = None,
        seed: int = 0,
    ) -> None:
        super().__init__(clients, fraction, seed)
        self.unique = unique

    def corrupt(
        self,
        x: Tensor,
        y: Tensor,
        num_classes: int,
        generator: torch.Generator,
    ) -> tuple[Tensor, Tensor]:
        num_unique = max(1, math.ceil(self.unique * len(x)))
        order = torch.randperm(len(x), generator=generator)
        # The originals, which are first in this order, replace all samples in turn.
        turns = torch.arange(len(x)) % num_unique
        originals = order[:num_unique]
        source = torch.empty_like(order)
        source[order] = originals[turns]
        return x[source], y[source]


class LostInputs(Corruption):
    """Corruption that sets the last fraction ``share`` of each sample's inputs to 0.

    Example:
        >>> LostInputs(0.5)(torch.ones(1, 2, 2), torch.zeros(1), num_classes=2, generator=torch.Generator())[0]
        tensor([[[1., 1.],
                 [0., 0.]]])
    """

    needs_classes = False

    def __init__(
        self, share: Annotated[float, Gt(0), Lt(1)] = 0.5, clients: list[int] | None = None
    ) -> None:
        super().__init__(clients)
        self.share = share

    def corrupt(
        self, x: Tensor, y: Tensor, num_classes: int, generator: torch.Generator
    ) -> tuple[Tensor, Tensor]:
        inputs = x.flatten(1).clone()
        num_kept = round(inputs.shape[1] * (1 - self.share))
        inputs[:, num_kept:] = 0
        return inputs.view_as(x), y


class TurnedInputs(Corruption):
    """Corruption that reverses the order of each sample's inputs, like a sensor mounted upside down.

    Example:
        >>> TurnedInputs()(torch.arange(3.0)[None], torch.zeros(1), num_classes=2, generator=torch.Generator())[0]
        tensor([[2., 1., 0.]])
    """

    needs_classes = False

    def __init__(self, clients: list[int] | None = None) -> None:
        super().__init__(clients)

    def corrupt(
        self, x: Tensor, y: Tensor, num_classes: int, generator: torch.Generator
    ) -> tuple[Tensor, Tensor]:
        return x.flatten(1).flip(1).view_as(x), y
