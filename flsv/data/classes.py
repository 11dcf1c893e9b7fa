"""Finds out once, when data are dealt out, whether training samples have classes, and which.

Only some parts of a federation need classes: partitioners and corruptions that go by label, metrics per class. Where
the data have none (texts, images with masks, targets to regress on, graphs, nothing but inputs) all samples are of one
class, so that a number of samples per client and class is a number of samples per client.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor
from torch.utils.data import Dataset

from flsv.data.labels import check_largest, count_classes, dataset_labels, given_labels, labels_or_why
from flsv.errors import ConfigurationError

#: The name of the only class of data without classes.
ONE_CLASS = ("samples",)
#: From so many samples on, classes of fewer than two samples each are none.
_MANY = 100


@dataclass(frozen=True)
class Classes:
    """The classes of the training samples.

    Args:
        labels: class of every sample, int64 ``[N]``; all 0 where there are no classes.
        names: one per class.
        missing: why there are no classes; None where there are.
    """

    labels: Tensor
    names: tuple[str, ...]
    missing: str | None = None


def find_classes(
    train: Dataset,
    class_names: Sequence[str],
    held_out: Mapping[str, Dataset | None],
    labels: Any = None,
    asking: Sequence[Any] = (),
) -> Classes:
    """The classes of the training samples, or one class where they have none and nobody asks for them.

    Args:
        train: the training data, at least one sample.
        class_names: of the source, perhaps none.
        held_out: validation and test data by name, whose labels count where they lie ready.
        labels: see :class:`~flsv.data.FederatedDataModule`.
        asking: the partitioners, corruptions and others that need classes.

    Raises:
        ConfigurationError: somebody asks and there are none; labels that were given or asked for and are no classes.

    Example:
        >>> from torch.utils.data import TensorDataset
        >>> find_classes(TensorDataset(torch.zeros(3, 2), torch.tensor([1, 0, 1])), (), {}).names
        ('0', '1')
        >>> find_classes(TensorDataset(torch.zeros(3, 2), torch.rand(3)), (), {})
        Classes(labels=tensor([0, 0, 0]), names=('samples',), missing='the labels are float32 numbers')
    """
    if isinstance(labels, bool):
        if labels:
            raise ConfigurationError(f"labels={labels}: {_WAYS}, or false for data without classes.")
        return _one_class(train, "labels=False says so", asking)
    if labels is not None:
        # Of the held-out data only an attribute of the same name would say the same.
        found, held_out = given_labels(train, labels), {}
    elif asking:
        try:
            found = dataset_labels(train)
        except ConfigurationError as error:
            raise ConfigurationError(f"{asking[0]!r} needs each sample's class. {error} Otherwise {_WAYS}.") from error
    else:
        # Where the classes have names, an integer that is none of them is a mistake.
        seen, why = labels_or_why(train, strict=bool(class_names))
        if seen is not None and not class_names:
            why = _numbers(seen)
        if seen is None or why:
            return _one_class(train, why)
        found = seen
    try:
        number = count_classes(found, class_names, held_out)
    except ConfigurationError as error:
        if labels is not None or asking or class_names:
            raise
        raise ConfigurationError(f"{error} If these are numbers and no classes, say labels=False.") from error
    return Classes(found, tuple(class_names) if len(class_names) == number else tuple(map(str, range(number))))


def need_classes(asking: str, missing: str, instead: str) -> ConfigurationError:
    """The error of those who need classes and hear of it after the data have been dealt out.

    Args:
        asking: who asks and what it does, the beginning of a sentence.
        missing: why there are no classes.
        instead: what else to do.
    """
    return ConfigurationError(
        f"{asking}, and the training samples have no classes: {missing}. Give them one whole number each, as an "
        f"attribute `targets` of the data set or as FederatedDataModule(labels=...); or {instead}."
    )


_WAYS = "give labels=[...], one class per training sample, or the name of an attribute or a field that has them"


def _one_class(train: Dataset, why: str, asking: Sequence[Any] = ()) -> Classes:
    if asking:
        raise ConfigurationError(f"{asking[0]!r} needs each sample's class, and {why}. Leave labels out, or {_WAYS}.")
    return Classes(torch.zeros(len(train), dtype=torch.long), ONE_CLASS, why)  # type: ignore[arg-type]


def _numbers(labels: Tensor) -> str:
    """Why these labels are numbers rather than classes, with a warning; empty if they may be classes."""
    largest, distinct = int(labels.max()), len(labels.unique())
    said = ""
    if len(labels) >= _MANY and 2 * distinct > len(labels):
        said = f"There are {distinct} different labels of {len(labels)} training samples, such as an index has."
    try:
        check_largest("The training data", largest, distinct)
    except ConfigurationError as error:
        said = str(error)
    if said:
        rank_zero_warn(f"{said} They are taken for numbers: nothing here asks for classes.")
        return f"the labels are {distinct} different numbers up to {largest}"
    return ""
