"""Functions that read the natural group of each sample (a hospital, a writer), or another value per sample, from a data
set, and that make clients' names from their keys, folders or groups."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable, Iterable, Mapping, Sequence
from decimal import Decimal, InvalidOperation
from typing import Any

import numpy as np
import torch
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor
from torch.utils.data import ConcatDataset, Dataset, Subset

from flsv.utilities.errors import ConfigurationError, listed


def named_groups(dataset: Dataset, groups: Any = None) -> tuple[Tensor | None, tuple[str, ...]]:
    """Return the number of each sample's natural group, int64 ``[N]``, and the groups' names, in sorted order; return
    ``(None, ())`` if there are no groups.

    Args:
        dataset: the training data; an attribute ``group_kind`` is the noun for one of its groups, such as ``"school"``.
        groups: one entry (number or string) per sample, or the name of an attribute of ``dataset`` or of a field of its
            samples that has these entries; None: the attribute ``groups``, if there is one.

    Raises:
        ConfigurationError: neither the data set nor its samples have the name ``groups``, the number of entries is not
            the number of samples, or an entry is None or NaN.

    Example:
        >>> data = torch.utils.data.TensorDataset(torch.zeros(3, 2))
        >>> named_groups(data, [7, 3, 7])
        (tensor([1, 0, 1]), ('group 3', 'group 7'))
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


#: At most this many groups are listed in the name of a client that holds several groups.
_MOST = 3
_NUMBER = re.compile(r"[-+]?\d+([.]\d+)?")


def client_called(client: int, names: Sequence[str] = (), noun: str = "client") -> str:
    """Return the words for a client in a sentence: its number, and its name unless that is the number.

    Args:
        client: number of the client.
        names: names of all clients; empty if they have none.
        noun: the word before the number, such as ``"Client"`` at the beginning of a sentence.

    Example:
        >>> client_called(1), client_called(1, ("0", "1")), client_called(1, ("Boston", "Lyon"))
        ('client 1', 'client 1', "client 1 ('Lyon')")
    """
    name = names[client] if client < len(names) else str(client)
    return f"{noun} {client}" if name == str(client) else f"{noun} {client} ({name!r})"


def check_spelling(names: Iterable[str], where: str, refuse: bool = True) -> None:
    """Raise an error, or warn, if names differ only in spelling: if they are equal numbers, or words that are equal up
    to case, white space and a full stop.

    Such names of classes raise an error. For names of categories and clients (``refuse=False``) there is only a
    warning.

    Args:
        names: the names to compare.
        where: the origin of the names, with which the message begins.
        refuse: whether to raise an error rather than to warn.

    Raises:
        ConfigurationError: with ``refuse``, two names differ only in spelling.

    Example:
        >>> check_spelling(["0", "True", "00", "yes", "true "], "The data")
        Traceback (most recent call last):
        ...
        flsv.utilities.errors.ConfigurationError: The data has '0', '00', which look like spellings of one name: use \
the same spelling everywhere.
    """
    spellings: dict[Any, list[str]] = {}
    for name in names:
        spellings.setdefault(_meaning(name), []).append(name)
    for alike in spellings.values():
        shown = listed(alike, show=repr)
        message = f"{where} has {shown}, which look like spellings of one name: use the same spelling everywhere."
        if len(alike) > 1 and refuse:
            raise ConfigurationError(message)
        if len(alike) > 1:
            rank_zero_warn(message)


def _meaning(name: str) -> Any:
    plain = " ".join(unicodedata.normalize("NFKC", name).casefold().split()).rstrip(".")
    try:
        number = Decimal(plain)
    except InvalidOperation:
        return plain
    return number if number.is_finite() and "_" not in plain else plain


def plain_names(values: Iterable[Any], kind: str) -> tuple[str, ...]:
    """Make client names from keys, folders or groups: each name is on one line and is not just a number.

    A number gets a word before it, ``"school 7"``, because school 7 is rarely client 7.

    Args:
        values: the keys, folders or groups, strings or numbers.
        kind: the word before a number. With ``"group"`` or ``"site"``, values 0 .. n-1 stay numbers, because they are
            the clients' numbers.

    Raises:
        ConfigurationError: a name has no printable character, or two names are equal.

    Example:
        >>> plain_names(["Sankt  Anna", 7, "08"], "ward")
        ('Sankt Anna', 'ward 7', 'ward 08')
    """
    values = list(values)
    if kind in ("group", "site") and list(map(str, values)) == list(map(str, range(len(values)))):
        return tuple(map(str, values))
    names = [" ".join("".join(c if c.isprintable() else " " for c in str(value)).split()) for value in values]
    names = [f"{kind} {name}" if _NUMBER.fullmatch(name) else name for name in names]
    if "" in names or len(set(names)) < len(names):
        raise ConfigurationError(
            f"Clients are called {listed(values, 20, repr)}: names need a visible character, and must differ."
        )
    return tuple(names)


