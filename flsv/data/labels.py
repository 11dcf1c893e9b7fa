"""What a data set has for every sample beside the samples: columns by name, and each sample's class, found without
decoding images where that can be helped."""

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


def labels_or_why(dataset: Dataset, strict: bool = False) -> tuple[Tensor | None, str]:
    """The class of every sample as :func:`dataset_labels` finds it, or None and why the samples have none.

    Only integers are classes here: a floating-point number may be anything that is to be predicted. Samples are read
    no further than to the first that has no class. Integers that are no classes, below 0, are warned of, or refused.

    Args:
        dataset: map-style.
        strict: refuse integers that are no classes.

    Raises:
        ConfigurationError: a sample cannot be read; ``strict``.

    Example:
        >>> labels_or_why(TensorDataset(torch.zeros(3, 2), torch.zeros(3, 5)))
        (None, 'the labels are float32 [5] each')
    """
    try:
        stored = _stored_labels(dataset)
        found = None if stored is None else np.asarray(stored)
    except (TypeError, ValueError):
        return None, "the labels are of several lengths or kinds"
    if found is None:
        labels, why = _read_integers(dataset)
        if labels is None:
            return None, why
        found = np.asarray(labels)
    if why := _no_class(found[0] if found.dtype.kind == "O" else found, 1):
        return None, why
    try:
        return torch.from_numpy(whole_numbers(found.reshape(len(found)))), ""
    except ValueError as error:
        if strict:
            raise ConfigurationError(_unusable(dataset, str(error))) from error
        why = f"the labels are no classes ({error})"
        rank_zero_warn(
            f"{type(dataset).__name__}: {why}. They are taken for numbers to be predicted, not for classes; where they "
            f"are meant as classes, number these 0 .. M-1."
        )
        return None, why


def given_labels(dataset: Dataset, labels: Any) -> Tensor:
    """Labels that the user gave: one class per sample, or the name of a column; int64 ``[N]``.

    Args:
        dataset: the training data.
        labels: a list, or the name of an attribute of ``dataset`` or of a field of its samples.

    Raises:
        ConfigurationError: nothing of that name, another length, or no whole numbers from 0 up.

    Example:
        >>> given_labels(TensorDataset(torch.zeros(3, 2)), [4, 5, 6])
        tensor([4, 5, 6])
    """
    length = len(dataset)  # type: ignore[arg-type]
    found = np.asarray(column(dataset, labels, "labels") if isinstance(labels, str) else labels)
    if found.size != length or found.ndim == 0:
        raise ConfigurationError(
            f"labels needs one class per training sample, [{length}]; got shape {list(found.shape)}."
        )
    try:
        return torch.from_numpy(whole_numbers(found.reshape(length)))
    except ValueError as error:
        raise ConfigurationError(f"labels: {error}. Classes are numbered 0 .. M-1.") from error


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
    """The number of classes: the number of names, or the largest label plus one.

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
            f"without gaps, or give the training data an attribute `classes` with the names of all; labels=False says "
            f"that they are numbers and no classes."
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
        stored = attribute(dataset, name)
        if stored is not None:
            # What a loader yields is the label after torchvision's target_transform.
            change = getattr(dataset, "target_transform", None)
            return stored if change is None else [change(label) for label in stored]
    return None


def _read_labels(dataset: Dataset) -> list[Any]:
    labels = []
    for index in range(len(dataset)):  # type: ignore[arg-type]
        label = _label_of(dataset[index])
        if label is None:
            raise ValueError(_NO_LABEL)
        labels.append(np.asarray(label))
    return labels


def _read_integers(dataset: Dataset) -> tuple[list[Any] | None, str]:
    """The samples' labels as long as they are integers, else None and why."""
    labels = []
    for index in range(len(dataset)):  # type: ignore[arg-type]
        try:
            sample = dataset[index]
        except (TypeError, ValueError, KeyError, IndexError) as error:
            raise ConfigurationError(
                f"{type(dataset).__name__} cannot be read: sample {index} raises {type(error).__name__}: {error}. A "
                f"map-style data set is needed, which gives samples 0 .. {len(dataset) - 1}."  # type: ignore[arg-type]
            ) from error
        label = _label_of(sample)
        if label is None:
            return None, _NO_LABEL
        try:
            label = np.asarray(label)
        except (TypeError, ValueError):  # lists of several lengths, tensors elsewhere
            return None, f"the labels are {type(label).__name__} each"
        if why := _no_class(label, 0):
            return None, why
        labels.append(label.reshape(()))
    return labels, ""


def batch_labels(batch: Any) -> Tensor | None:
    """The classes int64 ``[B]`` of a batch's samples, where its labels are integers, one each; None: they are not.

    Example:
        >>> batch_labels((torch.zeros(2, 3), torch.tensor([1, 0])))
        tensor([1, 0])
    """
    label = _label_of(batch)
    if not isinstance(label, Tensor) or label.is_floating_point() or label.dtype == torch.bool or not len(label.shape):
        return None
    label = label.flatten(1).squeeze(1) if label.ndim == 2 and label.shape[1] == 1 else label
    return label.detach().long() if label.ndim == 1 else None


_NO_LABEL = "a sample is neither (x, ..., label) nor a dictionary or an object with a label"


def _label_of(sample: Any) -> Any:
    """A sample's label, or None: the last of several, or what has a label's name."""
    if isinstance(sample, list | tuple):
        return sample[-1] if len(sample) > 1 else None
    if isinstance(sample, Mapping):
        return next((sample[key] for key in _LABEL_KEYS if key in sample), None)
    # Objects such as the graphs of torch_geometric.
    return next((found for key in _LABEL_KEYS if (found := getattr(sample, key, None)) is not None), None)


def _no_class(found: Any, dims: int) -> str:
    """Why these are not integers, one each; empty if they are. The first ``dims`` dimensions are samples."""
    array = np.asarray(found)
    each = array.shape[dims:]
    if array.dtype.kind not in "biuf" or len(each) > 1 or each not in ((), (1,)):
        return f"the labels are {array.dtype} {list(each)} each" if each else f"the labels are {array.dtype}"
    return "" if array.dtype.kind in "biu" else f"the labels are {array.dtype} numbers"


def _unusable(dataset: Dataset, why: str) -> str:
    return (
        f"No class labels in {type(dataset).__name__}: {why}. One whole number per sample is needed, as an attribute "
        f"`targets` of the data set or as the last element of each sample."
    )


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
    """The values of all samples under this name: an attribute of the data set, or a field of each sample.

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
