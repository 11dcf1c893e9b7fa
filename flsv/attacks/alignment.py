"""Alignment and HeadAlignment: updates turned towards the server's last step.

Sending that step again is the "delta weights" attack of free-riders (Lin, Du, Liu, arXiv:1911.12560, section 4.3).
"""

from __future__ import annotations

from typing import Annotated

import torch
from annotated_types import Gt, Le
from torch import Tensor

from flsv.attacks.base import Attack
from flsv.core.parameter_space import Head, ParameterSpace
from flsv.uploads import UploadContext
from flsv.utilities.errors import ConfigurationError


class Alignment(Attack):
    """Attack that turns the update towards the server's last step and keeps its length.

    The update d becomes a vector of length |d| in the direction of (1 - mix) d / |d| + mix g / |g|, where g is the
    client's start point minus its start point of the last round in which it took part. In its first round, or if the
    start point has not changed, the client sends d. Start points are stored between rounds: P numbers per client.

    Args:
        mix: weight of the server's step, in (0, 1]. With 1 the direction is that of the server's step only.
        clients: the clients that attack, see :class:`flsv.data.ClientChoice`.
        fraction: share of the clients that attack, instead of ``clients``.
        seed: seed of the choice of clients.

    Raises:
        ConfigurationError: ``mix`` is out of range.

    Example:
        >>> known = {"attack.0.start": torch.tensor([0.0, 0.0])}
        >>> now = UploadContext(0, 2, num_parameters=2, round_index=1, state=known, start=torch.tensor([0.0, 5.0]))
        >>> Alignment(mix=1.0).apply(torch.tensor([2.0, 0.0]), now)
        tensor([0., 2.])
    """

    def __init__(
        self,
        mix: Annotated[float, Gt(0), Le(1)] = 0.5,
        clients: list[int] | None = None,
        fraction: float | None = None,
        seed: int | None = None,
    ) -> None:
        super().__init__(clients, fraction, seed)
        self.mix = mix

    def attack(self, update: Tensor, context: UploadContext, generator: torch.Generator) -> Tensor:
        name = f"attack.{context.position}.start"
        if context.start is None:
            return update
        start = context.start[: context.num_parameters].detach().clone()
        before = context.state.get(name)
        context.state[name] = start
        return update if before is None else self.turned(update, start - before.to(start))

    def turned(self, update: Tensor, step: Tensor) -> Tensor:
        """Return ``update [P]`` turned towards ``step [P]``, with the same length."""
        length, far = update.norm(), step.norm()
        if length == 0 or far == 0:
            return update
        direction = (1 - self.mix) * update / length + self.mix * step / far
        norm = direction.norm()
        return update if norm == 0 else direction * (length / norm)


class HeadAlignment(Alignment):
    """Attack that turns the classifier head's rows towards the server's last step.

    Class-specific Shapley values are cosines of these rows, one per class: a client without samples of a class can fill
    in its row. The attack is ours.

    Each row keeps its length, bias included, so that lengths do not reveal the attack. The layers before the head are
    unchanged. In its first round a client sends its own update. The head of its start point, ``[M, D (+1)]``, is stored
    between rounds.

    Args:
        classes: the classes whose rows are turned. None: all classes.
        mix: weight of the server's step, in (0, 1], see :class:`Alignment`. With 1 the rows point in the direction of
            that step only.
        clients: the clients that attack, see :class:`flsv.data.ClientChoice`.
        fraction: share of the clients that attack, instead of ``clients``.
        seed: seed of the choice of clients.
        head: name of the classifier head as in ``module.named_modules()``. By default timm's ``get_classifier()`` or
            the last ``nn.Linear``.

    Raises:
        ConfigurationError: ``mix`` is out of range, or before training: the module has no classifier head, or the head
            lacks one of the classes.

    Example:
        >>> from torch import nn
        >>> attack = HeadAlignment(classes=[1])
        >>> attack.check(ParameterSpace(nn.Linear(2, 2, bias=False)))
        >>> known = {"attack.0.head": torch.zeros(2, 2)}
        >>> step = torch.tensor([5.0, 0.0, 0.0, 5.0])
        >>> now = UploadContext(0, 2, num_parameters=4, round_index=1, state=known, start=step)
        >>> attack.apply(torch.tensor([0.0, 1.0, 2.0, 0.0]), now)
        tensor([0., 1., 0., 2.])
    """

    def __init__(
        self,
        classes: list[int] | None = None,
        mix: Annotated[float, Gt(0), Le(1)] = 1.0,
        clients: list[int] | None = None,
        fraction: float | None = None,
        seed: int | None = None,
        head: str | None = None,
    ) -> None:
        super().__init__(mix, clients, fraction, seed)
        self.classes = classes
        self.head = head
        self._head: Head | None = None

    def check(self, space: ParameterSpace) -> None:
        if space.head is None:
            raise ConfigurationError(
                f"{self!r} turns a classifier head, and the module has none that is shared. Name the last layer with "
                "HeadAlignment(head=...), or use flsv.attacks.Alignment, which turns the whole update."
            )
        wrong = [each for each in self.classes or () if not 0 <= each < space.head.num_classes]
        if wrong:
            raise ConfigurationError(
                f"{self!r}: the head {space.head.name!r} has no classes {wrong}; they are 0 .. "
                f"{space.head.num_classes - 1}."
            )
        self._head = space.head

    def attack(self, update: Tensor, context: UploadContext, generator: torch.Generator) -> Tensor:
        name, head = f"attack.{context.position}.head", self._head
        if context.start is None or head is None:
            return update
        now = head.rows(context.start).detach().clone()
        before = context.state.get(name)
        context.state[name] = now
        if before is None:
            return update
        rows, step = head.rows(update).clone(), now - before.to(now)
        for row in range(len(rows)) if self.classes is None else self.classes:
            rows[row] = self.turned(rows[row], step[row])
        result, width = update.clone(), head.weight.stop - head.weight.start
        result[head.weight] = rows[:, : width // len(rows)].flatten()
        if head.bias is not None:
            result[head.bias] = rows[:, -1]
        return result
