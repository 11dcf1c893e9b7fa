"""Cohort: the updates that the server has received in a round, as filters see them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from flsv.core import ClientMatrix, ClientUpdate
from flsv.core.matrix import copied_rows
from flsv.functional.distances import distances
from flsv.utilities.host_copies import to_host


@dataclass(frozen=True)
class Cohort:
    """Updates of a round's k clients, as filters get them.

    Args:
        round_index: the round, from 0.
        updates: the clients' messages, one per client.
        matrix: the clients' models ``[k, P]``.
        starts: each client's start point ``[P]``. None for a client whose start point the server does not know.
        num_samples: the numbers of samples, integers ``[k]``, that the metrics and the aggregator see.
        num_parameters: number of leading entries of a model that are parameters. The rest are buffers.
        model: the global model ``[P]`` at the start of the round. None if it is not known.
        broken: ids of the clients whose model was not finite. These clients are not among the k.
        unmeasured: ids of the clients whose updates the aggregator sees and the metrics do not.
        warnings: sentences that filters have added to the warning of this round.
    """

    round_index: int
    updates: tuple[ClientUpdate, ...]
    matrix: Tensor
    starts: tuple[Tensor | None, ...]
    num_samples: Tensor
    num_parameters: int
    model: Tensor | None = None
    broken: Sequence[int] = ()
    unmeasured: Sequence[int] = ()
    warnings: tuple[str, ...] = ()

    @cached_property
    def ids(self) -> list[int]:
        """Ids of the k clients."""
        return [update.client_id for update in self.updates]

    @cached_property
    def common_start(self) -> Tensor | None:
        """Start point ``[P]`` of all clients. None if they started from different models, or from an unknown one."""
        first = self.starts[0] if self.starts else None
        return first if all(start is first for start in self.starts) else None

    @cached_property
    def norms(self) -> Tensor:
        """Norms of the updates, float64 ``[k]`` on the CPU. If a client's start point is unknown, the distance of its
        model from the global model."""
        return self._lengths[0]

    @property
    def model_norm(self) -> float:
        """Norm of the global model's parameters at the start of the round. 0 if the model is unknown."""
        return self._lengths[1]

    @cached_property
    def _lengths(self) -> tuple[Tensor, float]:
        """Copy the updates' lengths and the model's norm to the CPU at once."""
        cut = self.num_parameters
        own = [] if self.model is None else [distances(self.model[None, :cut], self.model.new_zeros(1))]
        if self.common_start is not None:
            found = [distances(self.matrix[:, :cut], self.common_start[:cut])]
        else:
            found = [
                distances(row[None, :cut], (self.model if start is None else start)[:cut])  # type: ignore[index]
                for row, start in zip(self.matrix, self.starts)
            ]
        lengths = torch.cat(to_host([*found, *own]))
        return (lengths[:-1], lengths[-1].item()) if own else (lengths, 0.0)

    @cached_property
    def gram(self) -> Tensor | None:
        """Inner products of the updates ``[k, k]``, on the CPU. None unless the server knows all start points."""
        starts = [start for start in self.starts if start is not None]
        if not self.updates or len(starts) < len(self.updates):
            return None
        return ClientMatrix(self.matrix, starts).until(self.num_parameters).gram().cpu()

    def keep(self, kept: Tensor) -> Cohort:
        """Return a cohort of only those clients for which ``kept``, bool ``[k]``, is True."""
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

    def warn(self, *sentences: str) -> Cohort:
        """Return the cohort with ``sentences`` added to the round's warning."""
        return replace(self, warnings=(*self.warnings, *sentences)) if sentences else self
