"""Attack: what a malicious client does to its update before it leaves."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor

from flsv.data.corruption.choice import ClientChoice
from flsv.errors import ConfigurationError
from flsv.seeding import generator_for


class Attack(ClientChoice, ABC):
    """Some clients send something else than what they learnt. Subclasses override :meth:`attack`.

    Which clients, nobody but tests and figures knows: the server sees vectors. With the same ``fraction`` and ``seed``
    an attack and a :class:`flsv.data.Corruption` concern the same clients.

    Args:
        clients: whom it concerns, see :class:`flsv.data.ClientChoice`.
        fraction: likewise.
        seed: seed of the choice of clients and of all noise.

    Raises:
        ConfigurationError: arguments out of range.

    Example:
        >>> class Shy(Attack):
        ...     def attack(self, update, round_index, generator):
        ...         return update / 10
        >>> attacked([Shy(clients=[1])], torch.ones(2), client=1, num_clients=3, num_parameters=2, round_index=0)
        tensor([0.1000, 0.1000])
    """

    #: Whether the client trains at all. The buffers (BatchNorm's statistics) of one that does not stay as they were.
    trains: bool = True

    @abstractmethod
    def attack(self, update: Tensor, round_index: int, generator: torch.Generator) -> Tensor:
        """What the client sends instead of ``update``.

        Args:
            update: the client's parameters after training minus those it started from, floating-point ``[P]``, on any
                device; not to be changed in place. Buffers are no part of it: a running variance that is flipped or
                scaled turns negative, and the model into NaN, which is another attack.
            round_index: the round, from 0 on.
            generator: CPU generator that depends on ``seed``, the round and the client.
        """


def attacked(
    attacks: Sequence[Attack],
    update: Tensor,
    *,
    client: int,
    num_clients: int,
    num_parameters: int,
    round_index: int,
) -> Tensor:
    """A client's update as it leaves the client: changed, in turn, by the attacks that concern it.

    Args:
        attacks: all that there are.
        update: the client's vector minus its start point, ``[P]``; returned itself if no attack concerns the client.
        client: the client's number.
        num_clients: clients of the federation.
        num_parameters: how many leading entries of ``update`` are parameters; the rest are buffers.
        round_index: the round, from 0 on.

    Raises:
        ConfigurationError: an attack that changes the update's shape.

    Example:
        >>> from flsv.attacks import SignFlip
        >>> attacked([SignFlip()], torch.ones(3), client=0, num_clients=2, num_parameters=2, round_index=0)
        tensor([-1., -1.,  1.])
    """
    for position, attack in enumerate(attacks):
        if client not in attack.chosen(num_clients):
            continue
        parameters, buffers = update[:num_parameters], update[num_parameters:]
        # The position tells two attacks of one seed apart.
        generator = generator_for(attack.seed, "attack", position, round_index, client)
        sent = attack.attack(parameters, round_index, generator)
        if sent.shape != parameters.shape:
            raise ConfigurationError(
                f"{attack!r} made {list(sent.shape)} out of an update {list(parameters.shape)}; it has to keep the "
                f"shape."
            )
        update = torch.cat([sent.to(update), buffers if attack.trains else torch.zeros_like(buffers)])
    return update
