"""What a data set has for every sample beside the samples: columns, by name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from torch import Tensor
from torch.utils.data import ConcatDataset, Dataset, Subset

from flsv.errors import ConfigurationError


def attribute(dataset: Dataset, name: str) -> Sequence[Any] | Tensor | np.ndarray | None:
    """A per-sample attribute, found through ``Subset`` and ``ConcatDataset``.

    Returns:
        None where there is none, or not of the data set's length.
    """
    if isinstance(dataset, Subset) and not hasattr(dataset, name):
        whole = attribute(dataset.dataset, name)
        return None if whole is None else np.asarray(whole)[np.asarray(dataset.indices, dtype=np.int64)]
    if isinstance(dataset, ConcatDataset) and not hasattr(dataset, name):
        parts = [attribute(part, name) for part in dataset.datasets]
        return None if any(part is None for part in parts) else np.concatenate([np.asarray(part) for part in parts])
    value = getattr(dataset, name, None)
    # Tensors may live on another device, where numpy does not reach them.
    value = value.cpu() if isinstance(value, Tensor) else value
    try:
        return value if value is not None and len(value) == len(dataset) else None  # type: ignore[arg-type]
    except TypeError:
        return None


def column(dataset: Dataset, name: str, argument: str) -> Any:
    """What every sample has under this name: an attribute of the data set, or a field of each sample.

    Args:
        dataset: map-style; its samples are read where it has no such attribute.
        name: of the attribute, or of a key or an attribute of the samples; ``"meta.site"`` is ``site`` in ``meta``.
        argument: what the name was given as, for the message.

    Raises:
        ConfigurationError: nothing of that name.
    """
    found = attribute(dataset, name)
    if found is None:
        values = []
        for index in range(len(dataset)):  # type: ignore[arg-type]
            value = _field(dataset[index], name)
            if value is None or callable(value):
                break
            values.append(value.item() if isinstance(value, Tensor) and value.numel() == 1 else value)
        found = values if len(values) == len(dataset) else None  # type: ignore[arg-type]
    if found is None:
        raise ConfigurationError(
            f"{argument}={name!r}: {type(dataset).__name__} has no attribute {name!r} with one entry per sample, and "
            f"its samples have no such field. Name one that there is, or give {argument} as a list."
        )
    return found


def _field(sample: Any, name: str) -> Any:
    """What a sample has under a name, or under its parts before and after a dot; None: nothing."""
    value = sample.get(name) if isinstance(sample, Mapping) else getattr(sample, name, None)
    outer, dot, inner = name.partition(".")
    return _field(_field(sample, outer), inner) if value is None and dot else value
