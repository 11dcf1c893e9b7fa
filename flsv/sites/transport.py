"""Directory, which finds the sites, and Transport, the interface of networks that carry packets."""

from __future__ import annotations

import hashlib
import json
import re
import threading
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any, Protocol

import lightning as L
from lightning.pytorch.utilities import rank_zero_info

from flsv.__about__ import __version__
from flsv.data import FederatedDataModule
from flsv.engines.engine import shared_space
from flsv.sites.messages import (
    GARBLED_REPLY_ERRORS,
    BadReply,
    Packet,
    PermanentFailure,
    check_done,
    checked_int,
    describe_error,
    failed,
)
from flsv.utilities.atomic_files import replacing
from flsv.utilities.errors import ConfigurationError, Refused, listed
from flsv.utilities.plain_values import digest

#: A site's address in the network: a number on Flower, a name on NVFlare.
Address = Any
#: Seconds between two log lines that name the sites for which the server waits.
REPORT_SECONDS = 15.0
#: Default of the largest number of samples that a site may have in a split.
MAX_SAMPLES_OF_SPLIT = 10**8
#: Smallest number of samples that a site may announce.
_MIN_SAMPLES_BY_SPLIT = {"train": 1, "val": 0, "test": 0}
#: Reason for the missing reply of a site that cannot be reached.
_UNREACHABLE = "it cannot be reached"


class Transport(Protocol):
    """Carrier of packets to sites and of their replies, such as :class:`flsv.sites.flower.GridTransport`."""

    def present(self) -> Mapping[Address, str]:
        """Return ``{address: registered name}`` of the nodes that can be reached now."""

    def exchange(
        self, packets: Mapping[Address, Packet], seconds: float
    ) -> Iterator[tuple[Address, Packet]]:
        """Send each packet to its address, and yield ``(address, reply)`` within ``seconds``. A site without a reply is
        left out, or has a failed one with the reason, by :func:`flsv.sites.messages.failed`.
        """


