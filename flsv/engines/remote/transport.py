"""Transports: which sites are there, and the exchange of packets."""

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
from lightning.pytorch.utilities import rank_zero_info

from flsv._lightning.durable import replacing
from flsv.engines.one_process import shared_space
from flsv.engines.remote.messages import BadReply, Packet, Unwilling, check_done, whole
from flsv.errors import ConfigurationError

Address = int
Reply = Packet | str
"""A packet, or in words why there is none."""

#: An exchange that took fewer seconds is not logged.
QUICK = 1.0
#: What a site can have of a split: the server counts them one by one.
MOST_SAMPLES = 10**8
_SPLITS = {"train": 1, "val": 0, "test": 0}


class Transport(Protocol):
    """Carries packets to sites and their replies back.

    Flower's is :class:`flsv.engines.flower.GridTransport`. There is none for NVIDIA FLARE; it would be small: an
    executor that calls :meth:`flsv.engines.remote.Site.answer` for a task, a controller that fits a ``FederatedLoop``
    with the engine :class:`flsv.engines.remote.RemoteFederation`, and a transport whose ``exchange`` broadcasts tasks
    and waits for the replies. A packet fits into a ``Shareable``.
    """

    def present(self) -> Mapping[Address, str]:
        """Addresses of the nodes that can be reached now, and the names under which they are registered."""

    def exchange(
        self, packets: Mapping[Address, Packet], seconds: float, start: float = 0.0
    ) -> Mapping[Address, Reply]:
        """Replies to packets; who has not replied when the time is over is missing.

        Args:
            packets: by address.
            seconds: that a site has for its work.
            start: that the start of its process may take besides.
        """


class Directory:
    """The sites of a federation by name, with their current addresses.

    A site is known by the name under which whoever runs the transport has registered it, not by what it says, nor by
    its address: one that was restarted, or has another key, is the same site.

    Args:
        transport: carries the packets.
        names: of all sites; a site's number is its place here.
        ours: what the server has, see :func:`flsv.engines.remote.transport.agreement`.
        book: the file in which it is kept how many samples the sites have, so that a server goes on while some are
            away.
        timeout: seconds that a site has for its work; what its first contact took comes on top, for the start of its
            process.
        wait: seconds to wait for all sites before the first round, and for any site within a run.

    Attributes:
        sizes: number of a site to its samples by split.
    """

    def __init__(
        self,
        transport: Transport,
        names: Sequence[str],
        ours: Mapping[str, str],
        book: Path,
        timeout: float = 600.0,
        wait: float = 600.0,
    ) -> None:
        if len(set(names)) < len(names) or not names:
            raise ConfigurationError(f"sites={list(names)}: expected names, each once.")
        self.names, self.timeout, self.wait = list(names), timeout, wait
        self._transport, self._ours, self._book = transport, ours, book
        book.parent.mkdir(parents=True, exist_ok=True)
        try:
            known = json.loads(book.read_bytes()) if book.is_file() else {}
            self.sizes = {i: _sizes(known[name]) for i, name in enumerate(names) if name in known}
        except (KeyError, TypeError, ValueError) as error:
            raise ConfigurationError(
                f"{book} cannot be read: it lacks or garbles {error}. Delete it and start again with all sites."
            ) from error
        self._greeted: dict[Address, bool] = {}  # whether it takes part, or is left alone
        self._here: dict[int, Address] = {}
        self._silent: dict[int, str] = {}
        self._start = 0.0

    def gather(self) -> None:
        """Wait until every site has said how many samples it has, now or in an earlier run.

        Raises:
            ConfigurationError: a site has other settings than the server, or cannot take part as it is set up.
            RuntimeError: some have not come in time.
        """
        deadline = time.monotonic() + self.wait
        while True:
            here = self.refresh(strict=True)
            missing = [name for i, name in enumerate(self.names) if i not in self.sizes]
            if not missing and here:
                return
            if time.monotonic() > deadline:
                said = [f" {self.names[site]!r} is there and says: {why}." for site, why in self._silent.items()]
                others = sorted({*self._transport.present().values()} - {*self.names})
                said += [f" Nodes registered as {others} are there."] if others else []
                raise RuntimeError(
                    f"sites {missing or self.names} have not come within {self.wait:g} s.{''.join(said)} Start them, "
                    "or leave them out of sites=[...]."
                )
            time.sleep(min(0.5, self.wait))

    def refresh(self, strict: bool = False) -> dict[int, Address]:
        """Numbers of the sites that are there to their addresses; who is new, or back, is greeted first.

        Args:
            strict: whether a site with other settings is an error. Else it is left alone: a run goes on without it.
        """
        nodes = self._transport.present()
        # Who was left alone may come back as it should be.
        self._greeted = {a: taking_part for a, taking_part in self._greeted.items() if taking_part or a in nodes}
        self._here = self._sites_at(nodes)
        new = {site: address for site, address in self._here.items() if address not in self._greeted}
        if new:
            packets = {address: Packet("hello", {"client": site}) for site, address in new.items()}
            began = time.monotonic()
            # The first contact starts a process and reads the data: it has the time that there is before the first
            # round.
            replies = self._transport.exchange(packets, max(self.timeout, self.wait) if strict else self.timeout)
            if len(replies) == len(packets):
                self._start = time.monotonic() - began
            for site, address in new.items():
                if address in replies:
                    self._greet(site, address, replies[address], strict)
        return {site: address for site, address in self._here.items() if self._greeted.get(address)}

    def exchange(self, packets: Mapping[int, Packet]) -> dict[int, Reply]:
        """Replies of sites, by their numbers; who is away, late or fails replies with words. If none is there at all,
        as where all have been restarted, the first one is waited for."""
        deadline = time.monotonic() + self.wait
        while not (here := self.refresh()) and time.monotonic() < deadline:
            time.sleep(min(0.5, self.wait))
        sent = {here[site]: packet for site, packet in packets.items() if site in here}
        if not sent:
            return dict.fromkeys(packets, "it is away")
        began = time.monotonic()
        replies = self._transport.exchange(sent, self.timeout, self._start)
        if (seconds := time.monotonic() - began) > QUICK:
            came = sum(isinstance(reply, Packet) for reply in replies.values())
            rank_zero_info(f"flsv: {_about(packets)}: {came} of {len(packets)} sites in {seconds:.1f} s.")
        late = f"no reply within {self.timeout:g} s"
        return {s: replies.get(here[s], late) if s in here else "it is away" for s in packets}

    def greet_again(self, site: int) -> None:
        """Ask a site what it has before it is asked for anything else."""
        self._greeted.pop(self._here[site], None)

    def _sites_at(self, nodes: Mapping[Address, str]) -> dict[int, Address]:
        found: dict[int, Address] = {}
        for address, name in nodes.items():
            if name not in self.names:
                continue
            site = self.names.index(name)
            if site in found:
                warnings.warn(f"two nodes are registered as {name!r}: one of them is left alone.", stacklevel=3)
            if site not in found or address == self._here.get(site):
                found[site] = address
        return found

    def _greet(self, site: int, address: Address, reply: Reply, strict: bool) -> None:
        """Take in what a site has said of itself."""
        name = self.names[site]
        try:
            said = check_done(reply).plain
            sizes = _sizes(said["sizes"])
        except (BadReply, KeyError, TypeError, ValueError) as why:  # perhaps it will: it is greeted again
            if strict and isinstance(why, Unwilling):
                raise ConfigurationError(
                    f"site {name!r} cannot take part: {why}. Mend it there, and start this server again."
                ) from why
            words = str(why) if isinstance(why, BadReply) else f"its reply lacks or garbles {why!s:.200}"
            if self._silent.get(site) != words:
                warnings.warn(f"site {name!r} has not said what it has: {words}.", stacklevel=3)
            self._silent[site] = words
            return
        self._silent.pop(site, None)
        try:
            check_agreement(name, said, self._ours)
        except ConfigurationError as error:
            if strict:
                raise
            warnings.warn(f"{error} It is left alone.", stacklevel=3)
            self._greeted[address] = False
            return
        self._greeted[address] = True
        before, self.sizes[site] = self.sizes.get(site, sizes), sizes
        if before != sizes:
            warnings.warn(
                f"site {name!r} has {sizes} samples now and had {before}: values from here on are of its new data.",
                stacklevel=3,
            )
        with replacing(self._book) as file:
            known = {self.names[i]: each for i, each in sorted(self.sizes.items())}
            file.write(json.dumps(known, indent=1).encode())


