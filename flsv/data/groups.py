"""Natural groups of samples, such as hospitals or writers, and names of clients.

Functions read one group or another value per sample from a data set, and make names from keys, folders or groups.
"""

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

from flsv.utilities.errors import ConfigurationError, listed


def named_groups(dataset: Dataset, groups: Any = None) -> tuple[Tensor | None, tuple[str, ...]]:
    """Return each sample's group, int64 ``[N]``, and the groups' sorted names.

    Without groups, return ``(None, ())``.
    """
    kind = "group"
    if groups is None:
        groups = entries(dataset, lambda part: own_entries(part, "groups"))
        if groups is None:
            return None, ()
        while isinstance(dataset, Subset) and not hasattr(dataset, "group_kind"):
            dataset = dataset.dataset
        kind = getattr(dataset, "group_kind", kind)
    elif isinstance(groups, str):
        kind = kind if groups in ("group", "groups") else groups.rpartition(".")[2]
        groups = column(dataset, groups, "groups")
    ids, samples = np.asarray(groups), len(dataset)  # type: ignore[arg-type]  # map-style: has a length
    # NaN is not itself.
    if ids.shape != (samples,) or any(entry is None or entry != entry for entry in ids):
        raise ConfigurationError(
            f"groups needs one entry per training sample, [{samples}], none of them None or NaN; got shape "
            f"{list(ids.shape)}. Give each a group, or name a field of the samples, such as 'site' or 'meta.site'."
        )
    found, numbers = np.unique(ids, return_inverse=True)
    return torch.from_numpy(numbers.reshape(-1).astype(np.int64)), plain_names(found.tolist(), kind)


_NUMBER = re.compile(r"[-+]?\d+([.]\d+)?")


def client_called(client: int, names: Sequence[str] = (), noun: str = "client") -> str:
    """Describe a client in a message: ``noun``, id and, if different, name."""
    name = names[client] if client < len(names) else str(client)
    return f"{noun} {client}" if name == str(client) else f"{noun} {client} ({name!r})"


def check_spelling(
    names: Iterable[str], where: str, owners: Mapping[str, Iterable[str]] | None = None
) -> None:
    """Raise ConfigurationError if two names are spellings of one name.

    These are equal numbers, or words that are equal up to case, white space and a full stop. ``owners`` has the clients
    or files with each name, for the message.
    """
    spellings: dict[Any, list[str]] = {}
    for name in names:
        spellings.setdefault(_meaning(name), []).append(name)

    for alike in spellings.values():
        if len(alike) == 1:
            continue
        described = []
        for name in alike:
            owners_of_name = (owners or {}).get(name, ())
            source = f" ({listed(owners_of_name, 3)})" if owners_of_name else ""
            described.append(f"{name!r}{source}")
        raise ConfigurationError(
            f"{where} has {', '.join(described)}, which look like spellings of one name: use the same spelling "
            "everywhere."
        )


def _meaning(name: str) -> Any:
    plain = " ".join(unicodedata.normalize("NFKC", name).casefold().split()).rstrip(".")
    try:
        number = Decimal(plain)
    except InvalidOperation:
        return plain
    return number if number.is_finite() and "_" not in plain else plain


def plain_names(values: Iterable[Any], kind: str) -> tuple[str, ...]:
    """Return ``values`` as client names of one line. A number gets ``kind`` before it, as in "school 7"."""
    values = list(values)
    if kind in ("group", "site") and list(map(str, values)) == list(map(str, range(len(values)))):
        return tuple(map(str, values))
    names = [
        " ".join("".join(c if c.isprintable() else " " for c in str(value)).split())
        for value in values
    ]
    names = [f"{kind} {name}" if _NUMBER.fullmatch(name) else name for name in names]
    if "" in names or len(set(names)) < len(names):
        raise ConfigurationError(
            f"Clients are called {listed(values, 20, repr)}: names need a visible character, and must differ."
        )
    return tuple(names)


def entries(dataset: Dataset, find: Callable[[Dataset], Any]) -> Any:
    """Return ``find(dataset)``, one entry per sample.

    If that is None, look inside a ``Subset`` or ``ConcatDataset``.
    """
    if (found := find(dataset)) is not None:
        return found
    if isinstance(dataset, Subset):
        whole = entries(dataset.dataset, find)
        return (
            None
            if whole is None
            else np.asarray(whole)[np.asarray(dataset.indices, dtype=np.int64)]
        )
    if isinstance(dataset, ConcatDataset):
        parts = [entries(part, find) for part in dataset.datasets]
        return (
            None
            if any(part is None for part in parts)
            else np.concatenate([np.asarray(part) for part in parts])
        )
    return None


def own_entries(dataset: Dataset, name: str) -> Any:
    """Return the data set's attribute ``name`` if it has one entry per sample, or else None."""
    value = getattr(dataset, name, None)
    # Tensors may live on another device, where numpy does not reach them.
    value = value.cpu() if isinstance(value, Tensor) else value
    try:
        # For mypy: a map-style data set has a length.
        return value if value is not None and len(value) == len(dataset) else None  # type: ignore[arg-type]
    except TypeError:
        return None


def column(dataset: Dataset, name: str, argument: str) -> Any:
    """Read one value per sample: the data set's attribute ``name``, or that field (``"meta.site"``) or position of each
    sample.
    """
    found = entries(dataset, lambda part: own_entries(part, name))
    if found is None:
        # For mypy: a map-style data set has a length.
        found = [_field(dataset[index], name) for index in range(len(dataset))]  # type: ignore[arg-type]
        found = [
            value.item() if isinstance(value, Tensor) and value.numel() == 1 else value
            for value in found
        ]
    if any(value is None or callable(value) for value in found):
        owner = type(dataset).__name__
        raise ConfigurationError(
            f"{argument}={name!r}: {owner} and its samples have no such field: give a list."
        )
    return found


def _field(sample: Any, name: str) -> Any:
    """Return the field ``name`` (or nested ``outer.inner``, or a position) of a sample, or None without it."""
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
