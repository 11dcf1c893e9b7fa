"""Random generators that a data set, its transforms or a collate_fn hold: where they stand depends on all that was read
before, which a resumed run has not read.

So every pass over a loader begins by seeding them, by what the pass is for: in training a client's local epoch of a
round; in evaluation always alike. Workers each get a stream of their own.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from functools import partial
from itertools import islice
from types import MethodType
from typing import Any

import lightning as L
import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from flsv.seeding import derive_seed

_KINDS = (np.random.RandomState, np.random.Generator, random.Random, torch.Generator)
#: The global ones, which are seeded anyway.
_GLOBAL = (np.random.mtrand._rand, random._inst, torch.default_generator)  # type: ignore[attr-defined]
#: What is not looked into: data, and whoever may hold everything.
_CLOSED = (str, bytes, int, float, Tensor, np.ndarray, type, L.Trainer, L.LightningModule, L.LightningDataModule)
#: How many objects may lie between a data set and a generator; how far a collection is looked into: file names go by
#: the million.
_DEPTH, _LOOKED_AT = 4, 1000


def held_generators(*holders: Any) -> dict[str, Any]:
    """The generators that objects hold in attributes, of their classes too (MONAI's ``R``), lists, tuples and
    dictionaries, by their places; each once, however often it is held. At most four objects may lie between a data set
    and its generator.

    Example:
        >>> class Cropped(torch.utils.data.Dataset):
        ...     def __init__(self):
        ...         self.transforms = [np.random.RandomState(3)]
        >>> list(held_generators(Cropped()))
        ['Cropped.transforms.0']
    """
    found: dict[int, tuple[str, Any]] = {}
    deepest: dict[int, int] = {}

    def look(value: Any, place: str, depth: int) -> None:
        if isinstance(value, _KINDS):
            if not any(value is each for each in _GLOBAL):
                found.setdefault(id(value), (place, value))
            return
        depth = _DEPTH + 1 if isinstance(value, Dataset) else depth
        if value is None or isinstance(value, _CLOSED) or depth <= deepest.get(id(value), 0):
            return
        deepest[id(value)] = depth
        for name, part in _parts(value).items():
            look(part, f"{place}.{name}", depth - 1)

    for holder in holders:
        look(holder, type(holder).__name__, _DEPTH + 1)
    return dict(found.values())


def _parts(value: Any) -> dict[Any, Any]:
    if isinstance(value, Mapping):
        return dict(islice(value.items(), _LOOKED_AT))
    if isinstance(value, list | tuple):
        return dict(enumerate(value[:_LOOKED_AT]))
    if isinstance(value, MethodType):
        return {"__self__": value.__self__}
    if isinstance(value, partial):
        return {"func": value.func, "args": value.args, "keywords": value.keywords}
    classes = ((kind.__name__, vars(kind)) for kind in type(value).__mro__)
    of_classes = {f"{kind}.{n}": part for kind, own in classes for n, part in own.items() if isinstance(part, _KINDS)}
    return {**getattr(value, "__dict__", {}), **of_classes}


def seed_held(generators: Mapping[str, Any], seed: int, *path: int | str) -> None:
    """Put every one of them at the start of a stream of its own.

    Example:
        >>> held = {"a": np.random.default_rng(), "b": random.Random()}
        >>> seed_held(held, 0)
        >>> first = held["a"].random(), held["b"].random()
        >>> seed_held(held, 0)
        >>> (held["a"].random(), held["b"].random()) == first
        True
    """
    for place, generator in enumerate(generators.values()):
        derived = derive_seed(seed, "held generator", place, *path)
        if isinstance(generator, np.random.RandomState):
            generator.seed(derived % 2**32)
        elif isinstance(generator, np.random.Generator):
            generator.bit_generator.state = type(generator.bit_generator)(derived).state
        elif isinstance(generator, torch.Generator):
            generator.manual_seed(derived)
        else:
            generator.seed(derived)


class SeededLoader(DataLoader):
    """A ``DataLoader`` that seeds the data's random generators at the start of each pass."""

    def _get_iterator(self) -> Any:
        holders = (self.dataset, self.collate_fn)
        seed = self.generator.initial_seed()
        seed_held(held_generators(*holders), seed)
        if self.num_workers:
            init = self.worker_init_fn
            init = init.args[2] if isinstance(init, partial) and init.func is _in_worker else init
            self.worker_init_fn = partial(_in_worker, holders, seed, init)
        return super()._get_iterator()


def _in_worker(holders: tuple[Any, ...], seed: int, init: Callable[[int], None] | None, worker: int) -> None:
    """A ``worker_init_fn``: copies of one generator in several workers would draw the same."""
    seed_held(held_generators(*holders), seed, worker)
    if init is not None:
        init(worker)
