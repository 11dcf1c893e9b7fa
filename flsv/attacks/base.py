"""Attack: base class of attacks by single clients."""

from __future__ import annotations

from abc import abstractmethod

import torch
from torch import Tensor

from flsv.data.corruption import ClientChoice
from flsv.uploads.base import Upload, UploadContext
from flsv.utilities.errors import ConfigurationError
from flsv.utilities.seeding import generator_for


class Attack(ClientChoice, Upload):
    """Base class of attacks in which a client changes its own update. :meth:`attack`, which subclasses override,
    computes the changed update after the client's training.

    Tests and figures read which clients attack, the server does not. With the same ``fraction`` and ``seed`` an
    attack and a :class:`flsv.data.Corruption` choose the same clients.

    Args:
        clients: the clients that attack, see :class:`flsv.data.ClientChoice`.
        fraction: their share, instead of ``clients``.
        seed: seed of the choice of clients and of all noise. By default the seed of ``seed_everything``.

    Raises:
        ConfigurationError: an argument is out of range.

    Example:
        >>> class Shy(Attack):
        ...     def attack(self, update, context, generator):
        ...         return update / 10
        >>> context = UploadContext(client=1, num_clients=3, num_parameters=2, round_index=0)
        >>> Shy(clients=[1]).apply(torch.ones(2), context)
        tensor([0.1000, 0.1000])
    """

    place = 0
    #: Whether the attacking client trains. If not, it sends its buffers (BatchNorm's statistics) unchanged.
    trains: bool = True

    @abstractmethod
    def attack(self, update: Tensor, context: UploadContext, generator: torch.Generator) -> Tensor:
        """Compute the update ``[P]`` that the client sends instead of ``update``.

        Args:
            update: the client's parameters after training minus those before, floating-point ``[P]``, on any device.
                Not to be changed in place. Buffers are not included: a flipped or scaled running variance would turn
                negative and the model's outputs NaN, which is a different attack.
            context: the client and the round, with the client's model before training (``start``) and the tensors that
                it keeps between rounds (``state``).
            generator: CPU generator that depends on ``seed``, the round and the client.
        """

    def apply(self, update: Tensor, context: UploadContext) -> Tensor:
        if context.client not in self.chosen(context.num_clients):
            return update
        parameters = update[: context.num_parameters]
        buffers = update[context.num_parameters :]
        # The attack's position in the list makes two attacks with the same seed draw different numbers.
        generator = generator_for(
            self.seed, "attack", context.position, context.round_index, context.client
        )
        false_update = self.attack(parameters, context, generator)
        if false_update.shape != parameters.shape:
            raise ConfigurationError(
                f"{self!r} returned an update of shape {list(false_update.shape)}, but an attack must keep the shape "
                f"{list(parameters.shape)}."
            )
        if not self.trains:  # no training has changed the buffers
            buffers = torch.zeros_like(buffers)
        return torch.cat([false_update.to(update), buffers])
