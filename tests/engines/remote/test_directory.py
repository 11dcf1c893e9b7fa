"""Who is who among the nodes: whom a server waits for, whom it refuses, and how it goes on after its end."""

from __future__ import annotations

import json
import time
import warnings
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch.callbacks import ModelCheckpoint
from remote_federation import CASES, Remotely, assert_same, momentum, shapfed, site
from remote_sites import NAMES, Replay

from flsv.engines.remote import Directory, Packet
from flsv.engines.remote.messages import failure_packet
from flsv.errors import ConfigurationError
from flsv.uploads import TopK

SIZES = {"train": 3, "val": 0, "test": 0}


class Slow:
    """Sites that cannot be reached at first, or do not say who they are when they are first asked."""

    def __init__(self, absent: int, mute: int) -> None:
        self.absent, self.mute = absent, mute

    def present(self) -> dict[int, str]:
        self.absent -= 1
        return {} if self.absent >= 0 else {100: NAMES[0]}

    def exchange(self, packets: Any, seconds: float) -> Iterator[tuple[int, Any]]:
        for address, packet in packets.items():
            if packet.kind != "hello":
                yield address, Packet("answer", {"of": address})
                continue
            self.mute -= 1
            said = Packet("here", {"sizes": SIZES})
            yield address, "the node is not available" if self.mute >= 0 else said


@pytest.mark.parametrize(("absent", "mute"), [(0, 0), (2, 0), (0, 2)])
def test_the_first_site_is_waited_for(tmp_path: Path, absent: int, mute: int) -> None:
    """As after a restart of the server, while sites are busy or away."""
    directory = Directory(Slow(absent, mute), NAMES, {}, tmp_path / "book", wait=60)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        replies = directory.exchange({0: Packet("ask"), 1: Packet("ask")})
    assert replies[0].plain == {"of": 100}  # type: ignore[union-attr]
    assert replies[1] == "it is away"
    assert len([each for each in told if "'Boston' has not said what it has" in str(each.message)]) == min(mute, 1)


class Silent(Slow):
    """Boston takes its time."""

    def exchange(self, packets: Any, seconds: float) -> Iterator[tuple[int, Any]]:
        time.sleep(0.3)
        yield from super().exchange(packets, seconds)


def test_who_is_awaited_is_said_while_nothing_comes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flsv.engines.remote.transport.PAUSE", 0.1)
    said: list[str | None] = []
    directory = Directory(Silent(0, 0), NAMES[:2], {}, tmp_path / "book", wait=0.7, say=said.append)
    with pytest.raises(RuntimeError, match="have not come within"):
        directory.gather()
    assert said[0] == f"0 of 2 sites, waiting for {NAMES[0]}, {NAMES[1]}"
    assert said[-2:] == [f"1 of 2 sites, waiting for {NAMES[1]}", None]


def test_a_site_that_is_set_up_wrongly_ends_the_start(tmp_path: Path) -> None:
    """At once and by name; what its error says, which may be of its samples, stays there."""
    error = ConfigurationError("class 'of Jane Doe' has 1 sample")
    nodes = Replay()
    nodes.says["hello"] = {100 + i: Packet("here", {"sizes": SIZES}) for i in range(3)}
    nodes.says["hello"][102] = failure_packet(error)
    directory = Directory(nodes, NAMES, {}, tmp_path / "book", wait=60)
    with pytest.raises(ConfigurationError, match="site 'Osaka' cannot take part: it failed with Config") as told:
        directory.gather()
    assert "Jane" not in str(told.value)
    # One that may mend itself ends no start.
    nodes.says["hello"][102] = failure_packet(OSError("no disk"))
    directory = Directory(nodes, NAMES, {}, tmp_path / "other", wait=0)
    with (
        pytest.warns(UserWarning, match="site 'Osaka' has not said what it has"),
        pytest.raises(RuntimeError, match=r"\['Osaka'\] have not come within 0 s. site 'Osaka' has not said.*OSError"),
    ):
        directory.gather()


def test_a_node_of_another_name_and_a_second_one_are_left_alone(tmp_path: Path) -> None:
    remote = Remotely(tmp_path, shapfed)
    remote.transport.names[101] = ""  # registered without one
    remote.transport.sites[99], remote.transport.names[99] = remote.transport.sites[102], "Osaka"
    words = r"a node is registered as '', which is none of sites=\['Boston', 'Lyon', 'Osaka'\]"
    with (
        pytest.warns(UserWarning, match=words) as warned,
        pytest.raises(RuntimeError, match=rf"sites \['Lyon'\] have not come .* {words}"),
    ):
        remote.fit()
    told = [str(each.message) for each in warned]
    assert len([each for each in told if "is registered as" in each]) == 1
    assert "two nodes are registered as 'Osaka': one of them is left alone." in told


