"""Collusion: attacks of several clients together, and InnerProductManipulation."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from flsv.data.corruption import ClientChoice
from flsv.uploads import Upload, UploadContext
from flsv.utilities.declared import Positive
from flsv.utilities.errors import ConfigurationError
from flsv.utilities.seeding import generator_for

Knowledge = Literal["colluders", "all"]


class Collusion(ClientChoice, Upload):
    """Base class of attacks by several clients together. :meth:`collude`, which subclasses override, computes the
    updates that they send, after the whole cohort has trained.

    Colluders ignore the federation's clipping, noise and compression: a collusion is the last of the loop's upload
    transformations, and its result is sent unchanged. The simulation needs all updates of the cohort in one place (one
    process, or ranks), and all clients must start from the global model. So a collusion is refused with clients at
    sites or a personalizer.

    Args:
        clients: the clients that attack, see :class:`flsv.data.ClientChoice`.
        fraction: share of the clients that attack, instead of ``clients``.
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

    place = 3

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

    def apply(self, update: Tensor, context: UploadContext) -> Tensor:
        """Return ``update`` itself, which :meth:`sent` replaces when the whole cohort has trained."""
        return update

    def sent(
        self, cohort: Sequence[int], updates: Tensor, num_clients: int, round_index: int
    ) -> dict[int, Tensor]:
        """Compute the updates that the colluders of a cohort send.

        Args:
            cohort: the ids of the round's k clients.
            updates: the clients' updates ``[k, P]``, after all other upload transformations.
            num_clients: number of clients of the federation.
            round_index: the round, from 0.

        Returns:
            ``{client: update}``, the update ``[P]`` that each colluder sends.

        Raises:
            ConfigurationError: :meth:`collude` returns another shape.
        """
        chosen = set(self.chosen(num_clients))
        rows = [row for row, client in enumerate(cohort) if client in chosen]
        if not rows:
            return {}
        known = updates if self.knows == "all" else updates[rows]
        generator = generator_for(self.seed, "collusion", round_index)
        made = self.collude(known, len(rows), len(cohort), generator)
        shapes = [updates.shape[1:], updates[rows].shape]
        if made.shape not in shapes:
            expected = " or ".join(str(list(shape)) for shape in shapes)
            raise ConfigurationError(f"{self!r} made {list(made.shape)}; expected {expected}.")
        made = made.expand(len(rows), -1)
        return {cohort[row]: update for row, update in zip(rows, made)}


def check_collusion(uploads: Sequence[Upload], personalizer: Any) -> None:
    """Raise ConfigurationError for a collusion with a personalizer. All clients must start from the global model."""
    for each in uploads:
        if isinstance(each, Collusion) and personalizer is not None:
            raise ConfigurationError(
                f"FederatedLoop(uploads=[{each!r}], personalizer={personalizer!r}): colluders need updates that "
                "all start from the global model. Leave one of them out."
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
        fraction: share of the clients that attack, instead of ``clients``.
        seed: seed of the choice of clients.
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
        known = updates.double()
        mean, lengths = known.mean(0), torch.linalg.vector_norm(known, dim=1)
        tiny = torch.finfo(mean.dtype).tiny  # avoids 0 / 0 where the mean is 0
        return (mean * (-self.length * lengths.quantile(0.5) / mean.norm().clamp_min(tiny))).to(
            updates
        )