class Directory:
    """The sites of a federation by name, with their current addresses.

    A site is identified by the name under which the network's operator has registered it. Its address may change.

    Args:
        transport: the network that carries the packets.
        names: the names of all sites, in the order of their client ids.
        server_agreement: the server's version, module and settings, see :func:`agreement`. Every site compares them
            with its own.
        sizes_file: the file with the sites' numbers of samples, with which a resumed server can continue while some
            sites cannot be reached.
        timeout: the time in seconds that a site has for each message's work.
        wait: the time in seconds to wait for all sites before the first round, and for any site within a run.
        report_waiting: a function that is called every 15 s with a text that names the sites for which the server
            waits, and with None after every exchange.
        max_samples: the largest number of samples that a site may announce in a split. A site that announces more
            cannot take part, since the number is the weight of its model, and the server cannot check it.
        run_size: the run's numbers of ``"rounds"`` and ``"classes"``, which the first message to each site contains.

    Attributes:
        sizes: ``{site: {split: number}}``, each site's number of samples in each split.
        contents: ``{site: text}``, the fingerprint of each site's samples when the run began. The text consists of the
            name of the site's secret and a hash of its samples that is keyed by the secret.
        dictionary_hash: hash of the data dictionary of the sites' tables. None if they have no tables.
        class_names_hash: hash of the names of the sites' classes, in the order of their numbers. None if they have no
            names.
    """

    def __init__(
        self,
        transport: Transport,
        names: Sequence[str],
        server_agreement: Mapping[str, str],
        sizes_file: Path,
        timeout: float = 600.0,
        wait: float = 600.0,
        report_waiting: Callable[[str | None], None] = lambda text: None,
        max_samples: int = MAX_SAMPLES_OF_SPLIT,
        run_size: Mapping[str, int | None] = MappingProxyType({}),
    ) -> None:
        if len(set(names)) < len(names) or not names:
            raise ConfigurationError(
                f"sites={list(names)}: expected at least one name, and different names."
            )
        self.names = list(names)
        self.timeout = timeout
        self.wait = wait
        self._transport = transport
        self._server_agreement = server_agreement
        self._sizes_file = sizes_file
        self._report_waiting = report_waiting
        self._max_samples = max_samples
        self._run_size = run_size
        self._num_sent = Counter[str]()
        self.sizes: dict[int, dict[str, int]] = {}
        self.contents: dict[int, str] = {}
        self._read_sizes_file()

        self.dictionary_hash: str | None = None
        self.class_names_hash: str | None = None
        self._dictionary_hashes: dict[int, str | None] = {}
        self._class_names_hashes: dict[int, str | None] = {}
        self._addresses: dict[int, Address] = {}
        # Sites to which the first message was sent, and those that have replied to it with their numbers of samples.
        self._contacted_sites: set[int] = set()
        self._announced_sites: set[int] = set()
        self._warning_by_name: dict[str, str] = {}

    def _read_sizes_file(self) -> None:
        path = self._sizes_file
        if not path.is_file():
            return
        try:
            announcement_by_name = json.loads(path.read_bytes())["sites"]
            for site, name in enumerate(self.names):
                if name in announcement_by_name:
                    self._store_announcement(site, announcement_by_name[name])
        except PermanentFailure as error:
            raise ConfigurationError(f"a site of {path} cannot take part: {error}.") from error
        except (KeyError, TypeError, ValueError) as error:
            raise ConfigurationError(
                f"{path} cannot be read because of a missing or invalid value: {error}. Delete the file, and start "
                "again with all sites."
            ) from error

    def _store_announcement(self, site: int, announced: Mapping[str, Any]) -> None:
        """Store a site's numbers of samples, and its first fingerprint of them."""
        sizes = _sizes(announced, self._max_samples)
        contents = _contents(announced)
        self.sizes[site] = sizes
        if contents is not None:
            self.contents.setdefault(site, contents)

    def gather(self) -> None:
        """Wait until every site has announced its numbers of samples."""
        deadline = time.monotonic() + self.wait
        with self._awaiting(self._sites_without_sizes, count=len(self.names)):
            reachable_sites = self.refresh(strict=True)
            while not reachable_sites or self._sites_without_sizes():
                # After the deadline only sites that have just connected are contacted. Without one, the waiting ends.
                is_too_late = time.monotonic() > deadline
                if not is_too_late:
                    time.sleep(min(0.5, self.wait))
                num_contacted_before = len(self._contacted_sites)
                reachable_sites = self.refresh(strict=True, only_new=is_too_late)
                has_new_site = len(self._contacted_sites) > num_contacted_before
                if is_too_late and not has_new_site:
                    raise RuntimeError(self._why_not_all_sites())

        self._report_connected(reachable_sites)
        self._compare_hashes(reachable_sites)

    def _compare_hashes(self, sites: Iterable[int]) -> None:
        """Raise ConfigurationError if sites differ in their data dictionaries or in the names of their classes."""
        dictionary_hashes = {}
        class_names_hashes = {}
        for site in sites:
            name = self.names[site]
            dictionary_hashes[name] = self._dictionary_hashes[site]
            class_names_hashes[name] = self._class_names_hashes[site]
        self.dictionary_hash = common_hash(dictionary_hashes)
        self.class_names_hash = common_class_names(class_names_hashes)

    def _report_connected(self, reachable_sites: Mapping[int, Address]) -> None:
        message = f"{len(reachable_sites)} of {len(self.names)} sites are connected"
        missing_names = [
            name for site, name in enumerate(self.names) if site not in reachable_sites
        ]
        if missing_names:
            message += f", without {', '.join(missing_names)}"
        rank_zero_info(f"flsv: {message}.")

    def _why_not_all_sites(self) -> str:
        """Return an error's text about the sites for which the server has waited in vain."""
        # If no site's sizes are missing, since all are in the file, no site can be reached.
        missing_sites = self._sites_without_sizes() or range(len(self.names))
        names_of_absent = []
        names_of_silent = []
        for site in missing_sites:
            if site in self._contacted_sites:
                names_of_silent.append(self.names[site])
            else:
                names_of_absent.append(self.names[site])

        reasons = []
        if names_of_silent:
            reasons.append(
                f"sites {names_of_silent} are connected, but have not announced their samples within {self.wait:g} s. "
                "Their logs may have the reason. If they need more time to read their data, raise wait."
            )
        if names_of_absent:
            reasons.append(
                f"sites {names_of_absent} have not connected within {self.wait:g} s. Start them, or remove them from "
                "sites=[...]. If a site's log says Exit Code: 305, its key is not registered at this server."
            )
        return " ".join([*reasons, *self._warning_by_name.values()])

    def _sites_without_sizes(self) -> list[int]:
        return [site for site in range(len(self.names)) if site not in self.sizes]

    def refresh(self, strict: bool = False, only_new: bool = False) -> dict[int, Address]:
        """Return ``{site: address}`` of the sites that have announced their samples. With ``strict`` a site that cannot
        take part is an error. With ``only_new`` the server sends its first message to new sites only."""
        self._addresses = self._sites_at(self._transport.present())
        seconds = self.timeout
        if strict:
            # At the first message a site starts a process and reads its data, which may take as long as `wait`.
            seconds = max(self.timeout, self.wait)
        for site, reply in self._send(self._handshakes(only_new), seconds):
            self._read_handshake(site, reply, strict)
        return {
            site: address
            for site, address in self._addresses.items()
            if site in self._announced_sites
        }

    def _handshakes(self, only_new: bool) -> dict[int, Packet]:
        """Return the first message to each site that has not announced its samples, and note that it is contacted."""
        handshakes = {}
        for site in self._addresses:
            is_excluded = only_new and site in self._contacted_sites
            if site not in self._announced_sites and not is_excluded:
                handshakes[site] = Packet("handshake", {"client": site, **self._run_size})
        self._contacted_sites.update(handshakes)
        return handshakes

    def exchange(self, packets: Mapping[int, Packet]) -> dict[int, Packet]:
        """Send packets to sites, and return each site's reply, a failed one if there is none."""
        replies = {}

        def sites_without_reply() -> list[int]:
            return [site for site in packets if site not in replies]

        with self._awaiting(sites_without_reply, count=len(packets)):
            reachable_sites = self._reachable_sites()
            sent_packets = {site: packets[site] for site in packets if site in reachable_sites}
            for site, reply in self._send(sent_packets, self.timeout):
                replies[site] = reply

        for site in sites_without_reply():
            if site in sent_packets:
                replies[site] = failed(f"no reply within {self.timeout:g} s")
            else:
                replies[site] = failed(_UNREACHABLE)
        return {site: replies[site] for site in packets}

    def _reachable_sites(self) -> dict[int, Address]:
        """Return the sites that can be reached. If all are being restarted, wait for the first one."""
        deadline = time.monotonic() + self.wait
        sites = self.refresh()
        while not sites and time.monotonic() < deadline:
            time.sleep(min(0.5, self.wait))
            sites = self.refresh()
        return sites

    @contextmanager
    def _awaiting(self, missing_sites: Callable[[], list[int]], count: int) -> Iterator[None]:
        """Report every 15 s within this context which of ``count`` sites are still missing."""
        is_done = threading.Event()

        def report_until_done() -> None:
            while not is_done.wait(REPORT_SECONDS):
                missing = missing_sites()
                if missing:
                    names = ", ".join(self.names[site] for site in missing)
                    text = f"{count - len(missing)} of {count} sites, waiting for {names}"
                    rank_zero_info(f"flsv: {text}.")
                    self._report_waiting(text)

        thread = threading.Thread(target=report_until_done, daemon=True)
        thread.start()
        try:
            yield
        finally:
            is_done.set()
            thread.join()
            self._report_waiting(None)

    def _send(self, packets: Mapping[int, Packet], seconds: float) -> Iterator[tuple[int, Packet]]:
        """Send packets with the server's settings added, and yield each site's reply."""
        site_at_address = {}
        complete_packets = {}
        for site, packet in packets.items():
            address = self._addresses[site]
            site_at_address[address] = site
            complete_packets[address] = self._complete(site, packet, seconds)
        if not complete_packets:
            return
        for address, reply in self._transport.exchange(complete_packets, seconds):
            name = complete_packets[address].plain["message"]
            yield site_at_address[address], _reply_to(name, reply)

    def _complete(self, site: int, packet: Packet, seconds: float) -> Packet:
        """Add to a packet what every message to a site contains."""
        plain = {
            **packet.plain,
            "agreement": self._server_agreement,
            "clients": len(self.names),
            "name": self.names[site],
            "contents": self.contents.get(site),
            "message": self._name_of_message(site, packet),
            "seconds": seconds,  # that the site has for it
        }
        return Packet(packet.kind, plain, packet.tensors)

    def _name_of_message(self, site: int, packet: Packet) -> str:
        """Return the message's name, unique within its round. A resumed server gives the same message the same name."""
        name = (
            f"{packet.kind} of round {packet.plain.get('round')} in run {packet.plain.get('run')}"
        )
        self._num_sent[f"{name} to {site}"] += 1
        return f"{name}, {self._num_sent[f'{name} to {site}']}"

    def _sites_at(self, nodes: Mapping[Address, str]) -> dict[int, Address]:
        """Return ``{site: address}`` of the nodes, ``{address: registered name}``, that are sites."""
        addresses = {}
        for address, name in nodes.items():
            if name not in self.names:
                self._warn(
                    name, f"a node is registered as {name!r}, which is not in sites={self.names}."
                )
                continue
            site = self.names.index(name)
            if site in addresses:
                self._warn(
                    name, f"two nodes are registered as {name!r}. The server uses one of them only."
                )
                # The site keeps its earlier address.
                if address != self._addresses.get(site):
                    continue
            addresses[site] = address
        return addresses

    def _read_handshake(self, site: int, reply: Packet, strict: bool) -> None:
        """Read a site's reply to the server's first message. With ``strict`` raise an error if it cannot take part."""
        name = self.names[site]
        try:
            announced, dictionary_hash, class_names_hash = self._announcement(site, reply)
        # These include PermanentFailure. A site with an error gets the first message again later.
        except GARBLED_REPLY_ERRORS as error:
            if strict and isinstance(error, PermanentFailure):
                raise ConfigurationError(
                    f"site {name!r} cannot take part: {error}. Solve this, and start the server again."
                ) from error
            self._warn(
                name, f"site {name!r} has not announced its samples: {describe_error(error)}."
            )
        else:
            self._announced_sites.add(site)
            self._dictionary_hashes[site] = dictionary_hash
            self._class_names_hashes[site] = class_names_hash
            self._warning_by_name.pop(name, None)
            self._store_announcement(site, announced)
            self._write_sizes_file()

    def _announcement(
        self, site: int, reply: Packet
    ) -> tuple[dict[str, Any], str | None, str | None]:
        """Read a site's samples, and the hashes of its data dictionary and of the names of its classes."""
        plain = check_done(reply).plain
        announced = {**plain["sizes"], "contents": plain.get("contents")}
        self._check_samples(site, announced)
        dictionary_hash = _hash_in(plain, "dictionary")
        class_names_hash = _hash_in(plain, "class_names")
        if announced["contents"] is None:
            raise BadReply("its reply has no fingerprint of its samples")
        return announced, dictionary_hash, class_names_hash

    def _check_samples(self, site: int, announced: Mapping[str, Any]) -> None:
        """Raise PermanentFailure if a site announces other numbers of samples than when the run began."""
        sizes = _sizes(announced, self._max_samples)
        earlier_sizes = self.sizes.get(site, sizes)
        if sizes != earlier_sizes:
            raise PermanentFailure(
                f"it has {sizes} samples now, but it had {earlier_sizes} when this run began. Restore the earlier "
                "samples, or start a new run in another folder"
            )
        contents = _contents(announced)
        # A site that still has its secret has compared the samples itself.
        if contents is not None and contents != self.contents.get(site, contents):
            name = self.names[site]
            self._warn(
                f"secret of {name}",
                f"site {name!r} has lost its folder since the run began, so its samples cannot be compared with the "
                "earlier ones.",
            )

    def _write_sizes_file(self) -> None:
        announcements = {}
        for site, sizes in sorted(self.sizes.items()):
            announcements[self.names[site]] = {**sizes, "contents": self.contents.get(site)}
        with replacing(self._sizes_file) as file:
            file.write(json.dumps({"sites": announcements}).encode())

    def _warn(self, name: str, text: str) -> None:
        if self._warning_by_name.get(name) != text:
            self._warning_by_name[name] = text
            warnings.warn(text, stacklevel=3)


