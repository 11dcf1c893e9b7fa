"""Designs: which coalitions of n clients are trained, of all that there are."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from math import comb
from typing import Any

import torch
from torch import Tensor

from flsv.functional.shapley.few_coalitions import (
    SIZES_OF_DESIGNS,
    Which,
    few_coalitions,
    sizes_of_design,
)
from flsv.functional.shapley.game import coalition_keys, first_positions
from flsv.functional.shapley.halvings import choose_halvings, has_halvings
from flsv.games.members import members_of
from flsv.utilities.choices import Trainings
from flsv.utilities.errors import ConfigurationError


class Design(ABC):
    """Coalitions that are trained.

    A design of your own is a subclass with :meth:`coalitions`, and the argument ``coalitions`` of
    :class:`flsv.metrics.ShadowShapley`. Its price and its values follow from its coalitions.

    Example:
        >>> class Ring(Design):
        ...     def coalitions(self, num_clients):
        ...         alone = torch.eye(num_clients, dtype=torch.bool)
        ...         return torch.cat([alone, alone | alone.roll(1, dims=1)])
        >>> Ring().masks(4).sum(1).tolist()
        [0, 4, 1, 1, 1, 1, 2, 2, 2, 2]
    """

    name: str = ""
    """The name by which ``coalitions`` names the design, if it has one."""
    grows: bool = False
    """Whether further coalitions are trained that are chosen once the first ones have models."""

    @abstractmethod
    def coalitions(self, num_clients: int) -> Tensor:
        """Return the coalitions that are trained first, bool ``[J, n]``. Each counts once. The empty coalition and that
        of all clients are added.
        """

    def masks(self, num_clients: int) -> Tensor:
        """Return the coalitions that are trained first, bool ``[K, n]``, without duplicates. The first two are the
        empty coalition and that of all clients.

        Raises:
            ConfigurationError: the design's coalitions have another type or shape.
        """
        coalitions = self.coalitions(num_clients)
        if coalitions.dtype != torch.bool or coalitions.shape[1:] != (num_clients,):
            raise ConfigurationError(
                f"{type(self).__name__}.coalitions({num_clients}) has returned {coalitions.dtype} "
                f"{list(coalitions.shape)}. Return a bool tensor of shape [J, {num_clients}], with a row for each "
                "coalition."
            )
        ends = torch.zeros(2, num_clients, dtype=torch.bool)
        ends[1] = True
        masks = torch.cat([ends, coalitions.cpu()])
        return masks[list(first_positions(coalition_keys(masks)).values())]

    def planned_masks(self, num_clients: int) -> Tensor:
        """Return coalitions ``[K, n]`` with the number and the sizes of all that will be trained."""
        return self.masks(num_clients)

    def next_masks(
        self, masks: Tensor, outputs: Tensor, *, logits: bool, names: Sequence[str], seed: int
    ) -> Tensor:
        """Choose the coalitions to train next, bool ``[J, n]``. If J is 0, none has to be trained any more.

        Args:
            masks: bool ``[K, n]``, the trained coalitions.
            outputs: ``[K, V, ...]``, their models' outputs. Those of the empty and the full coalition are not used.
            logits: whether the outputs are logits.
            names: the clients' names.
            seed: the run's seed.
        """
        return masks[:0]

    def plain(self, num_clients: int) -> Any:
        """Return the argument ``coalitions`` that names these coalitions, as words, numbers and lists."""
        return self.name or [list(members) for members in members_of(self.masks(num_clients))]

    def __eq__(self, other: object) -> bool:
        return type(self) is type(other) and vars(self) == vars(other)

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        arguments = ", ".join(f"{name}={value!r}" for name, value in vars(self).items())
        return f"{type(self).__name__}({arguments})"

    def in_words(self, masks: Tensor) -> str:
        """Name the coalitions ``[K, n]`` of this design that are trained, with a verb."""
        num_clients = masks.shape[1]
        num_coalitions = len(masks) - 2
        if num_coalitions == num_clients and has_all_of_sizes(masks, {1}):
            return f"a model of each of {num_clients} clients alone is"
        return f"models of {num_coalitions} groups of clients are"


@dataclass(frozen=True)
class BySize(Design):
    """Coalitions of some sizes, all of each: a design of :func:`flsv.functional.few_coalitions`, by name."""

    name: Which = "both"

    def coalitions(self, num_clients: int) -> Tensor:
        return few_coalitions(num_clients, self.name)


@dataclass(frozen=True)
class Listed(Design):
    """The coalitions of a list, each with the numbers of its members."""

    members: Sequence[Sequence[int]] = ()

    def coalitions(self, num_clients: int) -> Tensor:
        clients = range(num_clients)
        masks = []
        for members in self.members:
            unknown_clients = [member for member in members if member not in clients]
            if unknown_clients:
                raise ConfigurationError(
                    f"ShadowShapley(coalitions=...): {list(members)} names clients {unknown_clients}, but the "
                    f"federation has the clients 0 to {num_clients - 1}."
                )
            masks.append([client in members for client in clients])
        return torch.tensor(masks, dtype=torch.bool).view(-1, num_clients)

    def plain(self, num_clients: int) -> Any:
        return [list(members) for members in self.members]


@dataclass(frozen=True)
class Halves(Design):
    """Each client alone, and complementary halves of clients whose outputs are unlike, see
    :func:`flsv.functional.choose_halvings`.
    """

    halvings: int = 1
    """The number of times that all clients are halved. Each costs one more run."""
    name = "halves"
    grows = True

    def coalitions(self, num_clients: int) -> Tensor:
        return few_coalitions(num_clients, "singles")

    def planned_masks(self, num_clients: int) -> Tensor:
        names = [f"{client}" for client in range(num_clients)]
        equal_outputs = torch.zeros(num_clients, 1)
        halves = choose_halvings(equal_outputs, names, self.halvings, logits=False)
        return torch.cat([self.masks(num_clients), halves])

    def next_masks(
        self, masks: Tensor, outputs: Tensor, *, logits: bool, names: Sequence[str], seed: int
    ) -> Tensor:
        is_single = masks.sum(1) == 1
        has_halves = len(masks) > 2 + int(is_single.sum())
        if has_halves:
            return masks[:0]
        clients = masks[is_single].int().argmax(1)
        outputs_by_client = outputs[is_single][clients.argsort()]
        return choose_halvings(outputs_by_client, names, self.halvings, logits=logits, seed=seed)

    def in_words(self, masks: Tensor) -> str:
        num_clients = masks.shape[1]
        num_halves = len(masks) - 2 - num_clients
        if not num_halves:  # of two clients
            return super().in_words(masks)
        return (
            f"models of each of {num_clients} clients alone and of {num_halves} complementary groups of unlike "
            "clients are"
        )


def design_named(
    coalitions: Trainings | Sequence[Sequence[int]] | Design, halvings: int = 1
) -> Design:
    """Return the design that the arguments ``coalitions`` and ``halvings`` of ``ShadowShapley`` name.

    Example:
        >>> design_named("singles"), design_named("halves", 2)
        (BySize(name='singles'), Halves(halvings=2))
    """
    if isinstance(coalitions, Design):
        return coalitions
    if coalitions == "halves":
        return Halves(halvings)
    if isinstance(coalitions, str):
        return BySize(coalitions)
    return Listed(tuple(tuple(members) for members in coalitions))


def design_of(masks: Tensor) -> Design | None:
    """Return the design with a name to which coalitions ``[K, n]`` belong, or None if there is none. Where several have
    the same coalitions, it is the first.

    Example:
        >>> design_of(few_coalitions(4, "both")), design_of(few_coalitions(2, "singles"))
        (BySize(name='both'), BySize(name='all'))
    """
    num_coalitions, num_clients = masks.shape
    if num_coalitions == 2**num_clients:
        return BySize("all")
    if has_halvings(masks):
        num_halves = num_coalitions - num_clients - 2  # besides the clients alone
        return Halves(num_halves // 2)
    for name in SIZES_OF_DESIGNS:
        if has_all_of_sizes(masks, sizes_of_design(num_clients, name)):
            return BySize(name)
    return None


def has_all_of_sizes(masks: Tensor, sizes: set[int]) -> bool:
    """Return whether coalitions ``[K, n]`` are all that have these sizes, beside the empty one and the full one."""
    num_clients = masks.shape[1]
    counts = torch.bincount(masks.sum(1), minlength=num_clients + 1).tolist()
    return all(
        counts[size] == (comb(num_clients, size) if size in sizes else 0)
        for size in range(1, num_clients)
    )
