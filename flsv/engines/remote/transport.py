"""Transports: who is connected, and the exchange of packets."""

from __future__ import annotations

import hashlib
import json
import time
import warnings
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any, Protocol

import lightning as L

from flsv._lightning.durable import replacing
from flsv.engines.one_process import shared_space
from flsv.engines.remote.messages import BadReply, Packet, Unwilling, check_done, whole
from flsv.engines.remote.secure.checks import by_samples
from flsv.engines.remote.secure.settings import SecureSums
from flsv.engines.remote.waiting import Address, Reply, Wait, Waiting
from flsv.errors import ConfigurationError


class Transport(Protocol):
    """Carries packets to sites and their replies back.

    Flower's is :class:`flsv.engines.flower.GridTransport`. There is none for NVIDIA FLARE; it would be small: an
    executor that calls :meth:`flsv.engines.remote.Site.answer` for a task, a controller that fits a ``FederatedLoop``
    with the engine :class:`flsv.engines.remote.RemoteFederation`, and a transport whose ``exchange`` broadcasts tasks
    and waits for the replies. A packet fits into a ``Shareable``.
    """

    def present(self) -> Sequence[Address]:
        """Addresses of the sites that can be reached now."""

    def exchange(self, packets: Mapping[Address, Packet], wait: Wait) -> Mapping[Address, Reply]:
        """Replies to packets; who has not replied when the wait is over is missing."""


#: What a site can have of a split: the server counts them one by one.
MOST_SAMPLES = 10**8
_SPLITS = {"train": 1, "val": 0, "test": 0}


