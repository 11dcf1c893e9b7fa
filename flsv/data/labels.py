"""The samples' classes, and the positive one of two classes.

Classes are read once, when the data are divided among the clients, and if possible without decoding images. Only some
components need them: partitioners and corruptions that use labels, and metrics per class. If the data have no classes
(texts, images with masks, regression targets, graphs, inputs alone), all samples belong to one class, so that counts
per client and class are counts per client.

The positive class, to which average precision, F1 and similar scores refer, always has the number 1. If flsv numbers
the classes (words, folders of images), the class that ``pos_label`` names gets the number 1. Without ``pos_label``,
classes are numbered in the order that the data declare (as the categories of a pandas column do) or else in sorted
order, and two classes whose names are words have no such scores. Labels that are numbers are not changed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from graphlib import CycleError, TopologicalSorter
from itertools import pairwise
from typing import Any

import numpy as np
import torch
import yaml
from torch import Tensor
from torch.utils.data import ConcatDataset, Dataset, Subset, TensorDataset

from flsv.data.groups import column, values_of_attribute, values_of_samples
from flsv.data.hugging_face import class_names_of_column, is_hugging_face
from flsv.utilities.errors import ConfigurationError, listed

#: Letters of NumPy's kinds of dtypes (b: bool, i and u: integers, f: floats) that labels may have.
_INTEGER_KINDS = "biu"
_NUMBER_KINDS = "biuf"
#: The name of the only class of data without classes.
ONE_CLASS = ("samples",)
#: In data with at least this many samples, labels are classes only if their values occur twice on average.
_MANY_SAMPLES = 100


class _NoClassError(Exception):
    """Error whose message says why the samples have no classes."""


def dataset_labels(dataset: Dataset[Any]) -> Tensor:
    """Return each sample's class, int64 ``[N]``, from an attribute of the data set or else from the samples."""
    try:
        return torch.from_numpy(whole_numbers(_read_labels(dataset, _NUMBER_KINDS)))
    except _NoClassError as error:
        raise ConfigurationError(_message_of_no_labels(dataset, str(error))) from error


def _read_labels(dataset: Dataset[Any], dtype_kinds: str) -> np.ndarray:
    """Return the labels ``[N]``. Raise _NoClassError at the first whose NumPy kind is not in ``dtype_kinds``."""
    stored_labels = _stored_labels(dataset)
    if stored_labels is not None:
        return _as_vector(stored_labels, dtype_kinds)

    labels = []
    for index in range(len(dataset)):  # type: ignore[arg-type]  # map-style: has a length
        label = _as_vector([_second_part(dataset[index], _is_one_number)], dtype_kinds)
        labels.append(label[0])
    return _as_vector(labels, dtype_kinds)


def _as_vector(labels: Any, dtype_kinds: str) -> np.ndarray:
    """Return labels ``[N]`` or ``[N, 1]`` as ``[N]``. Raise _NoClassError for other shapes or NumPy kinds."""
    try:
        array = np.asarray(labels)
    except (TypeError, ValueError) as error:  # lists of several lengths, tensors on another device
        raise _NoClassError("the labels are of several lengths or kinds") from error
    label_shape = array.shape[1:]
    is_number_per_sample = label_shape in ((), (1,))
    if is_number_per_sample and array.dtype.kind in dtype_kinds:
        return array.reshape(len(array))

    description = "not numbers"
    if array.dtype.kind in _NUMBER_KINDS:
        description = f"{array.dtype} numbers"
    if label_shape:
        description += f" {list(label_shape)} each"
    raise _NoClassError(f"the labels are {description}")


def _stored_labels(dataset: Dataset[Any]) -> Any:
    return values_of_samples(dataset, _labels_beside_samples)


def _labels_beside_samples(dataset: Dataset[Any]) -> Any:
    if type(dataset) is TensorDataset:
        labels = _second_part(dataset.tensors, _is_number_per_row)
        return None if labels is None else labels.cpu()

    labels = values_of_attribute(dataset, "targets")
    # A loader yields labels after torchvision's target_transform.
    target_transform = getattr(dataset, "target_transform", None)
    if labels is None or target_transform is None:
        return labels
    return [target_transform(label) for label in labels]


