"""Read a data set once and keep it as tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset, TensorDataset, default_collate

from flsv.data.held_generators import SeededLoader
from flsv.errors import ConfigurationError


def preload(
    dataset: Dataset, collate_fn: Callable[[list[Any]], Any] | None = None, num_workers: int = 0
) -> TensorDataset:
    """The whole of ``dataset`` in memory, so that batches need no Python per sample.

    For data sets that decode or transform each sample anew, always to the same result. Random augmentation would be
    frozen at its first draw: use ``train_transform`` for it.

    Args:
        dataset: map-style; samples are tuples of equally shaped tensors or numbers.
        collate_fn: what turns a list of samples into a tuple of tensors, by default torch's.
        num_workers: processes that read.

    Raises:
        ConfigurationError: samples that do not collate to a tuple of tensors of one length.

    Example:
        >>> class Squares(torch.utils.data.Dataset):
        ...     def __len__(self):
        ...         return 3
        ...     def __getitem__(self, index):
        ...         return torch.tensor([float(index)]), index**2
        >>> preload(Squares()).tensors
        (tensor([[0.],
                [1.],
                [2.]]), tensor([0, 1, 4]))
    """
    if type(dataset) is TensorDataset and collate_fn in (None, default_collate):
        return dataset
    length = len(dataset)  # type: ignore[arg-type]
    loader = SeededLoader(
        dataset,
        batch_size=256,
        collate_fn=collate_fn or default_collate,
        num_workers=num_workers,
        generator=torch.Generator().manual_seed(0),
    )
    columns: list[Tensor] = []
    start = 0
    for batch in loader:
        fields = batch if isinstance(batch, list | tuple) else ()
        if not fields or not all(isinstance(field, Tensor) for field in fields):
            raise ConfigurationError(
                f"preload=True needs samples that collate to a tuple of tensors; a batch of {type(dataset).__name__} "
                f"is {type(batch).__name__}. Leave preload off for this data set."
            )
        # Filled in place: collecting batches and joining them at the end would need twice the memory.
        columns = columns or [field.new_empty((length, *field.shape[1:])) for field in fields]
        for column, field in zip(columns, fields, strict=True):
            column[start : start + len(field)] = field
        start += len(fields[0])
    return TensorDataset(*columns)
