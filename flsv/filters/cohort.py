"""Cohort: the updates that a server has received, before it measures and averages them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from flsv.core import ClientMatrix, ClientUpdate
from flsv.core.matrix import copied_rows
from flsv.functional.distances import distances


@dataclass(frozen=True)
class Cohort:
    """A cohort's updates as the server has them before it measures and averages; k clients.

    Args:
        round_index: the round, from 0.
        updates: what the clients sent.
        matrix: ``[k, P]``, their models.
        starts: what each of them started from, ``[P]``; None where the server does not know it.
        num_samples: integers ``[k]``, as the metrics and the aggregator are to see them.
        num_parameters: how many leading entries of a model are parameters; the rest are buffers.
        model_norm: of the global model's parameters at the start of the round.
        broken: ids of the clients whose model was not finite, so that they sent nothing.
        unmeasured: ids of the clients whose updates are averaged and not measured.
        said: sentences for the warning of this round.
    """

    round_index: int
    updates: tuple[ClientUpdate, ...]
    matrix: Tensor
    starts: tuple[Tensor | None, ...]
    num_samples: Tensor
    num_parameters: int
    model_norm: float = 0.0
    broken: Sequence[int] = ()
    unmeasured: Sequence[int] = ()
    said: tuple[str, ...] = ()

    @cached_property
    def ids(self) -> list[int]:
        """The clients' numbers."""
        return [update.client_id for update in self.updates]

    @cached_property
    def common_start(self) -> Tensor | None:
        """``[P]``, the common start point; None if clients started from different models."""
        first = self.starts[0] if self.starts else None
        return first if all(start is first for start in self.starts) else None

    @cached_property
    def norms(self) -> Tensor:
        """float64 ``[k]`` on the CPU: the updates' lengths; as the client says where the start is not known."""
        cut = self.num_parameters
        if self.common_start is not None:
            return distances(self.matrix[:, :cut], self.common_start[:cut]).cpu()
        known = [
            update.norm if start is None else distances(row[None, :cut], start[:cut]).item()
            for update, row, start in zip(self.updates, self.matrix, self.starts)
        ]
        return torch.tensor(known, dtype=torch.float64)

    @cached_property
    def gram(self) -> Tensor | None:
        """``[k, k]`` on the CPU: the updates' products; None where the server does not know what all started from."""
        starts = [start for start in self.starts if start is not None]
        if not self.updates or len(starts) < len(self.updates):
            return None
        return ClientMatrix(self.matrix, starts).until(self.num_parameters).gram().cpu()

    def keep(self, kept: Tensor) -> Cohort:
        """Only these clients, bool ``[k]``."""
        if kept.all():
            return self
        which = kept.tolist()
        return replace(
            self,
            updates=tuple(update for update, stays in zip(self.updates, which) if stays),
            starts=tuple(start for start, stays in zip(self.starts, which) if stays),
            matrix=copied_rows(self.matrix, kept.nonzero()[:, 0]),
            num_samples=self.num_samples[kept.to(self.num_samples.device)],
        )

    def say(self, *sentences: str) -> Cohort:
        """With this in the round's warning."""
        return replace(self, said=(*self.said, *sentences)) if sentences else self