def _second_part(sample: Any, is_number: Callable[[Any], bool]) -> Any:
    """Return the second part of a sample ``(x, y)``, or None. Raise _NoClassError if a further part is a number."""
    if not isinstance(sample, list | tuple) or len(sample) < 2:
        return None
    positions_of_numbers = [
        position for position, part in enumerate(sample) if position > 0 and is_number(part)
    ]
    if positions_of_numbers not in ([], [1]):
        raise _NoClassError(
            f"the parts {listed(positions_of_numbers)} of a sample are numbers, and each of them may be its label. "
            f"Name it, as in labels={positions_of_numbers[-1]}"
        )
    return sample[1]


def _is_one_number(part: Any) -> bool:
    if isinstance(part, Tensor | np.ndarray):
        return part.shape in ((), (1,))
    return isinstance(part, int | float | np.number | np.bool_)


def _is_number_per_row(part: Any) -> bool:
    return isinstance(part, Tensor) and part.ndim > 0 and part.shape[1:] in ((), (1,))


def batch_labels(batch: Any) -> Tensor | None:
    """Return the classes of a batch, int64 ``[B]``, or None unless each sample has one integer label."""
    vectors = label_vectors(batch)
    if len(vectors) != 1 or not _is_number_per_row(batch[1]):
        return None
    (labels,) = vectors
    if labels.is_floating_point() or labels.dtype == torch.bool:
        return None
    return labels.long()


def label_vectors(batch: Any) -> list[Tensor]:
    """Return the parts of a batch that may be its labels, because they have one number for each row, ``[B]``."""
    if not isinstance(batch, list | tuple):
        return []
    return [part.detach().flatten() for part in batch[1:] if _is_number_per_row(part)]


def rows_of_batch(batch: Any) -> int | None:
    """Return a batch's number of rows, by its parts with one number for each row. None: it has no such part."""
    if batch is None:
        return 0
    parts: list[Any] = []
    if isinstance(batch, Mapping):
        parts += batch.values()
    elif isinstance(batch, list | tuple):
        parts += batch[1:]
    return max((len(part) for part in parts if _is_number_per_row(part)), default=None)


def whole_numbers(labels: np.ndarray) -> np.ndarray:
    """Convert labels ``[N]`` of any type to int64."""
    if labels.dtype.kind not in _NUMBER_KINDS:
        raise _NoClassError(f"the labels have the type {labels.dtype}")
    # NaN and large numbers become other numbers, which are found below.
    with np.errstate(invalid="ignore"):
        classes = labels.astype(np.int64)
    wrong_rows = np.flatnonzero((classes != labels) | (classes < 0))
    if len(wrong_rows):
        row = wrong_rows[0]
        raise _NoClassError(
            f"{len(wrong_rows)} of {len(labels)} labels are not whole numbers of at least 0, such as {labels[row]} at "
            f"index {row}"
        )
    return classes


def _labels_of_user(dataset: Dataset[Any], labels: Any) -> Tensor:
    num_samples = len(dataset)  # type: ignore[arg-type]  # map-style: has a length
    values = column(dataset, labels, "labels") if isinstance(labels, str) else labels
    label_vector = np.asarray(values).reshape(num_samples)
    try:
        return torch.from_numpy(whole_numbers(label_vector))
    except _NoClassError as error:
        remedy = ""
        if is_hugging_face(dataset) and isinstance(labels, str):
            remedy = f" Words get numbers by dataset.class_encode_column({labels!r})."
        raise ConfigurationError(
            f"labels: {error}. Expected one of the numbers 0 .. M-1 for each sample.{remedy}"
        ) from error


def count_classes(
    labels: Tensor, class_names: Sequence[str], held_out: Mapping[str, Dataset[Any] | None]
) -> int:
    """Count the classes, including those of held-out data whose labels are in an attribute."""
    label_vectors = [labels]
    for data in held_out.values():
        if data is not None and _stored_labels(data) is not None:
            label_vectors.append(dataset_labels(data))
    distinct_labels = torch.cat(label_vectors).unique()  # sorted
    largest = int(distinct_labels[-1])
    if largest < len(class_names):
        return len(class_names)
    if _is_identifier(largest, len(distinct_labels)):
        raise ConfigurationError(
            f"The largest label is {largest}, but there are only {len(distinct_labels)} different labels. Number them "
            "0 .. M-1 (numpy.unique with return_inverse=True), or set labels=False if they are not classes."
        )
    return largest + 1


def _is_identifier(largest: int, distinct: int) -> bool:
    """Return whether labels look like identifiers: the ``largest`` is far above the number of ``distinct`` ones."""
    return largest >= 1000 and largest >= 10 * distinct