def _reply_to(message_name: str, reply: Packet) -> Packet:
    """Return a site's reply, a failed one if it replies to another message than that of this name."""
    if reply.kind == "failed":
        return reply
    replied_name = reply.plain.get("message")
    if replied_name == message_name:
        return reply
    shown_name = repr(replied_name)[:120]  # a site can send a text of any length
    return failed(
        f"it has replied to the message {shown_name}, expected a reply to {message_name!r}"
    )


def _sizes(plain: Mapping[str, Any], max_samples: int) -> dict[str, int]:
    """Read a site's number of samples in each split, at most ``max_samples``."""
    sizes = {}
    for split, minimum in _MIN_SAMPLES_BY_SPLIT.items():
        sizes[split] = checked_int(plain, split, maximum=float("inf"), minimum=minimum)
    largest_split = max(sizes, key=sizes.__getitem__)
    if sizes[largest_split] > max_samples:
        raise PermanentFailure(
            f"it announces {sizes[largest_split]:,} {largest_split} samples, but the server accepts at most "
            f"max_samples={max_samples:,} of a site. If the number is right, raise the server's max_samples"
        )
    return sizes


def _contents(plain: Mapping[str, Any]) -> str | None:
    contents = plain.get("contents")
    if contents is None:
        return None
    if not isinstance(contents, str) or not re.fullmatch("[0-9a-f]{16} [0-9a-f]{16}", contents):
        raise BadReply(f"its samples have the fingerprint {contents!r:.80}, which is not valid")
    return contents