def _about(packets: Mapping[int, Packet]) -> str:
    """What is asked of all of them, in words."""
    packet = next(iter(packets.values()))
    return f"round {packet.plain['round']}, {packet.kind}" if "round" in packet.plain else packet.kind


def _sizes(said: Mapping[str, Any]) -> dict[str, int]:
    """What a site has of each split.

    Raises:
        KeyError, TypeError, ValueError: the site, or the book, does not say it.
    """
    return {split: whole(said, split, MOST_SAMPLES, least) for split, least in _SPLITS.items()}


def agreement(module: L.LightningModule, settings: Any) -> dict[str, str]:
    """What one side has, in words: the version, the module's state, and what happens at clients."""
    config, strategies = settings.config, settings.config.strategies
    space, _ = shared_space(module, config)
    layout = hashlib.sha256(repr(list(zip(space.names, map(tuple, space.shapes)))).encode()).hexdigest()[:16]
    at_clients = [repr(strategies[role]) for role in ("client_algorithm", "personalizer") if role in strategies]
    return {
        "flsv": version("flsv"),
        "module": f"{type(module).__name__}, {space.size} numbers, {layout}",
        "at clients": ", ".join([*at_clients, *map(repr, config.uploads)]) or "nothing",
        "training": ", ".join(f"{n}={getattr(config, n)!r}" for n in ("local_epochs", "client_optimizer", "head")),
    }


def check_agreement(site: str, theirs: Mapping[str, Any], ours: Mapping[str, str]) -> None:
    """Raise ConfigurationError where a site has something else than the server, and name it."""
    for what, value in ours.items():
        if theirs.get(what) != value:
            raise ConfigurationError(
                f"site {site!r} and the server differ in {what}: {theirs.get(what)!r} there, {value!r} here. Start "
                "both from the same version, module and settings."
            )