def names_of_parts(parts: Sequence[Tensor], groups: Tensor, names: Sequence[str]) -> tuple[str, ...]:
    """Return for each client a name made of its groups' names, such as ``"Boston"`` or ``"Boston + Lyon + 3 more"``.

    Args:
        parts: indices of each client's samples, int64 ``[n]``.
        groups: number of every sample's group, int64 ``[N]``.
        names: names of the groups, by number.

    Example:
        >>> import torch
        >>> names_of_parts([torch.tensor([0, 3]), torch.tensor([1, 2])], torch.tensor([2, 0, 0, 1]), ("a", "b", "c"))
        ('b + c', 'a')
    """
    found: list[str] = []
    for part in parts:
        held = [names[group] for group in groups[part].unique().tolist()]
        more = [f"{len(held) - _MOST} more"] if len(held) > _MOST else []
        name = " + ".join([*held[:_MOST], *more])
        name = f"group {name}" if _NUMBER.fullmatch(name) and name != str(len(found)) else name
        # A group may itself be called "a + b".
        found.append(name if name not in found else f"{name} ({len(found)})")
    return tuple(found)


def entries(dataset: Dataset, find: Callable[[Dataset], Any]) -> Any:
    """Return one entry for each sample of a data set, such as its label; None if ``find`` returns None.

    Args:
        dataset: the data set; if ``find`` returns None for it, the data sets inside a ``Subset`` or ``ConcatDataset``
            are searched.
        find: function that returns the entries of a data set, or None if it has none.
    """
    if (found := find(dataset)) is not None:
        return found
    if isinstance(dataset, Subset):
        whole = entries(dataset.dataset, find)
        return None if whole is None else np.asarray(whole)[np.asarray(dataset.indices, dtype=np.int64)]
    if isinstance(dataset, ConcatDataset):
        parts = [entries(part, find) for part in dataset.datasets]
        return None if any(part is None for part in parts) else np.concatenate([np.asarray(part) for part in parts])
    return None


def own_entries(dataset: Dataset, name: str) -> Any:
    """Return the data set's attribute ``name`` if it has one entry per sample, else None."""
    value = getattr(dataset, name, None)
    # Tensors may live on another device, where numpy does not reach them.
    value = value.cpu() if isinstance(value, Tensor) else value
    try:
        # For mypy: a map-style data set has a length.
        return value if value is not None and len(value) == len(dataset) else None  # type: ignore[arg-type]
    except TypeError:
        return None


def column(dataset: Dataset, name: str, argument: str) -> Any:
    """Read one value per sample: from an attribute of the data set or, without one, from a field of each sample.

    Args:
        dataset: map-style data set; its samples are read if it has no attribute ``name``.
        name: name of the attribute, or of a key or an attribute of the samples; ``"meta.site"`` is the field ``site``
            of the field ``meta``.
        argument: the argument in which the user gave ``name``, for the message.

    Raises:
        ConfigurationError: neither the data set nor its samples have the name.
    """
    found = entries(dataset, lambda part: own_entries(part, name))
    if found is None:
        # For mypy: a map-style data set has a length.
        found = [_field(dataset[index], name) for index in range(len(dataset))]  # type: ignore[arg-type]
        found = [value.item() if isinstance(value, Tensor) and value.numel() == 1 else value for value in found]
    if any(value is None or callable(value) for value in found):
        owner = type(dataset).__name__
        raise ConfigurationError(f"{argument}={name!r}: {owner} and its samples have no such field: give a list.")
    return found


def _field(sample: Any, name: str) -> Any:
    """Return the field ``name`` of a sample, or a field within a field (``outer.inner``); None if there is no such
    field."""
    value = sample.get(name) if isinstance(sample, Mapping) else getattr(sample, name, None)
    outer, dot, inner = name.partition(".")
    return _field(_field(sample, outer), inner) if value is None and dot else value
