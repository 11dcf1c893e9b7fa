"""Arrays ``(X, y)`` as a data set, objects with columns as tables; and several data sets as one: the clients', whose
classes have one numbering then, and those to evaluate with."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import ConcatDataset, Dataset, TensorDataset

from flsv.data.groups import check_spelling
from flsv.data.labels import class_names_of
from flsv.data.loaders import tensors_of
from flsv.data.sources.base import Reading, image_tensor
from flsv.data.sources.table import Table, frame_table, is_columnar
from flsv.errors import ConfigurationError, listed


def is_array(value: Any) -> bool:
    """Whether it is a NumPy array or a tensor.

    Example:
        >>> is_array(np.zeros(2)), is_array([0.0, 0.0])
        (True, False)
    """
    return isinstance(value, np.ndarray | Tensor)


def is_pair_of_arrays(value: Any) -> bool:
    """Whether it is ``(X, y)``: an array of inputs, and an array or a list of what is to be predicted.

    Example:
        >>> is_pair_of_arrays((np.zeros((2, 3)), ["a", "b"])), is_pair_of_arrays((np.zeros((2, 3)), (np.zeros(2),) * 2))
        (True, False)
    """
    if not isinstance(value, list | tuple) or len(value) != 2 or not is_array(value[0]):
        return False
    y = value[1]
    if isinstance(y, list | tuple):
        return not any(is_array(entry) or isinstance(entry, list | tuple) for entry in y)
    # A pandas Series has a shape, too.
    return is_array(y) or (hasattr(y, "shape") and not isinstance(y, Dataset) and not is_columnar(y))


def array_set(x: Any, y: Any = None) -> TensorDataset:
    """Inputs, and perhaps what is to be predicted, as tensors.

    Floating-point inputs become float32; 8-bit pixels ``[N, H, W]`` or ``[N, H, W, 1 or 3]`` images ``[N, C, H, W]`` in
    0 .. 1; other whole numbers int64, which are tokens to a model. Whole numbers and words to be predicted are classes,
    words in sorted order; floating-point numbers are numbers (float32).

    Args:
        x: ``[N, ...]``.
        y: ``[N]``, ``[N, 1]`` or, for numbers, ``[N, ...]``; None: nothing is to be predicted.

    Returns:
        With the attribute ``classes``, if ``y`` are words.

    Raises:
        ConfigurationError: no numbers, other lengths, or a target that is missing.

    Example:
        >>> data = array_set(np.eye(3), ["ill", "well", "ill"])
        >>> data.tensors[1], data.classes
        (tensor([0, 1, 0]), ('ill', 'well'))
    """
    inputs = _inputs(x)
    if y is None:
        return TensorDataset(inputs)
    targets = y.detach().cpu().numpy() if isinstance(y, Tensor) else np.asarray(y)
    if targets.ndim == 0 or len(targets) != len(inputs):
        raise ConfigurationError(f"(X, y): X has {len(inputs)} entries and y the shape {list(targets.shape)}.")
    if targets.ndim == 2 and targets.shape[1] == 1 and targets.dtype.kind != "f":
        targets = targets[:, 0]
    if targets.dtype.kind in "biu":
        return TensorDataset(inputs, torch.from_numpy(targets.astype(np.int64)))
    if targets.dtype.kind == "f" and np.isfinite(targets).all():
        return TensorDataset(inputs, torch.from_numpy(targets.astype(np.float32)))
    if targets.ndim != 1 or not all(isinstance(entry, str) for entry in targets.tolist()):
        about = f"(X, y): y is {targets.dtype} {list(targets.shape)}"
        raise ConfigurationError(f"{about}. Expected classes, one each, or numbers, none of them NaN or infinite.")
    classes, numbers = np.unique(targets.astype(str), return_inverse=True)
    data = TensorDataset(inputs, torch.from_numpy(numbers.reshape(-1).astype(np.int64)))
    data.classes = tuple(classes.tolist())  # type: ignore[attr-defined]
    return data


def _inputs(x: Any) -> Tensor:
    found = x.detach().cpu() if isinstance(x, Tensor) else None
    if found is None:
        array = np.asarray(x)
        if array.ndim == 0 or array.dtype.kind not in "biuf":
            raise ConfigurationError(f"(X, y): X is {array.dtype} {list(array.shape)}; expected numbers [N, ...].")
        # A tensor shares an array's memory, which has to lie in order, be writable and in native byte order.
        array = np.require(array, array.dtype.newbyteorder("="), ["C", "W"])
        found = torch.from_numpy(array.astype(np.int64) if array.dtype.kind in "iu" and array.itemsize > 1 else array)
    if found.dtype == torch.uint8 and (found.ndim == 3 or (found.ndim == 4 and found.shape[3] in (1, 3))):
        return image_tensor(found)
    if found.is_floating_point():
        return found.float()
    return found if found.is_complex() else found.long()


def read_frame(frame: Any, reading: Reading) -> Dataset | Table:
    """An object with named columns as a table; a Hugging Face data set of which no label was said, as it is: its rows
    are dictionaries, and somebody has a model for these."""
    as_it_is = isinstance(getattr(frame, "features", None), Mapping) and reading.label is None
    return frame if as_it_is else frame_table(frame)


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
    everybody = {**parts, **{name: part for name, part in held_out.items() if part is not None}}
    named = {name: class_names_of(part) for name, part in everybody.items()}
    found = {named[name] for name in parts}
    if found == {()}:
        return dict(parts), dict(held_out), ()
    union = next(iter(found)) if len(found) == 1 else tuple(sorted(set().union(*found)))
    check_spelling(union, "The data")
    for name, classes in named.items():
        # Without names, the numbers mean what all the clients mean by them: they all name the same.
        if not classes and len(found) > 1:
            raise ConfigurationError(f"{name!r} has no names for its classes, and others have: set its `classes`.")
        strange = [each for each in classes if each not in union]
        if strange:
            raise ConfigurationError(f"The {name} data have classes that no client has: {listed(strange, 8)}.")
    same = {
        name: _renumbered(part, named[name], union, name) if named[name] else part for name, part in everybody.items()
    }
    return {name: same[name] for name in parts}, {name: same.get(name) for name in held_out}, union


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
    held = [tensors_of(part, None) for part in sets]
    if len(sets) == 1 or any(tensors is None for tensors, _ in held):
        return sets[0] if len(sets) == 1 else ConcatDataset(sets)
    columns = [[x if rows is None else x[rows] for x in tensors or ()] for tensors, rows in held]
    kinds = {", ".join(f"{x.dtype} {list(x.shape[1:])}" for x in each): name for each, name in zip(columns, parts)}
    if len(kinds) > 1:
        both = " and ".join(f"those of {name!r} ({kind})" for kind, name in kinds.items())
        raise ConfigurationError(f"The samples differ: {both}. One model is trained on all: they must be alike.")
    return TensorDataset(*(torch.cat(column) for column in zip(*columns)))


def _renumbered(dataset: Dataset, classes: Sequence[str], union: Sequence[str], name: str) -> Dataset:
    if tuple(classes) == tuple(union):
        return dataset
    numbers = torch.tensor([union.index(each) for each in classes])
    if type(dataset) is TensorDataset and len(dataset.tensors) > 1 and not dataset.tensors[-1].is_floating_point():
        *inputs, labels = dataset.tensors
        changed: Any = TensorDataset(*inputs, numbers[labels.cpu().long()])
    elif getattr(dataset, "target_transform", "none") is None:  # torchvision's: a shallow copy, theirs stays as it is
        changed = copy.copy(dataset)
        changed.target_transform = numbers.tolist().__getitem__
    else:
        kind = type(dataset).__name__
        raise ConfigurationError(
            f"{name!r} has the classes {listed(classes, 8)}, and all together have {listed(union, 8)}. The labels of a "
            f"{kind} cannot be numbered anew: number them alike at all clients, with an attribute `classes` of all."
        )
    changed.classes = tuple(union)
    return changed