def class_names_of(dataset: Any, label: Any = None) -> tuple[str, ...]:
    """Return the names of a data set's classes, or an empty tuple.

    They are those of its column ``label`` in a Hugging Face data set, else in ``class_to_idx`` or ``classes``. The data
    set may be inside a ``Subset``, or be every part of a ``ConcatDataset``.
    """
    while isinstance(dataset, Subset):
        dataset = dataset.dataset
    if isinstance(dataset, ConcatDataset):
        names_of_parts = {class_names_of(part, label) for part in dataset.datasets}
        if len(names_of_parts) > 1:
            raise ConfigurationError(
                "The parts of a ConcatDataset have different names for their classes: "
                f"{listed(names_of_parts, 8)}. Give all parts the same attribute `classes`."
            )
        return next(iter(names_of_parts), ())

    names = class_names_of_column(dataset, label) or _names_by_index(dataset)
    return names or tuple(map(str, getattr(dataset, "classes", None) or ()))


def _names_by_index(dataset: Any) -> tuple[str, ...]:
    """Return the names in ``class_to_idx``, or an empty tuple if these are not names of classes 0 .. M-1."""
    index_of_class = getattr(dataset, "class_to_idx", None)
    if not isinstance(index_of_class, Mapping) or not index_of_class:
        return ()
    name_by_index = {index: str(name) for name, index in index_of_class.items()}
    largest = max(name_by_index)
    have_own_numbers = len(name_by_index) == len(index_of_class)
    if have_own_numbers and not _is_identifier(largest, len(name_by_index)):
        return tuple(name_by_index.get(index, str(index)) for index in range(largest + 1))
    return ()


@dataclass(frozen=True)
class Classes:
    """Classes of the training samples: labels int64 ``[N]``, names, and the reason if there are no classes.

    Without classes, all labels are 0.
    """

    labels: Tensor
    names: tuple[str, ...]
    missing_reason: str | None = None


def find_classes(
    train: Dataset[Any],
    class_names: Sequence[str],
    held_out: Mapping[str, Dataset[Any] | None],
    labels: Any = None,
    parts_that_need_classes: Sequence[Any] = (),
) -> Classes:
    """Find the training samples' classes. Without classes, put all samples into one class.

    Raises:
        ConfigurationError: there are no classes, but ``parts_that_need_classes`` is not empty.
    """
    try:
        classes = _read_classes(train, labels, class_names, parts_that_need_classes)
        if labels is not None:
            held_out = {}  # held-out data need not have the field that labels names
        num_classes = count_classes(classes, class_names, held_out)
    except _NoClassError as error:
        if parts_that_need_classes:
            requirement = f"{parts_that_need_classes[0]!r} needs the class of each sample."
            reason = _message_of_no_labels(train, str(error))
            raise ConfigurationError(f"{requirement} {reason}") from error
        no_labels = torch.zeros(len(train), dtype=torch.long)  # type: ignore[arg-type]  # map-style
        return Classes(no_labels, ONE_CLASS, str(error))

    if len(class_names) != num_classes:  # or there are no names
        class_names = list(map(str, range(num_classes)))
    return Classes(classes, tuple(class_names))


def _read_classes(
    train: Dataset[Any],
    labels: Any,
    class_names: Sequence[str],
    parts_that_need_classes: Sequence[Any],
) -> Tensor:
    if labels is False:
        raise _NoClassError("labels=False")
    if labels is not None:
        return _labels_of_user(train, labels)
    if parts_that_need_classes:
        return torch.from_numpy(whole_numbers(_read_labels(train, _NUMBER_KINDS)))
    return _numbers_as_classes(_read_labels(train, _INTEGER_KINDS), bool(class_names))


def _numbers_as_classes(numbers: np.ndarray, have_names: bool) -> Tensor:
    """Return whole numbers as classes, unless they look like values to predict or identifiers."""
    num_distinct = len(np.unique(numbers))
    smallest = numbers.min()
    largest = int(numbers.max())
    look_like_measurements = len(numbers) >= _MANY_SAMPLES and 2 * num_distinct > len(numbers)
    look_like_no_classes = look_like_measurements or _is_identifier(largest, num_distinct)
    are_classes = have_names or not look_like_no_classes
    if smallest < 0 or not are_classes:
        raise _NoClassError(
            f"the labels are {num_distinct} different numbers from {smallest} to {largest}"
        )
    return torch.from_numpy(numbers.astype(np.int64))


def _message_of_no_labels(dataset: Dataset[Any], why: str) -> str:
    return (
        f"{type(dataset).__name__} has no class labels: {why}. Give one whole number for each sample: as the second "
        "part of each sample (x, y), as the attribute `targets`, or by labels=, a list or the name of a field."
    )


