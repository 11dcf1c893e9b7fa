"""Texts for a run's log on how its coalitions are trained, and at what cost."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from flsv.metrics.coalitions.designs import fits_of


@dataclass(frozen=True)
class HowTrained:
    """Description of how coalitions are trained, for the log and for a run's closing lines.

    Args:
        names: the names of the metrics that need the coalitions.
        masks: bool ``[K, n]``, the members of the coalitions, the empty and the full coalition first.
        cohort: the mean number of clients that the sampler draws for a round; None: all.
        why: the reason why the coalitions are trained after the run; None if they are trained during the run.
        own_cohorts: whether each coalition draws cohorts of its own.
        no_fork: the reason why coalitions are trained after the run without forks; None if forks are used.
        unproved: whether no coalition that was trained during the run could be compared with a fit.
    """

    names: str
    masks: Tensor
    cohort: float | None
    why: str | None
    own_cohorts: bool
    no_fork: str | None
    unproved: bool

    @property
    def _count(self) -> str:
        own = ", each with cohorts of its own," if self.why is None and self.own_cohorts else ""
        return f"{len(self.masks) - 2} coalitions{own}"

    def planned(self) -> str:
        """Return a line for the log: how the coalitions will be trained, why, and at what cost."""
        if self.why is None:
            return f"{self.names}: {self._count} are trained during the run, batched"
        copies = "" if self.no_fork is None else f" by a copy of the Trainer and the module, since {self.no_fork}"
        reason, _, need = self.why.rpartition(". ")
        need = f". To train them during the run instead: {need[0].lower()}{need[1:]}" if reason else ""
        fits = f"{fits_of(self.masks, self.cohort):.3g} more fits"
        return (
            f"{self.names}: {self._count} are trained after the run, each in a fit of its own{copies}, which "
            f"costs {fits}; the values are known after these. Reason: {reason or self.why}{need}"
        )

    def done(self) -> str:
        """Return a closing line for the run: how the coalitions were trained."""
        if self.why is None:
            proof = ", and are not proved" if self.unproved else ""
            return f"{self.names}: {self._count} were trained during the run, batched{proof}."
        fits = f"{fits_of(self.masks, self.cohort):.3g} fits of all clients"
        return (
            f"{self.names}: {self._count} were trained after the run, each in a fit of its own, at the cost of {fits}."
        )
