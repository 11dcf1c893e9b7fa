"""Whatever a site sends, its server names it and goes on: three sites, of which Lyon sends what was spoiled."""

from __future__ import annotations

import json
import math
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from remote_federation import shapfed
from remote_sites import NAMES, Replay, module

from flsv.engines.one_process import shared_space
from flsv.engines.remote import Directory, Packet
from flsv.engines.remote.clients import Remote
from flsv.engines.remote.messages import pack, update_packet
from flsv.metrics.peers import leave_self_out
from flsv.participants import NoAnswer, Traffic
from flsv.round import ClientUpdate, FederationState, Instruction

SAMPLES = 40
HUGE = 10**400
SPOILED = [None, True, "3", "", [], {}, [1], {"a": 1}, -1, 0, 0.5, 10**9, 2**63, HUGE, 1e308, -math.inf, math.inf]
SPOILED += [-math.nan, [[[]]], "x" * 10**4, ["train", 3], "\ud800"]


def spoiled_values(plain: Any) -> Iterator[Any]:
    """The same value with one part of it, at whatever depth, missing or another."""
    yield from SPOILED
    if isinstance(plain, Mapping):
        for name, part in plain.items():
            rest = {other: value for other, value in plain.items() if other != name}
            yield rest
            yield from ({**rest, name: other} for other in spoiled_values(part))
    elif isinstance(plain, list):
        for index, part in enumerate(plain):
            yield from ([*plain[:index], other, *plain[index + 1 :]] for other in spoiled_values(part))


def spoiled_tensors(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    yield torch.zeros(0)
    yield torch.tensor(3.0)
    yield tensor[:-1]
    yield tensor[None]
    yield tensor.to(torch.complex64)
    yield tensor.long()
    yield tensor > 0
    for dtype, value in ((torch.float64, 1e300), (torch.float32, math.nan), (torch.float16, -math.inf)):
        other = tensor.to(dtype).clone()
        other[0] = value
        yield other


def spoiled(packet: Packet) -> Iterator[Packet]:
    """All that can be made of a packet; what is none is refused when it is made."""
    for kind in ("", "failed", "broken", "hm"):
        yield Packet(kind, {"error": HUGE, "round": ["x"]}, packet.tensors)
        yield Packet(kind, {"error": "\ud800\n", "round": "\ud800", "seconds": "\n"}, packet.tensors)
    for plain in spoiled_values(dict(packet.plain)):
        try:
            yield Packet(packet.kind, plain, packet.tensors)
        except ValueError:
            assert not isinstance(plain, Mapping)
    for name, tensor in packet.tensors.items():
        rest = {other: value for other, value in packet.tensors.items() if other != name}
        for tensors in (rest, {**rest, "report/": tensor}, *({**rest, name: x} for x in spoiled_tensors(tensor))):
            yield Packet(packet.kind, packet.plain, tensors)


@pytest.fixture
def sites(tmp_path: Path) -> tuple[Replay, Directory]:
    transport = Replay()
    sizes = {"train": SAMPLES, "val": 10, "test": 0}
    transport.says["hello"] = {100 + i: Packet("hello", {"sizes": sizes}) for i in range(len(NAMES))}
    return transport, Directory(transport, NAMES, {}, tmp_path / "book.json", timeout=1, wait=0.2)


def remote(directory: Directory) -> Remote:
    return Remote(directory, FederationState(run="0" * 16, num_clients=3), 1, 1, ["change"])


@pytest.mark.filterwarnings("ignore:site 'Lyon'")
def test_no_update_ends_a_round(sites: tuple[Replay, Directory]) -> None:
    transport, directory = sites
    loop = shapfed()
    space, _ = shared_space(module(), loop.config)
    model = space.read(module())
    report = {"change": torch.randn(5)}

    def good(client: int) -> Packet:
        return update_packet(ClientUpdate(client, SAMPLES, model + 0.1, 0.5, 3, 23.0, report, Traffic(space.size, 9.0)))

    instructions = {client: Instruction(0, client, 7, model) for client in range(3)}
    outcomes = {"left out": 0, "not finite": 0, "taken": 0}
    for packet in spoiled(good(1)):
        transport.says["train"] = {100: good(0), 101: packet, 102: good(2)}
        here = remote(directory)
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            updates, broken = here.train(instructions, model.device, space)
        named = ["site 'Lyon' (client 1) is left out of round 1: " in str(each.message) for each in told]
        taken = [update for update in updates if update.client_id == 1]
        assert {update.client_id for update in updates} >= {0, 2}
        assert len(taken) + (broken == [1]) + any(named) == 1
        assert any(named) == (here._state.incidents != [] and "left out" in here._state.incidents[0]["what"])
        assert json.dumps(here._state.incidents, ensure_ascii=False).encode().isascii()  # as the run's record has it
        outcomes["taken" if taken else "not finite" if broken else "left out"] += 1
        for update in taken:
            assert update.vector.isfinite().all()
            assert update.vector.dtype == space.dtype
            assert (update.num_samples, update.reports.keys()) == (SAMPLES, {"change"})
            assert 0 <= update.num_steps <= SAMPLES
            assert 0 <= update.norm < math.inf
            assert not math.isinf(update.loss)
    assert outcomes["left out"] > 150
    assert outcomes["not finite"] >= 5
    # Another loss, norm or number of steps within bounds, another size on the way, whether something was lost.
    assert outcomes["taken"] < 80


@pytest.mark.parametrize("strict", [True, False])
def test_nobody_is_greeted_who_does_not_say_who_it_is(sites: tuple[Replay, Directory], strict: bool) -> None:
    transport, directory = sites
    good = transport.says["hello"]
    for packet in spoiled(Packet("hello", {"sizes": good[101].plain["sizes"]})):
        directory._book.unlink(missing_ok=True)
        here = Directory(transport, NAMES, {}, directory._book, timeout=1, wait=0.2)
        transport.says["hello"] = {**good, 101: packet}
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            found = here.refresh(strict)
        assert {0, 2} <= found.keys()
        assert (1 in found) != bool(told)
        for sizes in here.sizes.values():
            assert sizes["train"] >= 1
            assert max(sizes.values()) <= 10**8


@pytest.mark.filterwarnings("ignore:site 'Lyon'")
def test_no_answer_ends_a_run(sites: tuple[Replay, Directory]) -> None:
    transport, directory = sites
    plain, tensors = pack({"values": [torch.rand(4), 3, None], "draw": torch.Generator()})
    deep: Any = 1
    for _ in range(5000):
        deep = {"list": [deep]}
    packets = [*spoiled(Packet("answer", {"answer": plain}, tensors)), Packet("answer", {"answer": deep})]
    silent: list[str] = []
    for packet in packets:
        transport.says["ask"] = {101: packet}
        try:
            remote(directory).ask(1, 0, leave_self_out, (), {})
        except NoAnswer as why:
            silent.append(str(why))
    assert len(silent) > 100
    assert all(words.startswith("site 'Lyon' (client 1) ") for words in silent)


def test_no_accuracy_ends_a_run(sites: tuple[Replay, Directory]) -> None:
    transport, directory = sites
    told = {1: Instruction(0, 1, 7, torch.zeros(3))}
    for packet in spoiled(Packet("tested", {"accuracy": 0.5, "balanced_accuracy": 0.5, "auroc": 0.5})):
        transport.says["test"] = {101: packet}
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            found = remote(directory).test(told)
        assert (1 in found) != any("site 'Lyon' (client 1) has not tested its model" in str(w.message) for w in said)
        assert all(not value < 0 and not value > 1 for scores in found.values() for value in scores.values())
