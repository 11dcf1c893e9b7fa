"""Natural groups of samples, such as hospitals or writers, names of clients, and values of each sample."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable, Iterable, Mapping, Sequence
from decimal import Decimal, InvalidOperation
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import ConcatDataset, Dataset, Subset

from flsv.data.hugging_face import stored_column
from flsv.utilities.errors import ConfigurationError, listed


def named_groups(
    dataset: Dataset[Any], groups: Any = None
) -> tuple[Tensor | None, tuple[str, ...]]:
    """Return each sample's group, int64 ``[N]``, and the groups' sorted names.

    Without groups, return ``(None, ())``.
    """
    ids_by_sample, kind = _ids_and_kind(dataset, groups)
    if ids_by_sample is None:
        return None, ()

    ids = np.asarray(ids_by_sample)
    _check_group_per_sample(ids, len(dataset))  # type: ignore[arg-type]  # map-style: has a length
    distinct_ids, group_numbers = number_values(ids)
    return group_numbers, client_names_of(distinct_ids, kind)


def number_values(values: np.ndarray) -> tuple[list[Any], Tensor]:
    """Return the distinct values in sorted order, and the number of each value among them, int64 ``[N]``."""
    distinct_values, numbers = np.unique(values, return_inverse=True)
    number_vector = numbers.reshape(-1).astype(np.int64)
    return distinct_values.tolist(), torch.from_numpy(number_vector)


def _check_group_per_sample(ids: np.ndarray, num_samples: int) -> None:
    if ids.shape != (num_samples,) or _has_gaps(ids):
        raise ConfigurationError(
            f"groups: expected a group for each of the {num_samples} training samples, none of them None or NaN, but "
            f"got the shape {list(ids.shape)}. Give a list, or name a field of the samples, such as 'site' or "
            "'meta.site'."
        )


def _ids_and_kind(dataset: Dataset[Any], groups: Any) -> tuple[Any, str]:
    """Return each sample's id of its group, or None, and the word before ids that are numbers, as in "site 3"."""
    if groups is None:
        ids = values_of_samples(dataset, lambda part: values_of_attribute(part, "groups"))
        return ids, _group_kind(dataset)
    if not isinstance(groups, str):
        return groups, "group"
    ids = column(dataset, groups, "groups")
    if groups == "groups":
        return ids, "group"
    *_, last_name = groups.split(".")  # "site" of "meta.site"
    return ids, last_name


def _group_kind(dataset: Dataset[Any]) -> str:
    while isinstance(dataset, Subset) and not hasattr(dataset, "group_kind"):
        dataset = dataset.dataset
    return getattr(dataset, "group_kind", None) or "group"


def _has_gaps(ids: np.ndarray) -> bool:
    return any(group is None or group != group for group in ids)  # NaN is not equal to itself


_NUMBER_PATTERN = re.compile(r"[-+]?\d+([.]\d+)?")


def client_called(client: int, names: Sequence[str] = (), noun: str = "client") -> str:
    """Return ``noun``, the client's id and, if it differs, its name, for messages."""
    has_name = client < len(names) and names[client] != str(client)
    if has_name:
        return f"{noun} {client} ({names[client]!r})"
    return f"{noun} {client}"


def check_spelling(
    names: Iterable[str], where: str, owners: Mapping[str, Iterable[str]] | None = None
) -> None:
    """Raise ConfigurationError if two names are spellings of one name: equal numbers, or words that differ only in
    case, white space and a full stop.

    ``where`` and the names' ``owners``, such as clients, are for the message.
    """
    spellings_by_name: dict[Any, list[str]] = {}
    for spelling in names:
        spellings_by_name.setdefault(_normalized(spelling), []).append(spelling)

    for spellings in spellings_by_name.values():
        if len(spellings) == 1:
            continue
        descriptions = []
        for spelling in spellings:
            description = repr(spelling)
            if owners and owners.get(spelling):
                description += f" ({listed(owners[spelling], 3)})"
            descriptions.append(description)
        raise ConfigurationError(
            f"{where} has {', '.join(descriptions)}, which look like spellings of one name. Use the same spelling "
            "everywhere."
        )


