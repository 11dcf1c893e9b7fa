"""Who is there, and what is exchanged with them: whatever carries the packets."""

from __future__ import annotations

import json
import time
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from flsv._lightning.durable import replacing
from flsv.engines.remote.agreement import check_agreement
from flsv.engines.remote.wire import Packet
from flsv.errors import ConfigurationError

Address = int
Reply = Packet | str
"""A packet, or in words why there is none."""


class Transport(Protocol):
    """Carries packets to sites and their replies back."""

    def present(self) -> Sequence[Address]:
        """Addresses of the sites that can be reached now."""

    def exchange(self, packets: Mapping[Address, Packet], timeout: float) -> Mapping[Address, Reply]:
        """Replies to packets; who has not replied within ``timeout`` seconds is missing."""


class Directory:
    """The sites of a federation by name, and where they are now.

    A site is known by its name, not by its address, so one that was restarted is the same site.

    Args:
        transport: carries the packets.
        names: of all sites; a site's number is its place here.
        ours: what the server has, see :func:`flsv.engines.remote.agreement.agreement`.
        book: the file in which the sites' sizes are kept, so that a server goes on while some are away.
        timeout: seconds that a site has for a reply.
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
        self.sizes: dict[int, dict[str, int]] = {}
        book.parent.mkdir(parents=True, exist_ok=True)
        if book.is_file():
            known = json.loads(book.read_text())
            self.sizes = {i: known[name] for i, name in enumerate(self.names) if name in known}
        self._known: dict[Address, int | None] = {}
        self._silent: set[Address] = set()
        self._here: dict[int, Address] = {}

    def gather(self) -> None:
        """Wait until every site has said how many samples it has, now or in an earlier run.

        Raises:
            ConfigurationError: a site has other settings than the server.
            RuntimeError: some have not come in time.
        """
        deadline = time.monotonic() + self.wait
        while True:
            self.refresh()
            missing = [name for i, name in enumerate(self.names) if i not in self.sizes]
            if not missing and self._here:
                return
            if time.monotonic() > deadline:
                raise RuntimeError(
                    f"sites {missing or self.names} have not come within {self.wait:g} s. Start them, or leave them "
                    "out of sites=[...]."
                )
            time.sleep(min(0.5, self.wait))

    def refresh(self) -> dict[int, Address]:
        """Numbers of the sites that are there to their addresses; who is new is greeted first."""
        present = list(self._transport.present())
        new = [address for address in present if address not in self._known]
        replies = self._transport.exchange({a: Packet("hello") for a in new}, self.timeout) if new else {}
        for address, reply in replies.items():
            if isinstance(reply, str):  # perhaps it will: it is greeted again when somebody is asked for next
                if address not in self._silent:
                    warnings.warn(f"a node has not said who it is: {reply}.", stacklevel=2)
                self._silent.add(address)
                continue
            if reply.plain.get("name") not in self.names:
                who = f"its name is {reply.plain.get('name')!r}"
                warnings.warn(f"a node that is no site of this federation is left alone: {who}.", stacklevel=2)
                self._known[address] = None
                continue
            name = reply.plain["name"]
            check_agreement(name, reply.plain, self._ours)
            site = self.names.index(name)
            if self._here.get(site) in present:
                warnings.warn(f"a second node calls itself site {name!r}: it is left alone.", stacklevel=2)
                self._known[address] = None
                continue
            self._known[address] = site
            self._here[site] = address
            self._note(site, reply.plain["sizes"])
        self._here = {s: a for a in present if (s := self._known.get(a)) is not None}
        return self._here

    def exchange(self, packets: Mapping[int, Packet]) -> dict[int, Reply]:
        """Replies of sites, by their numbers; who is away, late or fails replies with words. If none is there at all,
        as where all have been restarted, the first one is waited for."""
        deadline = time.monotonic() + self.wait
        while not (here := self.refresh()) and time.monotonic() < deadline:
            time.sleep(min(0.5, self.wait))
        sent = {here[site]: packet for site, packet in packets.items() if site in here}
        replies = self._transport.exchange(sent, self.timeout) if sent else {}
        late = f"no reply within {self.timeout:g} s"
        return {s: replies.get(here[s], late) if s in here else "it is away" for s in packets}

    def _note(self, site: int, sizes: Any) -> None:
        if self.sizes.get(site, sizes) != sizes:
            warnings.warn(
                f"site {self.names[site]!r} has {sizes} samples now and had {self.sizes[site]}: values from here on "
                "are of its new data.",
                stacklevel=2,
            )
        self.sizes[site] = sizes
        with replacing(self._book) as file:
            file.write(json.dumps({self.names[i]: s for i, s in sorted(self.sizes.items())}, indent=1).encode())
