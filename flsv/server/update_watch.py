"""A look at every round's updates before they are aggregated: who sent what nobody should average?"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Sequence

import torch
from torch import Tensor

from flsv.data.names import client_called
from flsv.functional.update_copies import ROUNDS, SPEAKING, alike, groups_of, similarities, standing_apart
from flsv.functional.update_outliers import large_updates

NOT_FINITE = "returned a model with NaN or infinite entries"
LARGE = "sent an update far larger than the cohort's"
ALIKE = "sent updates that are one another's but for little, in several rounds"


class UpdateWatch:
    """Judges the cohort's updates and warns of them: one line a round, which names everybody concerned.

    Whoever goes on failing is not named in every round, but at the 1st, 10th, 100th, ... time, and once more at the
    end of the run.

    Args:
        threshold: of :func:`flsv.functional.update_outliers.large_updates`; None: norms are not judged.
        exclude: leave outliers out of their rounds.
        names: of the clients.
        copy_threshold: the similarity from which on two clients count as one, see
            :mod:`flsv.functional.update_copies`; None: similarities by themselves are not judged.
        num_clients: n; needed for comparisons.
        likeness: float64 ``[4, n, n]``, what was found in earlier rounds: the sum of each pair's similarities, the
            rounds that it spent together, those that spoke for it, and whether it was found to be alike, which stays.
            None: nothing.
        copy_gap: how far a group has to stand apart to count as one client, likewise; None: that is not judged.

    Attributes:
        likeness: after the last round.
        times: fault and client to the number of rounds in which the client was found to have it.
        norms: client id to the norm of its update in the last round; without those that are not finite.
    """

    def __init__(
        self,
        threshold: float | None,
        exclude: bool,
        names: Sequence[str] = (),
        copy_threshold: float | None = None,
        num_clients: int = 0,
        likeness: Tensor | None = None,
        copy_gap: float | None = None,
    ) -> None:
        self._names = names
        self._threshold, self._exclude = threshold, exclude
        self._copy_threshold, self._copy_gap = copy_threshold, copy_gap
        self._num_clients, self.likeness = num_clients, likeness
        self.norms: dict[int, float] = {}
        self.times: Counter[tuple[str, int]] = Counter()
        self._told: dict[tuple[str, int], int] = {}
        self._aggregated_outlier = ""

    @property
    def compares(self) -> bool:
        """Whether updates are compared with each other."""
        return self._copy_threshold is not None or self._copy_gap is not None

    def judge(
        self,
        round_index: int,
        broken: Sequence[int],
        clients: Sequence[int],
        norms: Tensor,
        gram: Tensor | None = None,
    ) -> Tensor:
        """Look at a round.

        Args:
            round_index: its number.
            broken: ids of the clients whose update was not finite, so that it was left out.
            clients: ids of the others, k of them.
            norms: ``[k]``, of their updates.
            gram: ``[k, k]``, their updates' products; None where the server does not know what all started from, or
                nobody is compared.

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
        keep = ~large if self._exclude else torch.ones_like(large)
        if gram is not None and self.compares:
            self._compare(round_index, torch.tensor(clients)[keep], gram.cpu()[keep][:, keep], warning)
        if warning:
            warnings.warn(" ".join(warning), stacklevel=2)
        return keep

    def _compare(self, round_index: int, here: Tensor, gram: Tensor, warning: list[str]) -> None:
        """Look for copies among the clients ``here [k]``; what there is to say goes to ``warning``."""
        n = self._num_clients
        total, together, speaking, found = torch.zeros(4, n, n).double() if self.likeness is None else self.likeness
        pairs = here[:, None], here
        similar = torch.zeros_like(total)
        if len(here) > 2:  # of two, nobody can say what they have in common
            now = similarities(gram)
            total, together = total.index_put(pairs, now, True), together.index_put(pairs, torch.ones_like(now), True)
            speaking = speaking.index_put(pairs, (now >= SPEAKING).double(), True)
            similar[pairs] = (total / together.clamp_min(1))[pairs]
        named = torch.zeros(n, n, dtype=torch.bool)
        if self._copy_threshold is not None:
            named |= alike(similar, self._copy_threshold)
        if self._copy_gap is not None:
            named[pairs] |= standing_apart(similar[pairs], self._copy_gap) & (together[pairs] == ROUNDS)
        found = found.where(~named | (speaking < ROUNDS), 1.0)
        self.likeness = torch.stack([total, together, speaking, found])
        for group in groups_of(found > 0):
            members = [client for client in group if client in here.tolist()]
            if len(members) > 1 and self._due(ALIKE, members):
                most = similar[members][:, members].fill_diagonal_(-1).max().item()
                warning.append(
                    f"{self._name(ALIKE, members)} {ALIKE}, up to round {round_index} (similarity {most:.2f}): they "
                    "are aggregated and measured all the same, and the payment of each of them is held back until "
                    "somebody has looked at it (flsv report --pay)."
                )

    def hint(self) -> str:
        """What may be behind a model that is not finite."""
        if self._aggregated_outlier:
            return f"The fault may lie further back: {self._aggregated_outlier}."
        return "A lower learning rate or gradient_clip_val may help, or a look for NaN in the data."

    def finish(self) -> None:
        """At the end of a run: name those who have failed more often than the warnings have said."""
        said = []
        for fault in (NOT_FINITE, LARGE, ALIKE):
            more = [c for (f, c), times in self.times.items() if f == fault and times > self._told.get((f, c), 0)]
            if more:
                said.append(f"{self._name(fault, sorted(more))} {fault}")
        if said:
            warnings.warn(f"in the whole run, {'; '.join(said)}.", stacklevel=2)

    def _due(self, fault: str, clients: Sequence[int]) -> bool:
        """Count one more time for these clients; whether it is time to speak of one of them."""
        keys = [(fault, client) for client in clients]
        self.times.update(keys)
        due = any(_power_of_ten(self.times[key]) for key in keys)
        if due:
            self._told.update({key: self.times[key] for key in keys})
        return due

    def _name(self, fault: str, clients: Sequence[int]) -> str:
        called = {client: client_called(client, self._names).removeprefix("client ") for client in clients}
        times = {client: self.times[fault, client] for client in clients}
        named = [called[client] + (f" ({count} times)" if count > 1 else "") for client, count in times.items()]
        return f"client{'s' if len(named) > 1 else ''} {', '.join(named)}"


def _power_of_ten(number: int) -> bool:
    return str(number).strip("0") == "1"
