"""Each sample's natural group: a hospital, a writer, a device."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset, Subset

from flsv.data.columns import attribute, column
from flsv.data.names import plain_names
from flsv.errors import ConfigurationError


def dataset_groups(dataset: Dataset, groups: Any = None) -> Tensor | None:
    """The natural group of every sample, int64 ``[N]`` numbered in sorted order, or None; see :func:`named_groups`.

    Example:
        >>> dataset_groups(torch.utils.data.TensorDataset(torch.zeros(3, 2)), ["St Mary", "General", "St Mary"])
        tensor([1, 0, 1])
    """
    found = named_groups(dataset, groups)
    return None if found is None else found[0]


def named_groups(dataset: Dataset, groups: Any = None) -> tuple[Tensor, tuple[str, ...]] | None:
    """The natural group of every sample, int64 ``[N]`` numbered in sorted order, and the groups' names; or None.

    Args:
        dataset: the training data. Its attribute ``group_kind`` says what its attribute ``groups`` are, such as
            ``"school"``.
        groups: one entry (number or string) per sample, or the name of an attribute of ``dataset`` or of a field of its
            samples that has them; None looks for an attribute ``groups``.

    Raises:
        ConfigurationError: nothing of that name, a length that is not the data set's, or entries that are missing.

    Example:
        >>> data = torch.utils.data.TensorDataset(torch.zeros(3, 2))
        >>> named_groups(data, [7, 3, 7])
        (tensor([1, 0, 1]), ('group 3', 'group 7'))
    """
    kind = "group"
    if groups is None:
        groups = attribute(dataset, "groups")
        if groups is None:
            return None
        kind = kind_of_groups(dataset) or kind
    elif isinstance(groups, str):
        kind = kind if groups in ("group", "groups") else groups.rpartition(".")[2]
        groups = column(dataset, groups, "groups")
    elif callable(groups):
        raise ConfigurationError(
            "groups is a function. Expected one entry per training sample, or the name of a field of the samples, such "
            "as 'site' or, of a field within a field, 'meta.site'."
        )
    ids = np.asarray(groups)
    length = len(dataset)  # type: ignore[arg-type]
    if ids.shape != (length,):
        raise ConfigurationError(
            f"groups needs one entry per training sample, [{length}]; got shape {list(ids.shape)}."
        )
    # NaN is not itself.
    gaps = [i for i, entry in enumerate(ids) if entry is None or entry != entry]
    if gaps:
        raise ConfigurationError(
            f"groups: {len(gaps)} of {length} training samples have none (None or NaN), such as sample {gaps[0]}. Give "
            f"them a group, or leave them out of the training data."
        )
    try:
        found, numbers = np.unique(ids, return_inverse=True)
    except TypeError as error:
        raise ConfigurationError(f"groups mixes kinds of entries ({error}). Make all of them strings.") from error
    return torch.from_numpy(numbers.reshape(-1).astype(np.int64)), plain_names(found.tolist(), kind)


def kind_of_groups(dataset: Dataset) -> str | None:
    """What the groups of a data set are, found through ``Subset``."""
    while isinstance(dataset, Subset) and not hasattr(dataset, "group_kind"):
        dataset = dataset.dataset
    return getattr(dataset, "group_kind", None)
