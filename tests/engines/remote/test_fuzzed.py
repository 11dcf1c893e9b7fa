"""Packets that nobody has thought of, of one site of three: they change nothing for the others."""

import json
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings, strategies as st

from flsv.core import ClientUpdate, FederationState, Instruction, NoAnswer, Traffic
from flsv.engines.engine import shared_space
from flsv.engines.remote import Directory, Packet
from flsv.engines.remote.federation import RemoteSites
from flsv.engines.remote.messages import pack, update_packet
from flsv.metrics.contribution_estimation import leave_self_out
from helpers.sites import NAMES, Replay, module, shapfed

SAMPLES = 40
#: A site's operator can send anything; the same examples in every run.
FUZZED = settings(
    max_examples=80,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=list(HealthCheck),
)
DTYPES = sorted({each for each in vars(torch).values() if isinstance(each, torch.dtype)}, key=str)
NUMBERS = st.integers() | st.floats() | st.integers(-3, 50)
PLAIN = st.recursive(
    st.none() | st.booleans() | NUMBERS | st.text(st.characters(), max_size=9),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=9), inner, max_size=4)
    ),
    max_leaves=9,
)
KINDS = st.sampled_from(["update", "broken", "failed", "answer", "tested", "hello"]) | st.text(
    max_size=5
)
#: Kinds of tensors that an operator can send.
FORMS = {
    "as it is": lambda made: made,
    "meta": lambda made: made.to("meta"),
    "sparse": lambda made: made.to_sparse(),
    "expanded": lambda made: made[..., :1].expand(made.shape),
    "graph": lambda made: made.requires_grad_() * 1,
}


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
        return FORMS[draw(st.sampled_from([*FORMS]))](made)
    except (
        RuntimeError,
        TypeError,
        OverflowError,
        ValueError,
        IndexError,
    ):  # there is none of this type
        return torch.zeros(32, dtype=torch.uint8).view(dtype)


def packets(good: Packet) -> st.SearchStrategy[Any]:
    """Variants of a packet."""
    known = {name: st.just(value) | PLAIN for name, value in good.plain.items()}
    plain = st.builds(dict, st.fixed_dictionaries({}, optional=known)) | PLAIN  # type: ignore[arg-type]
    like = next(iter(good.tensors.values()), torch.zeros(3))
    sent = {name: st.just(value) | tensors(value) for name, value in good.tensors.items()}
    names = st.sampled_from(["report/", "report/x", "0", "x"]) | st.integers()

    def made(kind: Any, plain: Any, whole: Any, more: Any) -> Packet | None:
        try:
            return Packet(kind, plain, {**whole, **more})
        except ValueError:
            return None

    more = st.dictionaries(names, tensors(like), max_size=2) | st.just({})
    return st.builds(
        made,
        st.just(good.kind) | KINDS,
        plain | st.just(good.plain),
        st.fixed_dictionaries(sent),  # type: ignore[arg-type]
        more,
    ).filter(bool)


SPACE = shared_space(module(), shapfed().config)
MODEL = SPACE.read(module())
ROUND = {i: Instruction(0, i, 7, MODEL) for i in range(3)}
HELLO = Packet("hello", {"sizes": {"train": SAMPLES, "val": 10, "test": 0}})
_plain, _tensors = pack(torch.tensor(0.5, dtype=torch.float64))
VISIT = "0" * 64
ANSWER = Packet("answer", {"answer": _plain, "visit": VISIT}, _tensors)


def update(client: int, **reports: torch.Tensor) -> Packet:
    reports = reports or {"change": torch.full((5,), 0.5 + client)}
    made = ClientUpdate(client, SAMPLES, MODEL + 0.1, 0.5, 3, reports, Traffic(SPACE.size, 9.0))
    return update_packet(made, VISIT)


def remote(folder: Path, kind: str = "hello", lyons: Any = HELLO) -> tuple[RemoteSites, Replay]:
    """Lyon sends this, the others what they should; nobody is in the book."""
    (folder / "book.json").unlink(missing_ok=True)
    transport = Replay()
    transport.says = {"hello": {}, "train": {}, "ask": {}, "test": {}}
    for client in range(3):
        transport.says["hello"][100 + client] = HELLO
        transport.says["train"][100 + client] = update(client)
    transport.says[kind][101] = lyons
    book = folder / "book.json"
    directory = Directory(transport, NAMES, {}, book, timeout=1, wait=0.2)
    state = FederationState(run="0" * 16, num_clients=3)
    sites = RemoteSites(
        directory,
        state,
        rounds=1,
        most_steps=lambda site, samples: samples,
        reports={"change": None},
    )
    return sites, transport


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("fuzzed")


