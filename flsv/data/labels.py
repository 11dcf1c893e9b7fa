"""Each sample's class and natural group, found without decoding images where that can be helped."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor
from torch.utils.data import ConcatDataset, Dataset, Subset, TensorDataset

from flsv.errors import ConfigurationError

_LABEL_KEYS = ("label", "labels", "target", "targets", "y")


def dataset_labels(dataset: Dataset) -> Tensor:
    """The class of every sample, int64 ``[N]``.

    Taken from the last tensor of a ``TensorDataset`` or an attribute ``targets`` or ``labels`` of length N, through
    ``Subset`` and ``ConcatDataset``; otherwise every sample is read once, as ``(x, ..., label)`` or as a dictionary
    with ``label``, ``labels``, ``target``, ``targets`` or ``y``.

    Raises:
        ConfigurationError: samples without one non-negative whole number each.

    Example:
        >>> dataset_labels(Subset(TensorDataset(torch.zeros(3, 2), torch.tensor([4, 5, 6])), [2, 0]))
        tensor([6, 4])
    """
    try:
        stored = _stored_labels(dataset)
        found = np.asarray(_read_labels(dataset) if stored is None else stored)
    except (TypeError, ValueError, KeyError, IndexError) as error:
        raise ConfigurationError(_unusable(dataset, str(error))) from error
    if found.ndim == 2 and found.shape[1] == 1:
        found = found[:, 0]
    if found.ndim != 1:
        raise ConfigurationError(_unusable(dataset, f"found {found.dtype} of shape {list(found.shape)}"))
    try:
        return torch.from_numpy(whole_numbers(found))
    except ValueError as error:
        raise ConfigurationError(_unusable(dataset, str(error))) from error


def whole_numbers(found: np.ndarray) -> np.ndarray:
    """Labels ``[N]`` of any type as int64.

    Raises:
        ValueError: one that is no whole number from 0 up, with its position.
    """
    if found.dtype.kind not in "biuf":
        raise ValueError(f"found {found.dtype} of shape {list(found.shape)}")
    with np.errstate(invalid="ignore"):  # NaN and what is too large
        labels = found.astype(np.int64)
    wrong = np.nonzero((labels != found) | (labels < 0))[0]
    if len(wrong):
        raise ValueError(
            f"found values that are not whole numbers from 0 up, {len(wrong)} of {len(found)}, such as "
            f"{found[wrong[0]]} at {wrong[0]}"
        )
    return labels


def count_classes(labels: Tensor, class_names: Sequence[str], held_out: Mapping[str, Dataset | None]) -> int:
    """How many classes there are: as many as have names, or one more than the largest label.

    Without names, a class that no training sample has is warned of: it may be one that does not exist.

    Args:
        labels: of the training data, int64 ``[N]``.
        class_names: of the source, perhaps none.
        held_out: validation and test data by name; their labels are looked at where they lie ready.

    Raises:
        ConfigurationError: labels that are no whole numbers from 0 up, or one far above all others.

    Example:
        >>> count_classes(torch.tensor([0, 1, 2, 0]), (), {"test": TensorDataset(torch.zeros(1, 2), torch.tensor([1]))})
        3
    """
    everywhere = [labels]
    everywhere += [dataset_labels(data) for data in held_out.values() if data is not None and has_labels(data)]
    present = torch.cat(everywhere).unique()
    largest = int(present[-1])
    if largest < len(class_names):
        return len(class_names)
    check_largest("The data", largest, len(present))
    absent = np.setdiff1d(np.arange(largest + 1), labels.numpy())
    if len(absent) and not class_names:
        rank_zero_warn(
            f"The labels are classes 0 .. {largest}, but no training sample is of class {in_words(absent.tolist())}: "
            f"the model has untrained outputs, and values per class, for what may not exist. Number the classes from 0 "
            f"without gaps, or give the training data an attribute `classes` with the names of all."
        )
    return largest + 1


def check_largest(where: str, largest: int, distinct: int) -> None:
    """Raise ConfigurationError where a label is so large that it must be a mistake: a class each is to be counted."""
    if largest >= 1000 and largest >= 10 * distinct:
        raise ConfigurationError(
            f"{where}: the largest label is {largest}, and there are only {distinct} different ones. Classes are "
            f"numbered 0 .. M-1: a label of that size is a mistake, or an identifier to be numbered anew "
            f"(numpy.unique with return_inverse=True)."
        )


def in_words(numbers: Sequence[int], most: int = 6) -> str:
    """Some ascending numbers, shortened: runs as ``first .. last``.

    Example:
        >>> in_words([0, 1, 2, 3, 7, 9, 10])
        '0 .. 3, 7, 9, 10'
    """
    starts = [i for i, number in enumerate(numbers) if i == 0 or number != numbers[i - 1] + 1]
    runs = [numbers[a:b] for a, b in zip(starts, [*starts[1:], len(numbers)])]
    words = [f"{run[0]} .. {run[-1]}" if len(run) > 2 else ", ".join(map(str, run)) for run in runs]
    return ", ".join(words[:most]) + (", ..." if len(words) > most else "")


def dataset_groups(dataset: Dataset, groups: Any = None) -> Tensor | None:
    """The natural group of every sample, int64 ``[N]`` numbered in sorted order, or None.

    Args:
        dataset: the training data.
        groups: one entry (number or string) per sample, or the name of an attribute of ``dataset`` that has them; None
            looks for an attribute ``groups``.

    Raises:
        ConfigurationError: no attribute of that name, or a length that is not the data set's.

    Example:
        >>> dataset_groups(TensorDataset(torch.zeros(3, 2)), ["St Mary", "General", "St Mary"])
        tensor([1, 0, 1])
    """
    if groups is None or isinstance(groups, str):
        name = groups or "groups"
        found = _attribute(dataset, name)
        if found is None:
            if groups is None:
                return None
            raise ConfigurationError(
                f"groups={name!r}: {type(dataset).__name__} has no attribute {name!r} with one entry per sample. Name "
                f"one that it has, or give the groups as a list."
            )
        groups = found
    ids = np.asarray(groups)
    length = len(dataset)  # type: ignore[arg-type]
    if ids.shape != (length,):
        raise ConfigurationError(
            f"groups needs one entry per training sample, [{length}]; got shape {list(ids.shape)}."
        )
    return torch.from_numpy(np.unique(ids, return_inverse=True)[1].reshape(-1).astype(np.int64))


def has_labels(dataset: Dataset) -> bool:
    """Whether :func:`dataset_labels` finds labels without reading a sample."""
    try:
        return _stored_labels(dataset) is not None
    except (TypeError, ValueError, KeyError, IndexError):
        return True  # and dataset_labels says what is wrong with them


def class_names_of(dataset: Dataset) -> tuple[str, ...]:
    """The data set's attribute ``classes``, found through ``Subset``; empty without one."""
    while isinstance(dataset, Subset):
        dataset = dataset.dataset
    return tuple(map(str, getattr(dataset, "classes", ())))