class Directory:
    """The sites of a federation by name, with their current addresses.

    A site is known by its name, not by its address, so one that was restarted is the same site. The name is that of
    whoever says it first in a run: another one that says it is left alone, be the first one there or away. It is told
    from the first one by its address (on Flower that of the SuperNode's key, if it has one), and by a key that follows
    from what lies in the site's folder.

    Args:
        transport: carries the packets.
        names: of all sites; a site's number is its place here.
        ours: what the server has, see :func:`flsv.engines.remote.transport.agreement`.
        book: the file in which it is kept how many samples the sites have and who they are, so that a server goes on
            while some are away.
        timeout: seconds that a site has for its work; what its first contact took comes on top, for the start of its
            process.
        wait: seconds to wait for all sites before the first round, and for any site within a run.
        waiting: with whose answers a round ends.

    Attributes:
        keep_late: whether an update that comes late is of use to the round that its site is drawn for next.
    """

    def __init__(
        self,
        transport: Transport,
        names: Sequence[str],
        ours: Mapping[str, str],
        book: Path,
        timeout: float = 600.0,
        wait: float = 600.0,
        waiting: Waiting | None = None,
    ) -> None:
        self.waiting, self.keep_late, self._starts = waiting or Waiting(), False, dict[int, float]()
        if len(set(names)) < len(names) or not names:
            raise ConfigurationError(f"sites={list(names)}: expected names, each once.")
        self.names, self.timeout, self.wait = list(names), timeout, wait
        self._transport, self._ours, self._book = transport, ours, book
        book.parent.mkdir(parents=True, exist_ok=True)
        try:
            known = json.loads(book.read_bytes()) if book.is_file() else {}
            self._entries = {i: _entry(known[n], int(known[n]["address"])) for i, n in enumerate(names) if n in known}
        except (KeyError, TypeError, ValueError) as error:
            raise ConfigurationError(
                f"{book} cannot be read: it lacks or garbles {error}. Delete it and start again with all sites."
            ) from error
        self._known: dict[Address, int | None] = {}
        self._silent: dict[Address, str] = {}

    @property
    def sizes(self) -> dict[int, dict[str, int]]:
        """Number of a site to its samples by split."""
        return {site: entry["sizes"] for site, entry in self._entries.items()}

    def gather(self) -> None:
        """Wait until every site has said how many samples it has, now or in an earlier run.

        Raises:
            ConfigurationError: a site has other settings than the server, or cannot take part as it is set up.
            RuntimeError: some have not come in time.
        """
        deadline = time.monotonic() + self.wait
        while True:
            here = self.refresh(strict=True)
            missing = [name for i, name in enumerate(self.names) if i not in self._entries]
            if not missing and here:
                return
            if time.monotonic() > deadline:
                said = "".join(f" A node is there and has not said who it is: {why}." for why in self._silent.values())
                raise RuntimeError(
                    f"sites {missing or self.names} have not come within {self.wait:g} s.{said} Start them, or leave "
                    "them out of sites=[...]."
                )
            time.sleep(min(0.5, self.wait))

    def refresh(self, strict: bool = False) -> dict[int, Address]:
        """Numbers of the sites that are there to their addresses; who is new, or back, is greeted first.

        Args:
            strict: whether a site with other settings is an error. Else it is left alone: a run goes on without it.
        """
        present = list(self._transport.present())
        # Who was left alone may come back as it should be.
        self._known = {a: site for a, site in self._known.items() if a in present or site is not None}
        new = [address for address in present if address not in self._known]
        hello = Packet("hello", {"sites": self.names})
        # The first contact starts a process and reads the data: it has the time that there is before the first round.
        first = Wait(max(self.timeout, self.wait) if strict else self.timeout, what="who is there")
        replies = self._transport.exchange(dict.fromkeys(new, hello), first) if new else {}
        first.tell(replies)
        for address, reply in replies.items():
            try:
                site = self._greeted(address, check_done(reply), present, strict)
            except BadReply as why:  # perhaps it will: it is greeted again when somebody is asked for next
                expected = set(self.names) - {self.names[site] for site in self._known.values() if site is not None}
                if strict and isinstance(why, Unwilling) and why.site in expected:
                    raise ConfigurationError(
                        f"site {why.site!r} cannot take part: {why}. Mend it there, and start this server again."
                    ) from why
                if self._silent.get(address) != str(why):
                    warnings.warn(f"a node has not said who it is: {why}.", stacklevel=2)
                self._silent[address] = str(why)
                continue
            self._silent.pop(address, None)
            # In the place of where the site was before.
            self._known = {a: known for a, known in self._known.items() if known is None or known != site}
            self._known[address] = site
            if site is not None and isinstance(reply, Packet):
                self._starts[site] = sum(reply.took.values())
        return {site: a for a, site in self._known.items() if site is not None and a in present}

    def exchange(self, packets: Mapping[int, Packet]) -> dict[int, Reply]:
        """Replies of sites, by their numbers; who is away, late or fails replies with words. If none is there at all,
        as where all have been restarted, the first one is waited for."""
        deadline = time.monotonic() + self.wait
        while not (here := self.refresh()) and time.monotonic() < deadline:
            time.sleep(min(0.5, self.wait))
        sent = {here[site]: packet for site, packet in packets.items() if site in here}
        if not sent:
            return dict.fromkeys(packets, "it is away")
        start = max(self._starts.get(site, 0.0) for site in packets if site in here)
        names = {address: self.names[site] for site, address in here.items()}
        wait = Wait(self.timeout, start, _about(packets), names, len(packets), self.waiting, self.keep_late)
        replies = self._transport.exchange(sent, wait)
        wait.tell(replies)
        late = wait.why_missing()
        return {s: replies.get(here[s], late) if s in here else "it is away" for s in packets}

    def greet_again(self, site: int) -> None:
        """Ask a site who it is before it is asked for anything else."""
        self._known = {address: known for address, known in self._known.items() if known != site}

    def _greeted(self, address: Address, reply: Packet, present: Sequence[Address], strict: bool) -> int | None:
        """The number of the site that has said who it is; None where it is to be left alone.

        Raises:
            BadReply: it has not.
        """
        said = reply.plain
        try:
            name, entry = said["name"], _entry(said, address)
        except (KeyError, TypeError, ValueError) as error:
            raise BadReply(f"its {reply.kind!r:.40} lacks or garbles {error!s:.200}") from error
        why = f"a node is no site of this federation: its name is {name!r:.80}."
        if name in self.names:
            site = self.names.index(name)
            why = self._stranger(site, entry, present) or self._disagrees(name, said, strict)
        if why:
            warnings.warn(f"{why} It is left alone.", stacklevel=3)
            return None
        before = self._entries.get(site, entry)
        if before["sizes"] != entry["sizes"]:
            warnings.warn(
                f"site {name!r} has {entry['sizes']} samples now and had {before['sizes']}: values from here on are of "
                "its new data.",
                stacklevel=3,
            )
        self._entries[site] = entry
        with replacing(self._book) as file:
            file.write(json.dumps({self.names[i]: e for i, e in sorted(self._entries.items())}, indent=1).encode())
        return site

    def _stranger(self, site: int, entry: Mapping[str, Any], present: Sequence[Address]) -> str:
        """Why a node is not the site that it says it is, in words; empty where it is."""
        name, first = self.names[site], self._entries.get(site, entry)
        if any(known == site and other in present for other, known in self._known.items()):
            return f"a second node calls itself site {name!r}."
        if entry["address"] != first["address"] and entry["key"] != first["key"]:
            return (
                f"a node calls itself site {name!r} and is not the one that did so first in this run. (If it is, and "
                f"has lost its folder: take {name!r} out of {self._book} and start this server again.)"
            )
        return ""

    def _disagrees(self, name: str, said: Mapping[str, Any], strict: bool) -> str:
        """What a site has otherwise than the server, in words; empty if it is nothing."""
        try:
            check_agreement(name, said, self._ours)
        except ConfigurationError as error:
            if strict:
                raise
            return str(error)
        return ""


