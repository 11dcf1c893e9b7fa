"""Attack: base class of attacks by single clients."""

from __future__ import annotations

from abc import abstractmethod

import torch
from torch import Tensor

from flsv.data.corruption import ClientChoice
from flsv.uploads import Upload, UploadContext
from flsv.utilities.errors import ConfigurationError
from flsv.utilities.seeding import generator_for


class Attack(ClientChoice, Upload):
    """Base class: some clients send a different update than the one they trained. Subclasses override :meth:`attack`.

    Which clients, nobody but tests and figures knows: the server sees vectors. With the same ``fraction`` and ``seed``
    an attack and a :class:`flsv.data.Corruption` concern the same clients.

    Args:
        clients: whom it concerns, see :class:`flsv.data.ClientChoice`.
        fraction: likewise.
        seed: seed of the choice of clients and of all noise; None: ``seed_everything``'s.

    Raises:
        ConfigurationError: arguments out of range.

    Example:
        >>> class Shy(Attack):
        ...     def attack(self, update, context, generator):
        ...         return update / 10
        >>> context = UploadContext(client=1, num_clients=3, num_parameters=2, round_index=0)
        >>> Shy(clients=[1]).apply(torch.ones(2), context)
        tensor([0.1000, 0.1000])
    """

    place = 0
    #: Whether the client trains at all. The buffers (BatchNorm's statistics) of one that does not stay as they were.
    trains: bool = True

    @abstractmethod
    def attack(self, update: Tensor, context: UploadContext, generator: torch.Generator) -> Tensor:
        """The update that the client sends instead of ``update``.

        Args:
            update: the client's parameters after training minus those it started from, floating-point ``[P]``, on any
                device; not to be changed in place. Buffers are no part of it: a running variance that is flipped or
                scaled turns negative, and the model into NaN, which is another attack.
            context: the client and the round; what it started from, ``start``, and what it keeps between rounds,
                ``state``.
            generator: CPU generator that depends on ``seed``, the round and the client.
        """

    def apply(self, update: Tensor, context: UploadContext) -> Tensor:
        """``update [P]`` as it leaves: itself where the attack does not concern the client.

        Raises:
            ConfigurationError: the attack changes the update's shape.

        Example:
            >>> from flsv.attacks import SignFlip
            >>> SignFlip().apply(torch.ones(3), UploadContext(client=0, num_clients=2, num_parameters=2, round_index=0))
            tensor([-1., -1.,  1.])
        """
        if context.client not in self.chosen(context.num_clients):
            return update
        parameters, buffers = update[: context.num_parameters], update[context.num_parameters :]
        # The position tells two attacks of one seed apart.
        generator = generator_for(self.seed, "attack", context.position, context.round_index, context.client)
        sent = self.attack(parameters, context, generator)
        if sent.shape != parameters.shape:
            raise ConfigurationError(
                f"{self!r} made {list(sent.shape)} out of an update {list(parameters.shape)}; it has to keep the shape."
            )
        return torch.cat([sent.to(update), buffers if self.trains else torch.zeros_like(buffers)])
