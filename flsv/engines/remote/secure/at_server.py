"""The server's side of secure sums: four messages to all sites of a round, of which it gets the average and no more."""

from __future__ import annotations

import secrets
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from flsv.engines.remote.clients import Remote
from flsv.engines.remote.messages import BadReply, Packet, check_done, instruction_packet
from flsv.engines.remote.secure.payload import NoSum, Summed, groups_of, length, summed, told_alike
from flsv.engines.remote.secure.protocol import unmasked
from flsv.engines.remote.secure.settings import LEAST, SIGNED, SecureSums
from flsv.errors import ConfigurationError
from flsv.parameters import ParameterSpace
from flsv.participants import Traffic
from flsv.round import ClientUpdate, Instruction, RowAverages
from flsv.strategy import Strategy


class SecureRemote(Remote):
    """All sites of a federation, of whose updates the server sees the sum.

    Args:
        sums: what the federation agrees on.
        by_samples: whether sites weigh as much as they have samples.
        algorithm: what happens at clients; its :attr:`row_sums` are summed, too.
        options: those of :class:`Remote`.

    Attributes:
        sum_weight: of the last round, the sum of the weights that sites do not tell; None where all weigh 1.
        steps: of the last round, optimizer steps of all.
        row_averages: of the last round; None where there are no rows.
    """

    def __init__(self, sums: SecureSums, by_samples: bool, algorithm: Strategy | None, *options: Any) -> None:
        super().__init__(*options)
        self._sums, self._by_samples = sums, by_samples
        self._rows = None if algorithm is None else algorithm.row_sums
        self._members = None if algorithm is None else algorithm.row_members()
        self.sum_weight: float | None = None
        self.row_averages: RowAverages | None = None
        self.steps = 0

    def train(
        self, instructions: Mapping[int, Instruction], device: torch.device, space: ParameterSpace
    ) -> tuple[list[ClientUpdate], list[int]]:
        """An update of each site whose numbers are in the sum, all of them the average; and whose models were not
        finite. Who goes away on the way is named in a warning, and the sum is cleaned of it.

        Raises:
            RuntimeError: there are too few left for a sum; nothing was unmasked.
        """
        announced = {
            str(site): {"name": said["name"], "keys": said["keys"], **_signed(said)}
            for site, said in self._asked(instructions, "keys", lambda site: {}, ("name", "keys")).items()
        }
        self._enough(announced, len(announced), "have drawn keys")
        sealed: dict[int, Mapping[str, str]] = {
            site: said["sealed"]
            for site, said in self._asked(announced, "shares", lambda _: {"announced": announced}, ("sealed",)).items()
        }
        self._enough(announced, len(sealed), "have shared them")
        visits = {site: secrets.token_hex(8) for site in sealed}
        told = self._told_alike(instructions)
        packets = {}
        for site in sealed:
            for_it = {str(other): texts[str(site)] for other, texts in sealed.items() if other != site}
            facts = {**self._facts(site), "visit": visits[site], "sealed": for_it, "told": told}
            packets[site] = instruction_packet(instructions[site], facts)
        first = next(iter(instructions.values()))
        start, starts = first.start, None if self._members is None else first.tensors[self._rows[0]]  # type: ignore[index]
        assert start is not None
        rows = (0, 0) if starts is None else (len(starts), starts.shape[1])
        count = length(space.size, rows)
        masked, broken, lost = self._masked(packets, count)
        self._leave_small_groups(masked)
        self._enough(announced, len(masked), "have sent their masked models")
        total = self._unmasked(announced, list(sealed), masked, [told], rows)
        for site in lost:
            self._warn(site, "no longer held what it kept, and went on from nothing", when=self._in_round)
        self._trained = {site: visits[site] for site in masked}
        self.row_averages = None if starts is None else total.rows_after(starts.to(device))
        return self._updates(list(masked), total, start.to(device), count), broken

    def steps_of(self, updates: Sequence[ClientUpdate]) -> int:
        return self.steps

    def rows(self, updates: Sequence[ClientUpdate], like: Tensor, folder: str) -> Tensor:
        return updates[0].vector.expand(len(updates), -1)

    def _told_alike(self, instructions: Mapping[int, Instruction]) -> dict[str, Any]:
        """What all are sent.

        Raises:
            RuntimeError: they are sent different things.
        """
        sent = [
            told_alike(each.seed, instruction_packet(each, {}).tensors, self._members) for each in instructions.values()
        ]
        if any(each != sent[0] for each in sent):
            raise RuntimeError(
                "secure sums need one start point for all sites, and a strategy sends them different ones."
            )
        return sent[0]

    def _asked(
        self, sites: Any, kind: str, more: Callable[[int], Mapping[str, Any]], names: Sequence[str]
    ) -> dict[int, Mapping[str, Any]]:
        """What sites reply to a message without tensors; who does not is named in a warning."""
        numbers = [int(site) for site in sites]
        packets = {site: Packet(kind, {"round": self._state.round_index, **self._facts(site), **more(site)})
                   for site in numbers}  # fmt: skip
        found: dict[int, Mapping[str, Any]] = {}
        for site, reply in self.directory.exchange(packets).items():
            try:
                plain = check_done(reply).plain
                if any(name not in plain for name in names):
                    raise BadReply(f"its reply lacks {[name for name in names if name not in plain]}")
                found[site] = plain
            except BadReply as why:
                self._warn(site, "is left out", why, self._in_round)
        return found

    def _masked(self, packets: Mapping[int, Packet], count: int) -> tuple[dict[int, Any], list[int], list[int]]:
        """The masked numbers of sites; whose models were not finite; and who has lost what it kept."""
        masked, broken, lost = dict[int, Any](), list[int](), list[int]()
        kind = SIGNED[self._sums.ring]
        for site, reply in self.directory.exchange(packets).items():
            try:
                packet = check_done(reply)
                if packet.kind == "broken":
                    broken.append(site)
                    self._warn(site, "has a model that is not finite, and is left out", when=self._in_round)
                    continue
                numbers = packet.tensors.get("masked")
                if numbers is None or numbers.shape != (count,) or numbers.numpy().dtype != kind:
                    raise BadReply(f"its {packet.kind!r:.40} reply holds no masked model of {count} numbers")
                masked[site] = numbers.numpy().view(f"u{self._sums.ring // 8}")
                if packet.plain.get("lost"):
                    lost.append(site)
            except BadReply as why:
                self._warn(site, "is left out", why, self._in_round)
        return masked, broken, lost

    def _unmasked(
        self,
        announced: Mapping[str, Mapping[str, Any]],
        sharing: Sequence[int],
        masked: Mapping[int, Any],
        told: Sequence[Any],
        rows: tuple[int, int],
    ) -> Summed:
        survivors = sorted(masked)
        replies = self._asked(survivors, "unmask", lambda _: {"survivors": survivors}, ("shares",))
        shares = {site: said["shares"] for site, said in replies.items()}
        about = self._state.run, self._state.round_index
        try:
            total = unmasked(masked, announced, sharing, shares, self._sums, about, told)
            found = summed(total, self._sums, len(masked), len(announced), rows)
        except (NoSum, TypeError, KeyError, ValueError) as error:
            raise RuntimeError(
                f"round {self._state.round_index}: there is no sum of sites {self._names(survivors)}: {error}. {_AGAIN}"
            ) from error
        if found.clipped:
            trained = 0 if self._members is None else int(self._members[:, survivors].sum())
            self._clipped(found.clipped, len(masked) * len(found.step) + trained * rows[1])
        return found

    def _leave_small_groups(self, masked: dict[int, Any]) -> None:
        """Take back those of whose group too few are left: a sum over these would tell too much, and nobody would help
        to unmask it."""
        for group in [] if self._members is None else groups_of(self._members):
            left = sorted(masked.keys() & set(group))
            if 0 < len(left) < LEAST:
                for site in left:
                    del masked[site]
                    others = self._names(set(group) - set(left))
                    why = f"of its group {others} are missing, and a sum over {len(left)} tells too much of each"
                    self._warn(site, "is left out", why, self._in_round)

    def _updates(self, sites: Sequence[int], total: Summed, start: Tensor, count: int) -> list[ClientUpdate]:
        average = total.after(start)
        self.steps, self.sum_weight = total.steps, float(total.weight) if self._by_samples else None
        traffic = Traffic(count, float(count * self._sums.ring // 8))
        return [ClientUpdate(site, 1, average, traffic=traffic) for site in sites]

    def _enough(self, announced: Mapping[str, Any], count: int, what: str) -> None:
        """
        Raises:
            RuntimeError: fewer than a sum needs.
        """
        names = self._names(int(site) for site in announced)
        try:
            least = self._sums.threshold_of(len(announced))
        except ConfigurationError as error:
            raise RuntimeError(
                f"round {self._state.round_index}: of the sites, {names} {what}: {error} {_AGAIN}"
            ) from error
        if count < least:
            raise RuntimeError(
                f"round {self._state.round_index}: {count} of the sites {names} {what}, and a sum of fewer than "
                f"{least} tells too much of each. Nothing was unmasked. {_AGAIN}"
            )

    def _clipped(self, count: int, of: int) -> None:
        warnings.warn(
            f"round {self._state.round_index}: {count} of {of} entries were beyond clip={self._sums.clip:g} and were "
            "cut off, so that the average is another than without secure sums. Raise SecureSums(clip=...).",
            stacklevel=2,
        )

    @property
    def _in_round(self) -> str:
        return f" of round {self._state.round_index}"

    def _names(self, sites: Any) -> list[str]:
        return [self.directory.names[site] for site in sorted(sites)]


_AGAIN = "Start the missing sites again and then this server: it goes on from its last checkpoint."


def _signed(said: Mapping[str, Any]) -> dict[str, Any]:
    return {name: said.get(name, "") for name in ("identity", "signature")}