def in_order(names: Collection[str]) -> tuple[str, ...]:
    """Sort class names that are all numbers or truth values by these, and others alphabetically."""
    numbers = dict(zip(names, _numbers(names)))
    return tuple(sorted(names, key=lambda name: (numbers.get(name, 0.0), name)))


def _numbers(names: Collection[str]) -> list[float]:
    """Convert names to numbers. Return an empty list if one is neither a number nor a truth value."""
    numbers_of_truths = {"false": "0", "true": "1"}
    try:
        numbers = [float(numbers_of_truths.get(name.casefold(), name)) for name in names]
    except ValueError:
        return []
    return numbers if all(map(math.isfinite, numbers)) else []


def declared_order(categories: Sequence[str], is_ordered: bool) -> tuple[str, ...]:
    """Return the order that the categories of a column declare.

    pandas sorts categories as texts, 10 before 9, if nobody gives them an order. Numbers in this order are sorted.
    """
    is_order_of_pandas = not is_ordered and list(categories) == sorted(categories)
    return in_order(categories) if is_order_of_pandas else tuple(categories)


def in_declared_order(
    names: Collection[str], orders: Mapping[str, Sequence[str]], where: str
) -> tuple[str, ...]:
    """Return class names in the order that data declare, followed by names without a declared order, which are sorted.

    Args:
        names: the names.
        orders: the declared orders, by the client or the table that declares each. They may have further names.
        where: what has the classes, for the message.

    Raises:
        ConfigurationError: two orders contradict each other.
    """
    sorter: TopologicalSorter[str] = TopologicalSorter()
    for order in orders.values():
        present_names = [name for name in order if name in names]
        for name in present_names:
            sorter.add(name)
        for previous_name, name in pairwise(present_names):
            sorter.add(name, previous_name)
    try:
        sorter.prepare()
    except CycleError:
        raise ConfigurationError(_message_of_orders(orders, where)) from None

    ordered_names: list[str] = []
    while sorter.is_active():
        next_names = sorter.get_ready()
        ordered_names += in_order(next_names)
        sorter.done(*next_names)
    other_names = [name for name in names if name not in ordered_names]
    return *ordered_names, *in_order(other_names)


def _message_of_orders(orders: Mapping[str, Sequence[str]], where: str) -> str:
    owners_by_order: dict[tuple[str, ...], list[str]] = {}
    for owner, order in orders.items():
        owners_by_order.setdefault(tuple(order), []).append(owner)
    descriptions = [
        f"{listed(order, 8, repr)} at {listed(owners, 3)}"
        for order, owners in owners_by_order.items()
    ]
    return (
        f"{where} has classes whose declared orders contradict each other: {'; '.join(descriptions)}. The order "
        "decides which class has the number 1. Declare one order everywhere, in tables also by classes in the data "
        "dictionary. Of two classes, pos_label names the last one."
    )


def positive_last(names: Sequence[str], pos_label: Any = None) -> tuple[str, ...]:
    """Return the class names, with the positive one of two last if ``pos_label`` names it."""
    if pos_label is None:
        return tuple(names)
    positive = named_class(names, pos_label)
    other_names = [name for name in names if name != positive]
    return *other_names, positive


def named_class(names: Sequence[str], pos_label: Any) -> str:
    """Return the class name that equals ``pos_label``, which YAML may have read as a number or truth value."""
    if len(names) != 2:
        raise ConfigurationError(
            f"pos_label={pos_label!r}: the data have {len(names)} classes, but only data of two classes have a "
            "positive class. Remove pos_label."
        )
    for name in names:
        # A number or truth value is compared with the name as YAML reads it.
        value = name if isinstance(pos_label, str) else yaml.safe_load(name)
        if value == pos_label:
            return name
    raise ConfigurationError(f"pos_label={pos_label!r}: expected {' or '.join(map(repr, names))}.")


def are_two_words(names: Sequence[str]) -> bool:
    """Return whether there are two classes with words for names, which do not say which class is positive."""
    return len(names) == 2 and not _numbers(names)


def check_positive(names: Sequence[str], pos_label: Any) -> None:
    """Raise ConfigurationError unless there are two classes and class 1 is ``pos_label``."""
    positive = named_class(names, pos_label)
    if positive != names[1]:
        raise ConfigurationError(
            f"pos_label={pos_label!r}: in these data {positive!r} is class 0, but class 1 is always positive, and "
            "labels that are numbers are not changed. Swap 0 and 1, or give the labels as words."
        )
