"""Packets that nobody has thought of, of one site of three: they change nothing for the others."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
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
#: A site's operator can send anything; the same examples in every run.
FUZZED = settings(
    max_examples=80, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck)
)
DTYPES = sorted({each for each in vars(torch).values() if isinstance(each, torch.dtype)}, key=str)
NUMBERS = st.integers() | st.floats() | st.integers(-3, 50)
PLAIN = st.recursive(
    st.none() | st.booleans() | NUMBERS | st.text(st.characters(), max_size=9),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=9), inner, max_size=4),
    max_leaves=9,
)
KINDS = st.sampled_from(["update", "broken", "failed", "answer", "tested", "hello"]) | st.text(max_size=5)


@st.composite
def tensors(draw: st.DrawFn, like: torch.Tensor) -> Any:
    """A tensor of any type and shape, often one like that which is expected, with any number in it; or none at all."""
    if draw(st.integers(0, 9)) == 0:
        return draw(PLAIN)
    shape = draw(st.just(tuple(like.shape)) | st.lists(st.integers(0, 5), max_size=3))
    dtype = draw(st.just(like.dtype) | st.sampled_from(DTYPES))
    try:
        made = torch.zeros(shape).to(dtype)
        if made.numel() and draw(st.booleans()):
            made.view(-1)[draw(st.integers(0, made.numel() - 1))] = draw(NUMBERS)
    except (RuntimeError, TypeError, OverflowError, ValueError):
        try:
            made = torch.empty(shape, dtype=dtype)
        except NotImplementedError:  # types that cannot be filled, which deterministic algorithms do
            return draw(PLAIN)
    how = draw(st.sampled_from(["as it is", "meta", "sparse", "expanded", "graph"]))
    try:
        if how == "meta":
            made = made.to("meta")
        elif how == "sparse":
            made = made.to_sparse()
        elif how == "expanded":
            made = made[..., :1].expand(made.shape)
        elif how == "graph":
            made = made.requires_grad_() * 1
    except (RuntimeError, IndexError, NotImplementedError):
        pass
    return made


def packets(good: Packet) -> st.SearchStrategy[Packet | None]:
    """Variants of a packet; None where there can be no such packet."""
    known = {name: st.just(value) | PLAIN for name, value in good.plain.items()}
    plain = st.builds(dict, st.fixed_dictionaries({}, optional=known)) | PLAIN  # type: ignore[arg-type]
    like = next(iter(good.tensors.values()), torch.zeros(3))
    sent = {name: st.just(value) | tensors(value) for name, value in good.tensors.items()}
    whole = st.fixed_dictionaries(sent)  # type: ignore[arg-type]
    more = st.dictionaries(
        st.sampled_from(["report/", "report/x", "0", "x"]) | st.integers(), tensors(like), max_size=2
    )

    def made(kind: Any, plain: Any, whole: Any, more: Any) -> Packet | None:
        try:
            return Packet(kind, plain, {**whole, **more})
        except ValueError:
            return None

    return st.builds(made, st.just(good.kind) | KINDS, plain | st.just(good.plain), whole, more | st.just({}))


SPACE, _ = shared_space(module(), shapfed().config)
MODEL = SPACE.read(module())


def good_update(client: int) -> Packet:
    report = {"change": torch.full((5,), 0.5 + client)}
    return update_packet(ClientUpdate(client, SAMPLES, MODEL + 0.1, 0.5, 3, 23.0, report, Traffic(SPACE.size, 9.0)))


def remote(tmp_path: Path, transport: Replay) -> Remote:
    (tmp_path / "book.json").unlink(missing_ok=True)
    sizes = {"train": SAMPLES, "val": 10, "test": 0}
    transport.says["hello"] = {100 + i: Packet("hello", {"sizes": sizes}) for i in range(len(NAMES))}
    directory = Directory(transport, NAMES, {}, tmp_path / "book.json", timeout=1, wait=0.2)
    return Remote(directory, FederationState(run="0" * 16, num_clients=3), 1, 1, ["change"])


@FUZZED
@given(packet=packets(good_update(1)))
def test_the_others_updates_are_taken_as_they_are(
    tmp_path_factory: pytest.TempPathFactory, packet: Packet | None
) -> None:
    if packet is None:
        return
    transport = Replay()
    transport.says["train"] = {100: good_update(0), 101: packet, 102: good_update(2)}
    here = remote(tmp_path_factory.mktemp("fuzzed"), transport)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found, broken = here.train({i: Instruction(0, i, 7, MODEL) for i in range(3)}, MODEL.device, SPACE)
    by_client = {update.client_id: update for update in found}
    for client in (0, 2):
        assert torch.equal(by_client[client].vector, MODEL + 0.1)
        assert by_client[client].reports["change"].tolist() == [0.5 + client] * 5
    if 1 in by_client:
        mine = by_client[1]
        assert mine.vector.isfinite().all()
        assert (mine.vector.shape, mine.vector.dtype) == (MODEL.shape, MODEL.dtype)
        assert [(name, value.shape, value.dtype) for name, value in mine.reports.items()] == [
            ("change", torch.Size([5]), torch.float32)
        ]
        assert mine.reports["change"].isfinite().all()
        assert not mine.vector.requires_grad
    json.dumps(here._state.incidents, ensure_ascii=False).encode()  # as the run's record has them


@FUZZED
@given(packet=packets(Packet("here", {"sizes": {"train": SAMPLES, "val": 10, "test": 0}})))
def test_who_is_greeted_has_said_what_it_has(tmp_path_factory: pytest.TempPathFactory, packet: Packet | None) -> None:
    if packet is None:
        return
    transport = Replay()
    here = remote(tmp_path_factory.mktemp("fuzzed"), transport).directory
    transport.says["hello"][101] = packet
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        found = here.refresh(strict=True)
    assert {0, 2} <= found.keys()
    assert (1 in found) != bool(told)
    assert all(sizes["train"] >= 1 and max(sizes.values()) <= 10**8 for sizes in here.sizes.values())


_plain, _tensors = pack({"values": [torch.rand(4), 3, None]})


@FUZZED
@given(packet=packets(Packet("answer", {"answer": _plain}, _tensors)))
def test_an_answer_is_one_or_there_is_none(tmp_path_factory: pytest.TempPathFactory, packet: Packet | None) -> None:
    if packet is None:
        return
    transport = Replay()
    transport.says["ask"] = {101: packet}
    here = remote(tmp_path_factory.mktemp("fuzzed"), transport)
    said = ""
    try:
        here.ask(1, 0, leave_self_out, (), {})
    except NoAnswer as why:
        said = str(why)
    assert not said or said.startswith("site 'Lyon' (client 1) ")
    assert said.isprintable()


@FUZZED
@given(packet=packets(Packet("tested", {"accuracy": 0.5, "balanced_accuracy": 0.5, "auroc": 0.5})))
def test_an_accuracy_is_one_or_there_is_none(tmp_path_factory: pytest.TempPathFactory, packet: Packet | None) -> None:
    if packet is None:
        return
    transport = Replay()
    transport.says["test"] = {101: packet}
    here = remote(tmp_path_factory.mktemp("fuzzed"), transport)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = here.test({1: Instruction(0, 1, 7, torch.zeros(3))})
    assert not any(value < 0 or value > 1 for scores in found.values() for value in scores.values())


def test_an_answer_of_any_depth_is_one_or_there_is_none(tmp_path: Path) -> None:
    deep: Any = 1
    for _ in range(5000):
        deep = {"list": [deep]}
    transport = Replay()
    transport.says["ask"] = {101: Packet("answer", {"answer": deep})}
    with pytest.raises(NoAnswer, match="lacks or garbles maximum recursion"):
        remote(tmp_path, transport).ask(1, 0, leave_self_out, (), {})


def test_of_two_that_report_different_things_nobody_knows_who_is_right(tmp_path: Path) -> None:
    """Until most have reported one thing: the first to answer is not right for being first."""
    transport = Replay()
    here = remote(tmp_path, transport)
    told = {i: Instruction(0, i, 7, MODEL) for i in range(3)}
    lying = update_packet(ClientUpdate(1, SAMPLES, MODEL, 0.5, 3, 23.0, {"change": torch.zeros(4)}, Traffic(3, 9.0)))
    transport.says["train"] = {100: lying, 101: good_update(1), 102: Packet("failed", {"error": "it has stopped"})}
    with pytest.warns(UserWarning, match="the others do not agree: change") as said:
        assert here.train(told, MODEL.device, SPACE) == ([], [])
    assert len([each for each in said if "do not agree" in str(each.message)]) == 2
    transport.says["train"] = {i: good_update(i - 100) for i in (100, 101, 102)}
    assert len(here.train(told, MODEL.device, SPACE)[0]) == 3
    transport.says["train"] = {100: lying, 101: good_update(1), 102: Packet("failed", {"error": "it has stopped"})}
    with pytest.warns(UserWarning, match="'Boston' .* the others change"):
        assert [update.client_id for update in here.train(told, MODEL.device, SPACE)[0]] == [1]


def test_what_nobody_asks_for_is_not_taken(tmp_path: Path) -> None:
    transport = Replay()
    here = remote(tmp_path, transport)
    more = {"change": torch.zeros(5), "weights": torch.ones(3)}
    odd = update_packet(ClientUpdate(1, SAMPLES, MODEL, 0.5, 3, 23.0, more, Traffic(3, 9.0)))
    transport.says["train"] = {100: odd, 101: odd, 102: good_update(2)}
    with pytest.warns(UserWarning, match="it reports 'weights', which nobody asks for"):
        found, _ = here.train({i: Instruction(0, i, 7, MODEL) for i in range(3)}, MODEL.device, SPACE)
    assert [update.client_id for update in found] == [2]