def _hash_in(plain: Mapping[str, Any], name: str) -> str | None:
    """Read the hash of a site's ``"dictionary"`` or ``"class_names"``, None if it has none."""
    hash_of_site = plain.get(name)
    if hash_of_site is None:
        return None
    if not isinstance(hash_of_site, str) or not re.fullmatch("[0-9a-f]{12}", hash_of_site):
        raise BadReply(f"its {name!r} has the hash {hash_of_site!r:.80}, which is not valid")
    return hash_of_site


def common_hash(hash_by_owner: Mapping[str, str | None]) -> str | None:
    """Return the hash of the data dictionary that all owners share, None if no owner has one.

    Raises:
        ConfigurationError: the owners have different dictionaries, or some have none.
    """
    if len({*hash_by_owner.values()}) > 1:
        raise ConfigurationError(
            f"The data dictionaries differ: {_owners_of_hashes(hash_by_owner)}. Give all sites and the server the same "
            "file: dictionary=..."
        )
    return next(iter(hash_by_owner.values()), None)


def common_class_names(hash_by_owner: Mapping[str, str | None]) -> str | None:
    """Return the hash of the class names that all owners share, None if no owner has names.

    Raises:
        ConfigurationError: a number stands for different classes at two owners.
    """
    hash_by_named = {owner: names for owner, names in hash_by_owner.items() if names is not None}
    if len({*hash_by_named.values()}) > 1:
        raise ConfigurationError(
            f"The names of the classes, or their order, differ: {_owners_of_hashes(hash_by_named)}. So a label would "
            "not mean the same everywhere. Each site's log has its names. Give all the same names in the same order, "
            "such as dataset.align_labels_with_mapping of Hugging Face, or folders of images for all classes."
        )
    return next(iter(hash_by_named.values()), None)


