"""A look at every round's updates before they are aggregated: who sent what nobody should average?"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from flsv.data.groups import client_called
from flsv.functional.update_copies import ROUNDS, SPEAKING, alike, groups_of, similarities, standing_apart
from flsv.functional.update_outliers import drowning_updates, large_updates

NOT_FINITE, LARGE, ALIKE = FAULTS = ("not_finite", "large", "copy")
_WORDS = {
    NOT_FINITE: "returned a model with NaN or infinite entries",
    LARGE: "sent an update far larger than the cohort's",
    ALIKE: "sent updates that are one another's but for little, in several rounds",
}


class UpdateWatch:
    """Judges the cohort's updates and warns of them: one line a round, which names everybody concerned.

    Whoever goes on failing is not named in every round, but at the 1st, 10th, 100th, ... time, and once more at the
    end of the run.

    Args:
        threshold: of :func:`flsv.functional.update_outliers.large_updates`; None: norms are not judged.
        exclude: leave outliers out of their rounds; else only those that :func:`drowning_updates
            <flsv.functional.update_outliers.drowning_updates>` names.
        names: of the clients.
        copy_threshold: the similarity from which on two clients count as one, see
            :mod:`flsv.functional.update_copies`; None: similarities by themselves are not judged.
        num_clients: n; needed for comparisons.
        likeness: float64 ``[4, n, n]``, what was found in earlier rounds: the sum of each pair's similarities, the
            rounds that it spent together, those that spoke for it, and whether it was found to be alike, which stays.
            None: nothing.
        copy_gap: how far a group has to stand apart to count as one client, likewise; None: that is not judged.
        noticed: what was found in earlier rounds: fault to client to the number of rounds.

    Attributes:
        likeness: after the last round.
        noticed: likewise.
        unmeasured: the clients of the last round that are kept in it, and whose updates are at fault: what they have
            sent is not to be measured.
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
        noticed: Mapping[str, Mapping[int, int]] | None = None,
    ) -> None:
        self._names = names
        self._threshold, self._exclude = threshold, exclude
        self._copy_threshold, self._copy_gap = copy_threshold, copy_gap
        self._num_clients, self.likeness = num_clients, likeness
        self.norms: dict[int, float] = {}
        self.noticed = {fault: Counter((noticed or {}).get(fault, {})) for fault in FAULTS}
        self.unmeasured: list[int] = []
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
        model_norm: float = 0.0,
        steps: Tensor | None = None,
    ) -> Tensor:
        """Look at a round.

        Where more than half of the cohort returned what is not finite, nobody is named for it: it is the model that
        they were sent.

        Args:
            round_index: its number.
            broken: ids of the clients whose update was not finite, so that it was left out.
            clients: ids of the others, k of them.
            norms: ``[k]``, of their updates.
            gram: ``[k, k]``, their updates' products; None where the server does not know what all started from, or
                nobody is compared.
            model_norm: of the model at the start of the round.
            steps: ``[k]``, that the clients took; None: all as many. Who has more data goes farther, so only what is
                too large by each step, too, is called so.

        Returns:
            bool ``[k]``, on the CPU: whom to keep.
        """
        norms = norms.cpu()
        self.norms = dict(zip(clients, norms.tolist()))
        drowning = drowning_updates(norms, model_norm)
        large = drowning
        if self._threshold is not None:
            by_step = norms if steps is None else norms / steps.clamp_min(1)
            large = drowning | (large_updates(norms, self._threshold) & large_updates(by_step, self._threshold))
        out = large if self._exclude else drowning
        warning: list[str] = []
        self._judge_broken(round_index, broken, len(clients), warning)
        ids = torch.tensor(clients, dtype=torch.long)
        self._judge_large(round_index, ids[large & out].tolist(), norms, "left out of the round.", warning)
        rest = "aggregated, for want of exclude_outliers=True, and not measured: the round counts nothing for it."
        self.unmeasured = ids[large & ~out].tolist()
        said = self._judge_large(round_index, self.unmeasured, norms, rest, warning)
        self._aggregated_outlier = said or self._aggregated_outlier
        keep = ~out
        if gram is not None and self.compares:
            self._compare(round_index, ids[keep], gram.cpu()[keep][:, keep], warning)
        if warning:
            warnings.warn(" ".join(warning), stacklevel=2)
        return keep

    def _judge_broken(self, round_index: int, broken: Sequence[int], others: int, warning: list[str]) -> None:
        if len(broken) > others:
            warning.append(
                f"in round {round_index} {len(broken)} of {len(broken) + others} clients {_WORDS[NOT_FINITE]}: left "
                f"out of the round. So many are not at fault, but what they were sent. {self.hint()}"
            )
        elif self._due(NOT_FINITE, broken):
            who = f"{self._name(NOT_FINITE, broken)} {_WORDS[NOT_FINITE]} in round {round_index}"
            warning.append(f"{who}: left out of the round. {self.hint()}")

    def _judge_large(self, round_index: int, outliers: list[int], norms: Tensor, rest: str, warning: list[str]) -> str:
        """What is said of them; empty for nobody."""
        if not outliers:
            return ""
        due = self._due(LARGE, outliers)
        sizes = ", ".join(f"{self.norms[client]:.3g}" for client in outliers)
        what = (
            f"{self._name(LARGE, outliers)} {_WORDS[LARGE]} in round {round_index} "
            f"(norm {sizes}; median {norms[norms > 0].quantile(0.5).item():.3g})"
        )
        if due:
            warning.append(f"{what}: {rest}")
        return what

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
                    f"{self._name(ALIKE, members)} {_WORDS[ALIKE]}, up to round {round_index} (similarity {most:.2f}): "
                    "they are aggregated and measured all the same, and the payment of each of them is held back until "
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
        for fault, found in self.noticed.items():
            more = [client for client, times in found.items() if times > self._told.get((fault, client), 0)]
            if more:
                said.append(f"{self._name(fault, sorted(more))} {_WORDS[fault]}")
        if said:
            warnings.warn(f"in the whole run, {'; '.join(said)}.", stacklevel=2)

    def _due(self, fault: str, clients: Sequence[int]) -> bool:
        """Count one more time for these clients; whether it is time to speak of one of them."""
        times = self.noticed[fault]
        times.update(clients)
        due = any(_power_of_ten(times[client]) for client in clients)
        if due:
            self._told.update({(fault, client): times[client] for client in clients})
        return due

    def _name(self, fault: str, clients: Sequence[int]) -> str:
        called = {client: client_called(client, self._names).removeprefix("client ") for client in clients}
        times = {client: self.noticed[fault][client] for client in clients}
        named = [called[client] + (f" ({count} times)" if count > 1 else "") for client, count in times.items()]
        return f"client{'s' if len(named) > 1 else ''} {', '.join(named)}"


def _power_of_ten(number: int) -> bool:
    return str(number).strip("0") == "1"
