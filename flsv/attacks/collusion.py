"""Collusion: base class of attacks by several clients together, which know updates before they are sent."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from flsv.data.corruption import ClientChoice
from flsv.uploads import Upload, UploadContext
from flsv.utilities.errors import ConfigurationError
from flsv.utilities.seeding import generator_for

Knowledge = Literal["colluders", "all"]


class Collusion(ClientChoice, Upload):
    """Base class: when the cohort has trained, its colluders agree on what they send. Subclasses override
    :meth:`collude`.

    Colluders do not keep to the federation's clipping, noise or compression: an attack of this kind comes last among
    the uploads, and what it makes is sent as it is. It is simulated where the cohort's updates are: in one process or
    on ranks, and where everybody starts from the global model; with sites or a personalizer it is refused.

    Args:
        clients: whom it concerns, see :class:`flsv.data.ClientChoice`.
        fraction: likewise.
        seed: seed of the choice of clients and of what is drawn.
        knows: whose honest updates they look at: their own (``"colluders"``), or the whole cohort's (``"all"``), as
            where they listen in.

    Raises:
        ConfigurationError: arguments out of range.

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
    def collude(self, updates: Tensor, colluders: int, cohort: int, generator: torch.Generator) -> Tensor:
        """The update ``[P]`` that every colluder sends, or ``[colluders, P]``, one for each.

        Args:
            updates: the honest updates that they know, floating-point ``[j, P]``, without buffers; not to be changed in
                place.
            colluders: how many of them are in the cohort, at least one.
            cohort: how many clients are.
            generator: CPU generator that depends on ``seed`` and the round.
        """

    def apply(self, update: Tensor, context: UploadContext) -> Tensor:
        """``update [P]`` itself: what is sent is known when the whole cohort has trained."""
        return update

    def sent(self, cohort: Sequence[int], updates: Tensor, num_clients: int, round_index: int) -> dict[int, Tensor]:
        """What the colluders of a cohort send.

        Args:
            cohort: the clients of the round, by number.
            updates: ``[k, P]``, what they have ready.
            num_clients: clients of the federation.
            round_index: the round, from 0.

        Returns:
            Colluder to ``[P]``.

        Raises:
            ConfigurationError: :meth:`collude` gives another shape.
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
    """Check that colluders can look at each other's updates.

    Args:
        uploads: of the loop.
        personalizer: of the loop; None where everybody starts from the global model.

    Raises:
        ConfigurationError: clients start from models of their own.
    """
    for each in uploads:
        if isinstance(each, Collusion) and personalizer is not None:
            raise ConfigurationError(
                f"FederatedLoop(uploads=[{each!r}], personalizer={personalizer!r}): colluders compare updates where "
                "everybody starts from the global model. Leave one of them out."
            )
