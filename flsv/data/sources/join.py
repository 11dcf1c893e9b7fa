"""Several data sets as one: the clients', whose classes have one numbering then, and those to evaluate with."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence

import torch
from torch.utils.data import ConcatDataset, Dataset, TensorDataset
from torchvision.datasets import DatasetFolder

from flsv.data.groups import check_spelling
from flsv.data.labels import class_names_of
from flsv.data.loaders import tensors_of
from flsv.data.sources.arrays import ColumnSamples
from flsv.errors import ConfigurationError


def one_numbering(
    parts: Mapping[str, Dataset], held_out: Mapping[str, Dataset | None]
) -> tuple[dict[str, Dataset], dict[str, Dataset | None], tuple[str, ...]]:
    """The data sets with the same numbers for the same classes, by the names of these.

    A folder of images, or labels that are words, number the classes that *they* have from 0: at a client without cats,
    dogs are class 0. All classes that any client has are numbered in sorted order, unless all name the same.

    Args:
        parts: the clients' data sets by name.
        held_out: those to validate and test with.

    Returns:
        The parts, what is held out, and the classes' names, none where the data sets have no names.

    Raises:
        ConfigurationError: names at some clients only; names that are one to a person; classes that no client has; a
            data set whose labels cannot be numbered anew.
    """
    named = {name: class_names_of(part) for name, part in parts.items()}
    held_named = {name: class_names_of(part) for name, part in held_out.items() if part is not None}
    found = set(named.values())
    if found == {()}:
        return dict(parts), dict(held_out), ()
    everybody = {**named, **(held_named if len(found) > 1 else {})}
    unnamed = next((name for name, classes in everybody.items() if not classes), None)
    if unnamed is not None:
        other = next(name for name, classes in everybody.items() if classes)
        raise ConfigurationError(
            f"{other!r} has names for its classes ({_some(everybody[other])}) and {unnamed!r} has none: which of its "
            "numbers are which of these classes, nobody can tell. Give all data sets an attribute `classes`, or none."
        )
    union = next(iter(found)) if len(found) == 1 else tuple(sorted(set().union(*found)))
    check_spelling(union, "The data")
    for name, classes in held_named.items():
        strange = [each for each in classes if each not in union]
        if strange:
            raise ConfigurationError(
                f"The {name} data have classes that no client has: {_some(strange)}. The clients have {_some(union)}."
            )
    renumbered = {name: _renumbered(part, named[name], union, name) for name, part in parts.items()}
    held = {
        # Without names, the numbers mean what all the clients mean by them.
        name: part if part is None or not held_named[name] else _renumbered(part, held_named[name], union, name)
        for name, part in held_out.items()
    }
    return renumbered, held, union


def concatenated(parts: Mapping[str, Dataset]) -> Dataset:
    """One data set after the other; of tensors, where all are.

    Raises:
        ConfigurationError: tensors of other shapes or types than the first data set's.

    Example:
        >>> data = concatenated({"a": TensorDataset(torch.zeros(2, 3)), "b": TensorDataset(torch.ones(1, 3))})
        >>> data.tensors[0].sum(1)
        tensor([0., 0., 3.])
    """
    sets = list(parts.values())
    if len(sets) == 1:
        return sets[0]
    held = {name: tensors_of(part, None) for name, part in parts.items()}
    if any(tensors is None for tensors, _ in held.values()):
        return ConcatDataset(sets)
    rows = {
        name: [tensor if indices is None else tensor[indices] for tensor in tensors or ()]
        for name, (tensors, indices) in held.items()
    }
    shapes = {
        name: ", ".join(f"{t.dtype} {list(t.shape[1:])}".replace("torch.", "") for t in tensors)
        for name, tensors in rows.items()
    }
    first = next(iter(shapes))
    other = next((name for name in shapes if shapes[name] != shapes[first]), None)
    if other is not None:
        raise ConfigurationError(
            f"The samples of {first!r} are ({shapes[first]}) and those of {other!r} ({shapes[other]}). One model is "
            "trained on all: they must be alike."
        )
    return TensorDataset(*(torch.cat(column) for column in zip(*rows.values())))


def _renumbered(dataset: Dataset, classes: Sequence[str], union: Sequence[str], name: str) -> Dataset:
    if tuple(classes) == tuple(union):
        return dataset
    if len(set(classes)) < len(classes):
        raise ConfigurationError(f"{name!r} has two classes of one name: {_some(classes)}.")
    table = torch.tensor([union.index(each) for each in classes])
    if isinstance(dataset, DatasetFolder) and dataset.target_transform is None:
        # A shallow copy: the user's own stays as it is.
        changed = copy.copy(dataset)
        changed.targets = table[torch.tensor(dataset.targets, dtype=torch.long)].tolist()
        changed.samples = [(path, label) for (path, _), label in zip(dataset.samples, changed.targets)]
        if hasattr(dataset, "imgs"):
            changed.imgs = changed.samples  # type: ignore[attr-defined]
        changed.classes, changed.class_to_idx = list(union), {each: number for number, each in enumerate(union)}
        return changed
    if isinstance(dataset, ColumnSamples):
        changed = copy.copy(dataset)
        changed.targets, changed.classes = table[dataset.targets], tuple(union)
        return changed
    if type(dataset) is TensorDataset and len(dataset.tensors) > 1 and not dataset.tensors[-1].is_floating_point():
        *inputs, labels = dataset.tensors
        if len(labels) and not 0 <= int(labels.min()) <= int(labels.max()) < len(classes):
            raise ConfigurationError(
                f"{name!r} has labels in {int(labels.min())} .. {int(labels.max())}, and names for {len(classes)} "
                f"classes: {_some(classes)}."
            )
        changed = TensorDataset(*inputs, table[labels.cpu().long()])
        changed.classes = tuple(union)  # type: ignore[attr-defined]
        return changed
    raise ConfigurationError(
        f"{name!r} has the classes {_some(classes)}, and all together have {_some(union)}. The labels of a "
        f"{type(dataset).__name__} cannot be numbered anew: number them alike at all clients, with an attribute "
        "`classes` that names all."
    )


def _some(names: Sequence[str]) -> str:
    return ", ".join(list(names)[:8]) + (", ..." if len(names) > 8 else "")