def _stored_labels(dataset: Dataset) -> Any:
    """Labels that lie ready, or None."""
    if isinstance(dataset, Subset):
        whole = _stored_labels(dataset.dataset)
        return None if whole is None else np.asarray(whole)[np.asarray(dataset.indices, dtype=np.int64)]
    if isinstance(dataset, ConcatDataset):
        parts = [_stored_labels(part) for part in dataset.datasets]
        return None if any(part is None for part in parts) else np.concatenate([np.asarray(part) for part in parts])
    if type(dataset) is TensorDataset:
        return dataset.tensors[-1].cpu() if len(dataset.tensors) > 1 else None
    for name in ("targets", "labels"):
        stored = _attribute(dataset, name)
        if stored is not None:
            # What a loader yields is the label after torchvision's target_transform.
            change = getattr(dataset, "target_transform", None)
            return stored if change is None else [change(label) for label in stored]
    return None


def _read_labels(dataset: Dataset) -> list[Any]:
    labels = []
    for index in range(len(dataset)):  # type: ignore[arg-type]
        sample = dataset[index]
        if isinstance(sample, dict):
            label = next((sample[key] for key in _LABEL_KEYS if key in sample), None)
        else:
            label = sample[-1] if isinstance(sample, list | tuple) and len(sample) > 1 else None
        if label is None:
            raise ValueError("a sample is neither (x, ..., label) nor a dictionary with a label")
        labels.append(np.asarray(label))
    return labels


def _attribute(dataset: Dataset, name: str) -> Sequence[Any] | Tensor | np.ndarray | None:
    """A per-sample attribute, found through ``Subset``; None where there is none, or not of the data set's length."""
    if isinstance(dataset, Subset) and not hasattr(dataset, name):
        whole = _attribute(dataset.dataset, name)
        return None if whole is None else np.asarray(whole)[np.asarray(dataset.indices, dtype=np.int64)]
    value = getattr(dataset, name, None)
    # Tensors may live on another device, where numpy does not reach them.
    value = value.cpu() if isinstance(value, Tensor) else value
    try:
        return value if value is not None and len(value) == len(dataset) else None  # type: ignore[arg-type]
    except TypeError:
        return None


def _unusable(dataset: Dataset, why: str) -> str:
    return (
        f"No class labels in {type(dataset).__name__}: {why}. One whole number per sample is needed, as an attribute "
        f"`targets` of the data set or as the last element of each sample."
    )
