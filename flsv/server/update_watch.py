"""A look at every round's updates before they are aggregated: who sent what nobody should average?"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Sequence

import torch
from torch import Tensor

from flsv.data.names import client_called
from flsv.functional.update_outliers import large_updates

NOT_FINITE = "returned a model with NaN or infinite entries"
LARGE = "sent an update far larger than the cohort's"


class UpdateWatch:
    """Judges the cohort's updates and warns of them: one line a round, which names everybody concerned.

    Whoever goes on failing is not named in every round, but at the 1st, 10th, 100th, ... time, and once more at the
    end of the run.

    Args:
        threshold: of :func:`flsv.functional.update_outliers.large_updates`; None: norms are not judged.
        exclude: leave outliers out of their rounds.
        names: of the clients.

    Attributes:
        norms: client id to the norm of its update in the last round; without those that are not finite.
    """

    def __init__(self, threshold: float | None, exclude: bool, names: Sequence[str] = ()) -> None:
        self._names = names
        self._threshold, self._exclude = threshold, exclude
        self.norms: dict[int, float] = {}
        self._times: Counter[tuple[str, int]] = Counter()
        self._told: dict[tuple[str, int], int] = {}
        self._aggregated_outlier = ""

    def judge(self, round_index: int, broken: Sequence[int], clients: Sequence[int], norms: Tensor) -> Tensor:
        """Look at a round.

        Args:
            round_index: its number.
            broken: ids of the clients whose update was not finite, so that it was left out.
            clients: ids of the others, k of them.
            norms: ``[k]``, of their updates.

        Returns:
            bool ``[k]``, on the CPU: whom to keep.
        """
        norms = norms.cpu()
        self.norms = dict(zip(clients, norms.tolist()))
        large = torch.zeros(len(norms), dtype=torch.bool)
        if self._threshold is not None:
            large = large_updates(norms, self._threshold)
        outliers = [client for client, far in zip(clients, large.tolist()) if far]
        warning = []
        if self._due(NOT_FINITE, broken):
            who = f"{self._name(NOT_FINITE, broken)} {NOT_FINITE} in round {round_index}"
            warning.append(f"{who}: left out of the round. {self.hint()}")
        if outliers:
            due = self._due(LARGE, outliers)
            sizes = ", ".join(f"{self.norms[client]:.3g}" for client in outliers)
            what = (
                f"{self._name(LARGE, outliers)} {LARGE} in round {round_index} "
                f"(norm {sizes}; median {norms[norms > 0].quantile(0.5).item():.3g})"
            )
            if not self._exclude:
                self._aggregated_outlier = what
            if due:
                rest = "left out of the round." if self._exclude else "aggregated, for want of exclude_outliers=True."
                warning.append(f"{what}: {rest}")
        if warning:
            warnings.warn(" ".join(warning), stacklevel=2)
        return ~large if self._exclude else torch.ones_like(large)

    def hint(self) -> str:
        """What may be behind a model that is not finite."""
        if self._aggregated_outlier:
            return f"The fault may lie further back: {self._aggregated_outlier}."
        return "A lower learning rate or gradient_clip_val may help, or a look for NaN in the data."

    def finish(self) -> None:
        """At the end of a run: name those who have failed more often than the warnings have said."""
        said = []
        for fault in (NOT_FINITE, LARGE):
            more = [c for (f, c), times in self._times.items() if f == fault and times > self._told.get((f, c), 0)]
            if more:
                said.append(f"{self._name(fault, sorted(more))} {fault}")
        if said:
            warnings.warn(f"in the whole run, {'; '.join(said)}.", stacklevel=2)

    def _due(self, fault: str, clients: Sequence[int]) -> bool:
        """Count one more time for these clients; whether it is time to speak of one of them."""
        keys = [(fault, client) for client in clients]
        self._times.update(keys)
        due = any(_power_of_ten(self._times[key]) for key in keys)
        if due:
            self._told.update({key: self._times[key] for key in keys})
        return due

    def _name(self, fault: str, clients: Sequence[int]) -> str:
        called = {client: client_called(client, self._names).removeprefix("client ") for client in clients}
        times = {client: self._times[fault, client] for client in clients}
        named = [called[client] + (f" ({count} times)" if count > 1 else "") for client, count in times.items()]
        return f"client{'s' if len(named) > 1 else ''} {', '.join(named)}"


def _power_of_ten(number: int) -> bool:
    return str(number).strip("0") == "1"
