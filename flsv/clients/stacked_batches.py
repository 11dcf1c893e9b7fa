"""Batches of many clients as one, ``[m, B, ...]``, for models that are trained side by side."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from operator import is_
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_map_only, tree_unflatten

from flsv.errors import ConfigurationError


class ManyBatches(ABC):
    """What several clients train on, batch by batch.

    Attributes:
        lengths: every client's number of batches.
    """

    lengths: list[int]

    @abstractmethod
    def at(self, clients: Sequence[int], step: int) -> Iterator[tuple[list[int], Any]]:
        """The ``step``-th batches of some clients. Those of one size come together, since a mean over padding would be
        another loss: places among ``clients``, and their batches stacked."""

    def one(self, client: int, step: int) -> Any:
        """One batch as it is."""
        ((_, stacked),) = self.at([client], step)
        return tree_map_only(Tensor, lambda tensor: tensor[0], stacked)


class GivenBatches(ManyBatches):
    """Stacks batches that are there.

    Args:
        given: of every client.

    Raises:
        ConfigurationError: from :meth:`at`, batches that hold something else than tensors.

    Example:
        >>> many = GivenBatches([[torch.zeros(4, 2)], [torch.ones(4, 2), torch.ones(1, 2)], [torch.ones(3, 2)]])
        >>> [(places, list(batch.shape)) for places, batch in many.at([0, 1, 2], 0)]
        [([0, 1], [2, 4, 2]), ([2], [1, 3, 2])]
    """

    def __init__(self, given: Sequence[Sequence[Any]]) -> None:
        self._given, self.lengths = given, [len(batches) for batches in given]

    def at(self, clients: Sequence[int], step: int) -> Iterator[tuple[list[int], Any]]:
        flat = [tree_flatten(self._given[client][step]) for client in clients]
        for places in _alike([tuple(map(_shape, leaves)) for leaves, _ in flat]):
            leaves = [torch.stack(parts) for parts in zip(*(flat[place][0] for place in places))]
            yield places, tree_unflatten(leaves, flat[places[0]][1])


class GatheredBatches(ManyBatches):
    """Gathers the batches of many clients out of the same tensors, one ``index_select`` for all of them.

    Batches of one shape are gathered into the same memory: one of them is good until the next is asked for.

    Args:
        tensors: ``[N, ...]`` each.
        rows: which of their rows, int64 ``[B]`` for every client's every batch.
        move: to where the batches are needed. Not called again for a shape that it has left where it was.

    Example:
        >>> many = GatheredBatches([torch.arange(5)], [[torch.tensor([4, 0])], [torch.tensor([1, 2])]])
        >>> list(many.at([0, 1], 0))
        [([0, 1], (tensor([[4, 0],
                [1, 2]]),))]
    """

    def __init__(
        self,
        tensors: Sequence[Tensor],
        rows: Sequence[Sequence[Tensor]],
        move: Callable[[Any], Any] = lambda batch: batch,
    ) -> None:
        self._tensors, self._rows, self._move = tensors, rows, move
        self.lengths = [len(each) for each in rows]
        self._gathered: dict[torch.Size, tuple[list[Tensor], tuple[Tensor, ...]]] = {}
        self._there: set[torch.Size] = set()

    def at(self, clients: Sequence[int], step: int) -> Iterator[tuple[list[int], Any]]:
        rows = [self._rows[client][step] for client in clients]
        for places in _alike([each.shape for each in rows]):
            index = torch.stack([rows[place] for place in places])
            if index.shape not in self._gathered:
                new = [tensor.new_empty(index.numel(), *tensor.shape[1:]) for tensor in self._tensors]
                self._gathered[index.shape] = new, tuple(each.unflatten(0, index.shape) for each in new)
            gathered, given = self._gathered[index.shape]
            for tensor, out in zip(self._tensors, gathered):
                torch.index_select(tensor, 0, index.flatten(), out=out)
            if index.shape not in self._there:
                moved = self._move(given)
                if isinstance(moved, tuple) and all(map(is_, moved, given)):
                    self._there.add(index.shape)
            yield places, given if index.shape in self._there else moved


def _alike(keys: Sequence[Any]) -> Iterator[list[int]]:
    """Places with the same key."""
    for key in dict.fromkeys(keys):
        yield [place for place, each in enumerate(keys) if each == key]


def _shape(leaf: Any) -> Any:
    if not isinstance(leaf, Tensor):
        raise ConfigurationError(
            f'engine="vmap" stacks the clients\' batches, which have to hold tensors only, and one holds a '
            f'{type(leaf).__name__}. Let the data set give tensors, or train with engine="sequential".'
        )
    return leaf.shape