def _normalized(name: str) -> Any:
    text = unicodedata.normalize("NFKC", name).casefold()
    text = " ".join(text.split()).rstrip(".")
    if "_" in text:  # Decimal would read 1_000 as a number
        return text
    try:
        number = Decimal(text)
    except InvalidOperation:
        return text
    return number if number.is_finite() else text


def client_names_of(values: Iterable[Any], kind: str) -> tuple[str, ...]:
    """Make client names of ``values``, each in one line. ``kind`` precedes a number, as in "school 7"."""
    values = list(values)
    texts = list(map(str, values))
    client_ids = list(map(str, range(len(texts))))
    if kind in ("group", "site") and texts == client_ids:
        return tuple(texts)  # they are equal to the clients' ids

    names = []
    for text in texts:
        printable = "".join(character if character.isprintable() else " " for character in text)
        name = " ".join(printable.split())
        if _NUMBER_PATTERN.fullmatch(name):
            name = f"{kind} {name}"
        names.append(name)
    if "" in names or len(set(names)) < len(names):
        raise ConfigurationError(
            f"The clients' names are {listed(values, limit=20, show=repr)}. Each name needs a visible character, and "
            "all have to be different."
        )
    return tuple(names)


def values_of_samples(dataset: Dataset[Any], find: Callable[[Dataset[Any]], Any]) -> Any:
    """Return ``find(dataset)``, one value per sample.

    If that is None, look inside a ``Subset`` or ``ConcatDataset``.
    """
    own_values = find(dataset)
    if own_values is not None:
        return own_values
    if isinstance(dataset, Subset):
        all_values = values_of_samples(dataset.dataset, find)
        if all_values is None:
            return None
        indices = np.asarray(dataset.indices, dtype=np.int64)
        return np.asarray(all_values)[indices]
    if isinstance(dataset, ConcatDataset):
        parts = [values_of_samples(part, find) for part in dataset.datasets]
        if any(part is None for part in parts):
            return None
        return np.concatenate(list(map(np.asarray, parts)))
    return None


def values_of_attribute(dataset: Dataset[Any], name: str) -> Any:
    """Return the data set's attribute ``name`` if it has one value per sample, or else None."""
    value = getattr(dataset, name, None)
    # NumPy cannot read tensors on another device.
    if isinstance(value, Tensor):
        value = value.cpu()
    try:
        # For mypy: a map-style data set has a length.
        if value is not None and len(value) == len(dataset):  # type: ignore[arg-type]
            return value
    except TypeError:
        pass  # it has no length
    return None


def column(dataset: Dataset[Any], name: str, argument: str) -> Any:
    """Return one value per sample: the data set's attribute ``name``, or that field or position of each sample."""
    values = values_of_samples(dataset, lambda part: values_of_attribute(part, name))
    if values is None:
        values = values_of_samples(dataset, lambda part: stored_column(part, name))
    if values is None:
        values = []
        for index in range(len(dataset)):  # type: ignore[arg-type]  # map-style: has a length
            value = _field(dataset[index], name)
            if isinstance(value, Tensor) and value.numel() == 1:
                value = value.item()
            values.append(value)
    if any(value is None or callable(value) for value in values):
        owner = type(dataset).__name__
        raise ConfigurationError(
            f"{argument}={name!r}: {owner} has no attribute, and its samples have no field, of this name. Name "
            "another, or give a list with a value for each sample."
        )
    return values


def _field(sample: Any, name: str) -> Any:
    """Return the field ``name`` of a sample, which may be a position or nested (``"meta.site"``), or None."""
    if isinstance(sample, list | tuple) and name.isdecimal():
        position = int(name)
        return sample[position] if position < len(sample) else None

    if isinstance(sample, Mapping):
        value = sample.get(name)
    else:
        value = getattr(sample, name, None)
    outer, dot, inner = name.partition(".")
    if value is None and dot:
        return _field(_field(sample, outer), inner)
    return value