def test_a_killed_server_goes_on_and_sites_begin_where_they_stood(tmp_path: Path) -> None:
    """It dies after its sites have trained a round that it has not saved: they train it again from before it."""
    make = CASES["kept momentum, two of three"][0]
    whole_run = Remotely(tmp_path / "a", make, momentum).fit(4)
    broken = Remotely(tmp_path / "b", make, momentum)
    broken.transport.spoil = lambda address, packet, reply: (
        _die() if packet.plain.get("round") == 2 and address == max(broken.sites) else reply
    )
    saving = ModelCheckpoint(tmp_path / "b", save_last=True)
    with pytest.raises(Killed), pytest.warns(UserWarning, match="round 3 is discarded"):
        broken.fit(4, enable_checkpointing=True, callbacks=[saving])
    broken.transport.spoil = lambda address, packet, reply: reply
    resumed = broken.fit(4, ckpt_path=tmp_path / "b" / "last.ckpt")
    assert_same(resumed, whole_run)


class Killed(Exception):
    pass


def _die() -> Packet:
    raise Killed


@pytest.mark.parametrize("text", ["[]]", '{"Lyon": {"train": 1}}', "\xff"])
def test_a_book_that_cannot_be_read_says_so(tmp_path: Path, text: str) -> None:
    (tmp_path / "sites.json").write_bytes(text.encode("latin1"))
    with pytest.raises(ConfigurationError, match="sites.json cannot be read: it lacks or garbles .* Delete it"):
        Directory(Slow(0, 0), NAMES, {}, tmp_path / "sites.json")


def test_other_settings_within_a_run_leave_the_site_out(tmp_path: Path) -> None:
    """Not the others: they go on without it, until it comes back as it should be."""
    remote = Remotely(tmp_path, shapfed)
    own = remote.transport.sites[101]

    def come_and_go(address: int, packet: Packet, reply: Packet) -> Packet:
        if packet.plain.get("round") == 0 and address == 102:
            del remote.transport.sites[101]
            remote.transport.sites[300] = site(tmp_path, 1, partial(shapfed, local_epochs=2))
            remote.transport.names[300] = "Lyon"
        if packet.plain.get("round") == 1 and address == 102:
            del remote.transport.sites[300]
            remote.transport.sites[101] = own
        return reply

    remote.transport.spoil = come_and_go
    words = r"site 'Lyon' \(client 1\) is left out of round 2: it and the server differ in training: "
    with pytest.warns(UserWarning, match=words):
        loop = remote.fit(3)
    assert loop.participations.tolist() == [3, 2, 3]


@pytest.mark.parametrize(
    ("other", "what"),
    [
        ({"local_epochs": 2}, "training: .*local_epochs=2.* there, .*local_epochs=1"),
        ({"uploads": [TopK(0.5)]}, "at clients: .*TopK"),
    ],
)
def test_sites_with_other_settings_are_refused(tmp_path: Path, other: dict[str, Any], what: str) -> None:
    remote = Remotely(tmp_path, shapfed)
    remote.transport.sites[101] = site(tmp_path, 1, partial(shapfed, **other))
    with pytest.raises(ConfigurationError, match=f"site 'Lyon' cannot take part: it and the server differ in {what}"):
        remote.fit()


def test_a_site_answers_no_other_question(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    answering = site(tmp_path, 0, shapfed)
    packet = Packet("ask", {"question": "os:getcwd", "arguments": {"tuple": []}, "round": 0, "rounds": 1})
    reply = answering.answer(packet)
    assert (reply.kind, reply.plain["error"][:28]) == ("failed", "it failed with PermissionErr")
    assert "'os:getcwd' is no question that this site answers" in caplog.text


def test_nobody_replies(tmp_path: Path) -> None:
    remote = Remotely(tmp_path, shapfed)
    remote.transport.spoil = lambda address, packet, reply: None if packet.kind == "train" else reply
    with pytest.warns(UserWarning, match="left out"), pytest.raises(RuntimeError, match="no site sent a model"):
        remote.fit()
    incidents = json.loads((tmp_path / "run.json").read_text())["events"]
    assert [(each["client"], each["what"]) for each in incidents] == [
        (client, "is left out: no reply within 1 s") for client in range(3)
    ]