def _about(packets: Mapping[int, Packet]) -> str:
    """What is asked of all of them, in words."""
    packet = next(iter(packets.values()))
    return f"round {packet.plain['round']}, {packet.kind}" if "round" in packet.plain else packet.kind


def _entry(said: Mapping[str, Any], address: Address) -> dict[str, Any]:
    """What the book holds of a site.

    Raises:
        KeyError, TypeError, ValueError: the site, or the book, does not say it.
    """
    sizes = {split: whole(said["sizes"], split, MOST_SAMPLES, least) for split, least in _SPLITS.items()}
    return {"sizes": sizes, "key": str(said["key"])[:64], "address": address}


def agreement(module: L.LightningModule, settings: Any, secure: Any = False) -> dict[str, str]:
    """What one side has, in words: the version, the module's state, what happens at clients, and whether they send
    sums only (True, or a :class:`flsv.engines.remote.secure.SecureSums`)."""
    config, strategies = settings.config, settings.config.strategies
    space, _ = shared_space(module, config)
    layout = hashlib.sha256(repr(list(zip(space.names, map(tuple, space.shapes)))).encode()).hexdigest()[:16]
    at_clients = [repr(strategies[role]) for role in ("client_algorithm", "personalizer") if role in strategies]
    return {
        "flsv": version("flsv"),
        "module": f"{type(module).__name__}, {space.size} numbers, {layout}",
        "at clients": ", ".join([*at_clients, *map(repr, config.uploads)]) or "nothing",
        "secure sums": _described(SecureSums.of(secure), config),
        "training": ", ".join(f"{n}={getattr(config, n)!r}" for n in ("local_epochs", "client_optimizer", "head")),
    }


def _described(sums: SecureSums | None, config: Any) -> str:
    return "none" if sums is None else f"{sums!r}, by {'samples' if by_samples(config) else 'site'}"


def check_agreement(site: str, theirs: Mapping[str, Any], ours: Mapping[str, str]) -> None:
    """Raise ConfigurationError where a site has something else than the server, and name it."""
    for what, value in ours.items():
        if theirs.get(what) != value:
            raise ConfigurationError(
                f"site {site!r} and the server differ in {what}: {theirs.get(what)!r} there, {value!r} here. Start "
                "both from the same version, module and settings."
            )