@FUZZED
@given(packet=packets(update(1)))
@pytest.mark.filterwarnings("ignore")
def test_fuzzed_update_of_one_site_changes_no_other_sites_update(
    folder: Path, packet: Packet
) -> None:
    here, _ = remote(folder, "train", packet)
    found, _ = here.train(ROUND, MODEL.device, SPACE)
    by_client = {update.client_id: update for update in found}
    for client in (0, 2):
        assert torch.equal(by_client[client].vector, MODEL + 0.1)
        assert (by_client[client].loss, by_client[client].num_steps) == (0.5, 3)
        assert by_client[client].reports["change"].tolist() == [0.5 + client] * 5
    if 1 in by_client:
        mine = by_client[1]
        assert mine.vector.isfinite().all()
        assert (mine.vector.shape, mine.vector.dtype) == (MODEL.shape, MODEL.dtype)
        ((name, value),) = mine.reports.items()
        assert (name, value.shape, value.dtype) == ("change", torch.Size([5]), torch.float32)
        assert value.isfinite().all()
        assert not mine.vector.requires_grad
    json.dumps(here._state.incidents, ensure_ascii=False).encode()  # as the run's record has them


@FUZZED
@given(packet=packets(HELLO))
def test_fuzzed_greeting_is_accepted_or_warned_about(folder: Path, packet: Packet) -> None:
    here = remote(folder, "hello", packet)[0].directory
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        found = here.refresh(strict=True)
    assert {0, 2} <= found.keys()
    assert (1 in found) != bool(told)
    assert all(
        sizes["train"] >= 1 and max(sizes.values()) <= 10**8 for sizes in here.sizes.values()
    )


@FUZZED
@given(
    packet=packets(ANSWER)
    | packets(Packet("tested", {"accuracy": 0.5, "balanced_accuracy": 0.5, "auroc": 0.5}))
)
@pytest.mark.filterwarnings("ignore")
def test_fuzzed_answer_is_valid_or_counts_as_no_answer(folder: Path, packet: Packet) -> None:
    sites, transport = remote(folder, "ask", packet)
    transport.says["test"][101] = packet
    sites.directory.refresh()
    arguments = (torch.zeros(3), 0.5)
    words = "site 'Lyon' (client 1) "
    score = 0.5
    try:
        score = float(sites.ask(1, 0, leave_self_out, arguments, {}))
    except NoAnswer as error:
        words = str(error)
    assert 0 <= score <= 1
    assert words.startswith("site 'Lyon' (client 1) ")
    assert words.isprintable()

    own_scores = sites.score_own_models({1: ROUND[1]})
    for scores in own_scores.values():
        assert not any(value < 0 or value > 1 for value in scores.values())


def test_two_sites_that_disagree_on_report_shapes_are_both_left_out(folder: Path) -> None:
    """Until most have reported one thing: the first to answer is not right for being first."""
    here, transport = remote(folder)
    good = transport.says["train"]
    two = {
        100: update(0, change=torch.zeros(4)),
        101: update(1),
        102: Packet("failed", {"error": "it has stopped"}),
    }
    transport.says["train"] = two
    with pytest.warns(UserWarning, match="the others do not agree: change") as said:
        assert here.train(ROUND, MODEL.device, SPACE) == ([], [])
    assert len([each for each in said if "do not agree" in str(each.message)]) == 2
    transport.says["train"] = good
    assert len(here.train(ROUND, MODEL.device, SPACE)[0]) == 3
    transport.says["train"] = two
    with pytest.warns(UserWarning, match="'Boston' .* the others change"):
        assert [update.client_id for update in here.train(ROUND, MODEL.device, SPACE)[0]] == [1]


def test_update_with_an_undeclared_report_is_left_out(folder: Path) -> None:
    here, transport = remote(folder)
    odd = update(1, change=torch.zeros(5), weights=torch.ones(3))
    transport.says["train"] |= {100: odd, 101: odd}
    with pytest.warns(UserWarning, match="it reports 'weights', which nobody asks for"):
        found, _ = here.train(ROUND, MODEL.device, SPACE)
    assert [update.client_id for update in found] == [2]


@pytest.mark.filterwarnings("ignore")
def test_update_with_a_non_finite_report_is_left_out(folder: Path) -> None:
    here, _ = remote(folder, "train", update(1, change=torch.full((5,), float("nan"))))
    found, broken = here.train(ROUND, MODEL.device, SPACE)
    assert ([update.client_id for update in found], len(broken)) == ([0, 2], 1)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("number", [1e308, -1e308, 1e19])
def test_update_with_an_impossible_loss_or_report_is_left_out(folder: Path, number: float) -> None:
    honest = update(1)
    loss = replace(honest, plain={**honest.plain, "loss": number})
    change = torch.full((5,), number, dtype=torch.float64)
    report = update(1, change=change)

    for packet in (loss, report):
        sites, transport = remote(folder, "train", packet)
        for client in (0, 2):
            change = torch.zeros(5, dtype=torch.float64)
            transport.says["train"][100 + client] = update(client, change=change)
        updates, broken = sites.train(ROUND, MODEL.device, SPACE)

        assert [update.client_id for update in updates] == [0, 2]
        assert broken == []
        assert len(sites._state.incidents) == 1
