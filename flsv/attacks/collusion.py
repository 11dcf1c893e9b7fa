"""Collusion: attacks of several clients together, and InnerProductManipulation."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from flsv.data.corruption import ClientChoice
from flsv.uploads.base import JointUpload
from flsv.utilities.declared import Positive
from flsv.utilities.errors import ConfigurationError
from flsv.utilities.seeding import generator_for

Knowledge = Literal["colluders", "all"]


class Collusion(ClientChoice, JointUpload):
    """Base class of attacks by several clients together. :meth:`collude`, which subclasses override, computes the
    updates that they send, after the whole cohort has trained.

    Colluders ignore the federation's clipping, noise and compression: a collusion is the last of the loop's upload
    transformations, and its result is sent unchanged. The simulation needs all updates of the cohort in one place (one
    process, or ranks), and all clients must start from the global model. Clients at sites and personalizers are not
    supported.

    Args:
        clients: the clients that attack, see :class:`flsv.data.ClientChoice`.
        fraction: their share, instead of ``clients``.
        seed: seed of the choice of clients and of all noise.
        knows: whose updates the colluders see before they attack: ``"colluders"``: their own only. ``"all"``: those of
            all clients of the round, as by eavesdropping.

    Raises:
        ConfigurationError: an argument is out of range.

    Example:
        >>> class Silent(Collusion):
        ...     def collude(self, updates, colluders, cohort, generator):
        ...         return torch.zeros_like(updates[0])
        >>> Silent(clients=[1, 2]).sent([0, 1, 4], torch.ones(3, 2), 5, 0)
        {1: tensor([0., 0.])}
    """

    def __init__(
        self,
        clients: list[int] | None = None,
        fraction: float | None = None,
        seed: int | None = None,
        knows: Knowledge = "colluders",
    ) -> None:
        super().__init__(clients, fraction, seed)
        self.knows = knows

    @abstractmethod
    def collude(
        self, updates: Tensor, colluders: int, cohort: int, generator: torch.Generator
    ) -> Tensor:
        """Compute the update ``[P]`` that every colluder sends, or ``[colluders, P]``, one per colluder.

        Args:
            updates: the j updates that the colluders know, see ``knows``, floating-point ``[j, P]``, without buffers.
                Not to be changed in place.
            colluders: number of colluders in the cohort, at least one.
            cohort: number of clients in the cohort.
            generator: CPU generator that depends on ``seed`` and the round.
        """

    def sent(
        self, cohort: Sequence[int], updates: Tensor, num_clients: int, round_index: int
    ) -> dict[int, Tensor]:
        attackers = set(self.chosen(num_clients))
        colluders = [client for client in cohort if client in attackers]
        if not colluders:
            return {}

        visible_updates = updates
        if self.knows != "all":
            rows = [row for row, client in enumerate(cohort) if client in attackers]
            visible_updates = updates[rows]
        generator = generator_for(self.seed, "collusion", round_index)
        false_updates = self.collude(
            visible_updates, colluders=len(colluders), cohort=len(cohort), generator=generator
        )
        self._check_shape(false_updates, updates.shape[1:], len(colluders))
        # One update [P] is sent by all colluders.
        update_by_colluder = false_updates.expand(len(colluders), -1)
        return dict(zip(colluders, update_by_colluder))

    def _check_shape(
        self, false_updates: Tensor, shape_of_common: torch.Size, num_colluders: int
    ) -> None:
        shape_of_separate = (num_colluders, *shape_of_common)
        if false_updates.shape not in (shape_of_common, shape_of_separate):
            expected = f"{list(shape_of_common)} or {list(shape_of_separate)}"
            raise ConfigurationError(
                f"{self!r} returned updates of shape {list(false_updates.shape)}, but expected {expected}."
            )


class InnerProductManipulation(Collusion):
    """Collusion in which all colluders send the mean of the updates that they know, reversed.

    Its length is c times the median length of these updates, since servers compare lengths with that median (after Xie,
    Koyejo and Gupta, "Fall of Empires", UAI 2019, section 4).

    With equal weights and m colluders in a cohort of k, the model moves backwards as soon as c m > (k - m) |mean| /
    median |d|: two of eight clients need c = 3 at most. A metric of agreement with the aggregate then gives positive
    values to the colluders only.

    Args:
        length: c, the length as a multiple of the median. The default is just below 5, from which on
            :class:`flsv.filters.OutlierFilter` can name a client.
        clients: the clients that attack, see :class:`flsv.data.ClientChoice`.
        fraction: their share, instead of ``clients``.
        seed: seed of their choice.
        knows: the updates that colluders see, see :class:`flsv.attacks.Collusion`.

    Raises:
        ConfigurationError: the length is not above 0.

    Example:
        >>> attack = InnerProductManipulation(length=2.0)
        >>> attack.collude(torch.tensor([[3.0, 4.0], [3.0, 4.0], [6.0, 8.0]]), 1, 3, torch.Generator())
        tensor([-6., -8.])
    """

    def __init__(
        self,
        length: Positive = 4.9,
        clients: list[int] | None = None,
        fraction: float | None = None,
        seed: int | None = None,
        knows: Knowledge = "all",
    ) -> None:
        super().__init__(clients, fraction, seed, knows)
        self.length = length

    def collude(
        self, updates: Tensor, colluders: int, cohort: int, generator: torch.Generator
    ) -> Tensor:
        visible_updates = updates.double()
        mean = visible_updates.mean(0)
        norms = torch.linalg.vector_norm(visible_updates, dim=1)
        median_norm = norms.quantile(0.5)  # torch's own median takes the lower of two
        target_norm = self.length * median_norm
        tiny = torch.finfo(mean.dtype).tiny  # avoids 0 / 0 where the mean is 0
        factor = target_norm / mean.norm().clamp_min(tiny)
        return (-factor * mean).to(updates)
