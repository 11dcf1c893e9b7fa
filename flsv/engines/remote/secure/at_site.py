"""A site's side of secure sums: what it answers to the four messages of a round, and what it keeps in between."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from flsv._lightning.durable import replacing
from flsv.engines.remote.messages import START, TOLD, Packet, unpack
from flsv.engines.remote.policy import Refused, SitePolicy
from flsv.engines.remote.secure import primitives
from flsv.engines.remote.secure.payload import Rows, groups_of, numbers_of, tensor_hash, told_alike
from flsv.engines.remote.secure.protocol import Session
from flsv.engines.remote.secure.settings import LEAST, SecureSums
from flsv.engines.remote.visit import SiteMemory, own_secret
from flsv.errors import ConfigurationError
from flsv.round import ClientUpdate
from flsv.strategy import Strategy

#: Questions whose answer is no update: a number of a client's validation samples.
OF_SUMS = ("flsv.metrics.peers:leave_self_out",)
#: In a site's folder of a run: the sum that it is at, which holds secrets; whom each round was summed over, and what
#: was asked after it.
SESSION, SUMMED = "sum.json", "summed.json"


def identity(folder: str | Path) -> str:
    """By which other sites know the site that keeps its things in this folder, for ``peers`` in their policies.

    Args:
        folder: the SuperNode's ``folder`` and the site's name, as ``/data/boston/Boston``. It is made where it is
            missing.
    """
    return primitives.identity_of(_signing(own_secret(Path(folder))))


def _signing(secret: str) -> bytes:
    return hashlib.sha256(f"{secret} identity".encode()).digest()


class SumsAtSite:
    """What a site does with the messages of secure sums.

    Args:
        sums: what the federation agrees on.
        name: the site's.
        secret: its own.
        policy: of its owner.
        by_samples: whether sites weigh as much as they have samples.
        algorithm: what happens at clients; its :attr:`row_sums` are summed, too.
    """

    def __init__(
        self,
        sums: SecureSums,
        name: str,
        secret: str,
        policy: SitePolicy,
        by_samples: bool,
        algorithm: Strategy | None = None,
    ) -> None:
        self._sums, self._name, self._by_samples = sums, name, by_samples
        self._signing, self._policy, self._least = _signing(secret), policy, max(LEAST, policy.least_sites)
        self._rows = None if algorithm is None else algorithm.row_sums
        self._members = None if algorithm is None else algorithm.row_members()

    def check_groups(self) -> None:
        """Before the first round.

        Raises:
            Refused: a group over which there would be a sum is smaller than its policy wants.
        """
        for group in self._groups:
            if len(group) < self._least:
                raise Refused(
                    f"there would be a sum over a group of {len(group)} sites, and it wants {self._least} or more"
                )

    @property
    def _groups(self) -> list[list[int]]:
        return [] if self._members is None else groups_of(self._members)

    def keys(self, memory: SiteMemory, packet: Packet) -> Packet:
        """The first message. Whatever was left of an earlier sum is forgotten."""
        plain = packet.plain
        session = Session(plain["run"], plain["round"], plain["client"])
        said = session.announce(self._name, self._signing)
        self._keep(memory, session)
        return Packet("keys", said)

    def shares(self, memory: SiteMemory, packet: Packet) -> Packet:
        """The second."""
        session, plain = self._session(memory, packet), packet.plain
        try:
            sealed = session.share(plain["announced"], self._sums, self._least, self._policy.peers)
        except ConfigurationError as error:
            raise Refused(str(error)) from error
        if session.names[str(session.own)] != self._name:
            raise Refused(f"the server calls it {session.names[str(session.own)]!r:.80}")
        self._keep(memory, session)
        return Packet("shares", {"sealed": sealed})

    def begin(self, memory: SiteMemory, packet: Packet) -> None:
        """Before the third, the training: whether what this site is sent is what all are said to be sent.

        Raises:
            Refused: it is not.
        """
        session = self._session(memory, packet)
        if session.stage != "shares":
            raise Refused(f"the sum of round {session.round} stands after {session.stage!r}, not after 'shares'")
        sent = {n: tensor for n, tensor in packet.tensors.items() if n == START or n.startswith(TOLD)}
        if START not in sent or told_alike(packet.plain["seed"], sent, self._members) != packet.plain["told"]:
            raise Refused("what it is sent to start from is not what the server says that all sites are sent")

    def masked(self, memory: SiteMemory, packet: Packet, update: ClientUpdate, lost: bool) -> Packet:
        """The third; ``"broken"`` where a row that this site trains is not finite: a sum without it would tell more of
        the others."""
        session, plain = self._session(memory, packet), packet.plain
        rows = None
        if self._members is not None and self._rows is not None:
            sent, made = self._rows
            if not bool(update.reports[made][:, 0].all()):
                return Packet("broken")
            mine = self._members[:, session.own]
            rows = Rows(update.reports[made][:, 1:].cpu().double() - packet.tensors[TOLD + sent][mine].double(), mine)
        start = packet.tensors[START]
        values = numbers_of(update, start, self._sums, len(session.publics), self._by_samples, rows)
        ring = session.mask(plain["sealed"], values, self._sums, [plain["told"]])
        self._keep(memory, session)  # before it leaves: there is no second one with these masks
        return Packet("masked", {"lost": lost}, {"masked": torch.from_numpy(self._sums.signed(ring))})

    def unmask(self, memory: SiteMemory, packet: Packet) -> Packet:
        """The fourth."""
        session, survivors = self._session(memory, packet), [int(each) for each in packet.plain["survivors"]]
        book = _read(memory.folder / SUMMED)
        earlier = book.get(str(session.round), {}).get("over")
        told = session.unmask(survivors, self._sums, self._least, before=earlier, groups=self._groups)
        book.setdefault(str(session.round), {})["over"] = session.survivors
        _write(memory.folder / SUMMED, book)
        self._keep(memory, session)
        return Packet("unmask", {"shares": told})

    def check_question(self, memory: SiteMemory, packet: Packet) -> None:
        """Before a question is answered, by a number: in a round, about one model.

        Raises:
            Refused: another question, or it has been answered about something else.
        """
        question = packet.plain["question"]
        if question not in OF_SUMS:
            raise Refused(f"it sends sums only, and does not answer {question!r:.120}")
        book, round = _read(memory.folder / SUMMED), str(packet.plain["round"])
        if round not in book:
            raise Refused(f"it has summed nothing in round {round:.20}, after which it could be asked")
        (aggregate, weight), settings = unpack(packet.plain["arguments"], packet.tensors)
        asked = [tensor_hash(aggregate), weight, settings.get("sum_weight")]
        if book[round].setdefault("asked", asked) != asked:
            raise Refused(f"it has answered {question!r} in round {round} about another model")
        _write(memory.folder / SUMMED, book)

    def _session(self, memory: SiteMemory, packet: Packet) -> Session:
        kept = _read(memory.folder / SESSION)
        if not kept or (kept["run"], kept["round"]) != (packet.plain["run"], packet.plain["round"]):
            raise Refused(f"it has drawn no keys for round {packet.plain['round']!r:.20}")
        return Session(**kept)

    def _keep(self, memory: SiteMemory, session: Session) -> None:
        _write(memory.folder / SESSION, asdict(session))


def _read(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text()) if path.is_file() else {}


def _write(path: Path, value: Mapping[str, Any]) -> None:
    with replacing(path) as file:
        os.fchmod(file.fileno(), 0o600)
        file.write(json.dumps(value).encode())


def flags(sizes: Mapping[str, int]) -> dict[str, int]:
    """Of numbers of samples, whether there are any."""
    return {split: min(1, size) for split, size in sizes.items()}