def hash_of_class_names(data: FederatedDataModule) -> str | None:
    """Return the hash of the classes' names, in the order of their numbers, as 12 hexadecimal digits.

    None if they have no names but numbers, or if a data dictionary has them.
    """
    class_names = data.class_names
    numbers = tuple(map(str, range(len(class_names))))
    if data.no_classes or data.dictionary is not None or class_names == numbers:
        return None
    return digest(class_names).hex()[:12]


def _owners_of_hashes(hash_by_owner: Mapping[str, str | None]) -> str:
    owners_by_hash: dict[str | None, list[str]] = {}
    for owner, hash_of_owner in hash_by_owner.items():
        owners_by_hash.setdefault(hash_of_owner, []).append(owner)
    descriptions = []
    for shared_hash, owners in owners_by_hash.items():
        descriptions.append(f"{listed(owners)}: {shared_hash or 'none'}")
    return "; ".join(descriptions)


def agreement(module: L.LightningModule, settings: Any) -> dict[str, str]:
    """Describe flsv's version, the module and the settings, which server and sites must share.

    Args:
        module: the LightningModule.
        settings: the federation's loop.

    Returns:
        Descriptions by name, for :func:`check_agreement`.
    """
    config = settings.config
    space = shared_space(module, config)
    names_and_shapes = []
    for name, shape in zip(space.names, space.shapes):
        names_and_shapes.append((name, tuple(shape)))
    hash_of_layout = hashlib.sha256(repr(names_and_shapes).encode()).hexdigest()[:16]

    parts_at_clients = []
    for role in ("client_algorithm", "personalizer"):
        if role in config.strategies:
            parts_at_clients.append(repr(config.strategies[role]))
    for upload in config.uploads:
        parts_at_clients.append(repr(upload))
    options = [
        f"{name}={getattr(config, name)!r}" for name in ("local_epochs", "optimizer_state", "head")
    ]
    return {
        "flsv": f"{__version__}, sources {_sources()}",
        "module": f"{type(module).__name__}, {space.size} numbers, {hash_of_layout}",
        "at clients": ", ".join(parts_at_clients) or "nothing",
        "training": ", ".join(options),
    }


@cache
def _sources() -> str:
    # The hash detects changes between checkouts of one version.
    texts = [path.read_text("utf-8") for path in sorted(Path(__file__).parents[1].rglob("*.py"))]
    return hashlib.sha256("\0".join(texts).encode()).hexdigest()[:12]


def check_agreement(facts_of_site: Mapping[str, str], facts_of_server: Mapping[str, Any]) -> None:
    """Raise Refused unless a site's :func:`agreement` equals the server's."""
    for name, value in facts_of_server.items():
        if facts_of_site.get(name) != value:
            # The server's log puts the site's name before this text.
            raise Refused(
                f"it and the server differ in {name!r:.40}: the site has {facts_of_site.get(name)!r}, the server "
                f"{value!r:.300}. Start both from the same version, module and settings"
            )
