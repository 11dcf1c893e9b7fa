"""Packets that nobody has thought of, of one site of three: they change nothing for the others."""

import json
import warnings
from dataclasses import replace

import pytest
import torch
from hypothesis import HealthCheck, given, settings, strategies as st

from flsv.core import ClientUpdate, Instruction, NoResponse, Traffic
from flsv.engines.engine import shared_space
from flsv.metrics.contribution_estimation import leave_self_out
from flsv.sites import Packet
from flsv.sites.messages import pack, update_packet
from helpers import warns
from helpers.sites import (
    ADDRESSES,
    BOSTON_ADDRESS,
    LYON_ADDRESS,
    OSAKA_ADDRESS,
    Replay,
    announcement,
    make_mlp_module,
    make_shapfed_loop,
    sites_that_reply,
)

SAMPLES = 40
#: A site's operator can send anything; the same examples in every run.
FUZZED = settings(
    max_examples=80,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=list(HealthCheck),
)
DTYPES = sorted(
    {value for value in vars(torch).values() if isinstance(value, torch.dtype)},
    key=str,
)
NUMBERS = st.integers() | st.floats() | st.integers(-3, 50)
PLAIN = st.recursive(
    st.none() | st.booleans() | NUMBERS | st.text(st.characters(), max_size=9),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=9), inner, max_size=4)
    ),
    max_leaves=9,
)
KINDS = st.sampled_from(["update", "broken", "failed", "result", "tested", "handshake"]) | st.text(
    max_size=5
)
#: Kinds of tensors that an operator can send.
FORMS = {
    "as it is": lambda tensor: tensor,
    "meta": lambda tensor: tensor.to("meta"),
    "sparse": lambda tensor: tensor.to_sparse(),
    "expanded": lambda tensor: tensor[..., :1].expand(tensor.shape),
    "graph": lambda tensor: tensor.requires_grad_() * 1,
}


#: What torch raises at a number, shape or form that tensors of a type cannot have.
IMPOSSIBLE_TENSOR = (RuntimeError, TypeError, OverflowError, ValueError, IndexError)


@st.composite
def draw_tensor(draw, like):
    """A tensor of any type and shape, often one like that which is expected, with any number in it; or none at all."""
    is_tensor = draw(st.integers(0, 9)) > 0
    if not is_tensor:
        return draw(PLAIN)

    any_shape = st.lists(st.integers(0, 5), max_size=3)
    shape = draw(st.just(tuple(like.shape)) | any_shape)
    dtype = draw(st.just(like.dtype) | st.sampled_from(DTYPES))

    try:
        return draw_tensor_of_type(draw, shape, dtype)
    except IMPOSSIBLE_TENSOR:
        # Bytes can be viewed as a tensor of any type.
        return torch.zeros(32, dtype=torch.uint8).view(dtype)


def draw_tensor_of_type(draw, shape, dtype):
    tensor = torch.zeros(shape).to(dtype)

    has_a_number = tensor.numel() and draw(st.booleans())
    if has_a_number:
        position = draw(st.integers(0, tensor.numel() - 1))
        number = draw(NUMBERS)
        tensor.view(-1)[position] = number

    form = draw(st.sampled_from([*FORMS]))
    convert = FORMS[form]
    return convert(tensor)


def packet_variants(good):
    """Variants of a packet."""
    fields = {name: st.just(value) | PLAIN for name, value in good.plain.items()}
    some_fields = st.fixed_dictionaries({}, optional=fields)
    plain = st.builds(dict, some_fields) | PLAIN
    like = next(iter(good.tensors.values()), torch.zeros(3))
    sent = {}
    for name, value in good.tensors.items():
        sent[name] = st.just(value) | draw_tensor(value)

    names = st.sampled_from(["report/", "report/x", "0", "x"]) | st.integers()

    def packet_of(
        kind,
        plain,
        tensors,
        more_tensors,
    ):
        try:
            return Packet(kind, plain, {**tensors, **more_tensors})
        except ValueError:
            return None

    more_tensors = st.dictionaries(
        names,
        draw_tensor(like),
        max_size=2,
    ) | st.just({})

    return st.builds(
        packet_of,
        st.just(good.kind) | KINDS,
        plain | st.just(good.plain),
        st.fixed_dictionaries(sent),
        more_tensors,
    ).filter(bool)


SPACE = shared_space(make_mlp_module(), make_shapfed_loop().config)
MODEL = SPACE.read(make_mlp_module())
INSTRUCTIONS = {
    client: Instruction(round_index=0, client_id=client, seed=7, start=MODEL) for client in range(3)
}
HELLO = Packet("handshake", announcement({"train": SAMPLES, "val": 10, "test": 0}))
_plain, _tensors = pack(torch.tensor(0.5, dtype=torch.float64))
VISIT = "0" * 64
ANSWER = Packet("result", {"result": _plain, "state": VISIT}, _tensors)


def make_update(client, **reports):
    if not reports:
        reports = {"change": torch.full((5,), 0.5 + client)}

    client_update = ClientUpdate(
        client_id=client,
        num_samples=SAMPLES,
        vector=MODEL + 0.1,
        loss=0.5,
        num_steps=3,
        reports=reports,
        traffic=Traffic(numbers=SPACE.size, bytes=9.0),
    )

    return update_packet(client_update, VISIT)


def make_sites(
    folder,
    kind="handshake",
    packet_of_lyon=HELLO,
):
    """Lyon sends this, the others what they should; nobody is in the book."""
    (folder / "book.json").unlink(missing_ok=True)

    transport = Replay()
    transport.says = {
        "handshake": {},
        "train": {},
        "query": {},
        "test": {},
    }
    for client, address in enumerate(ADDRESSES):
        transport.says["handshake"][address] = HELLO
        transport.says["train"][address] = make_update(client)

    transport.says[kind][LYON_ADDRESS] = packet_of_lyon

    sites = sites_that_reply(folder, transport, reports={"change": None})

    return sites, transport


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("fuzzed")


@pytest.mark.slow
@FUZZED
@given(packet=packet_variants(make_update(1)))
@pytest.mark.filterwarnings("ignore")
def test_fuzzed_update_of_one_site_changes_no_other_sites_update(folder, packet):
    manager, _ = make_sites(folder, "train", packet)
    updates, _ = manager.train(INSTRUCTIONS, MODEL.device, SPACE)
    by_client = {update.client_id: update for update in updates}

    for client in (0, 2):
        other_update = by_client[client]
        assert torch.equal(other_update.vector, MODEL + 0.1)
        assert other_update.loss == 0.5
        assert other_update.num_steps == 3
        assert other_update.reports["change"].tolist() == [0.5 + client] * 5

    if 1 in by_client:
        fuzzed_update = by_client[1]
        vector = fuzzed_update.vector
        assert vector.isfinite().all()
        assert vector.shape == MODEL.shape
        assert vector.dtype == MODEL.dtype
        assert not vector.requires_grad
        ((name, value),) = fuzzed_update.reports.items()
        assert name == "change"
        assert value.shape == (5,)
        assert value.dtype == torch.float32
        assert value.isfinite().all()

    # The run's record has the incidents as UTF-8: this must not raise.
    text = json.dumps(manager._state.incidents, ensure_ascii=False)
    text.encode()


@FUZZED
@given(packet=packet_variants(HELLO))
def test_fuzzed_greeting_is_accepted_or_warned_about(folder, packet):
    directory = make_sites(folder, "handshake", packet)[0].directory
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        sites = directory.refresh(strict=True)

    assert {0, 2} <= sites.keys()
    assert (1 in sites) != bool(warned)
    for sizes in directory.sizes.values():
        assert sizes["train"] >= 1
        assert max(sizes.values()) <= 10**8


@FUZZED
@given(
    packet=packet_variants(ANSWER)
    | packet_variants(Packet("tested", {"accuracy": 0.5, "balanced_accuracy": 0.5, "auroc": 0.5}))
)
@pytest.mark.filterwarnings("ignore")
def test_fuzzed_response_is_valid_or_counts_as_no_response(folder, packet):
    sites, transport = make_sites(folder, "query", packet)
    transport.says["test"][LYON_ADDRESS] = packet
    sites.directory.refresh()
    arguments = (torch.zeros(3), 0.5)

    try:
        response = sites.query(site=1, function=leave_self_out, args=arguments, kwargs={})
    except NoResponse as error:
        words = str(error)
        assert words.startswith("site 'Lyon' (client 1) ")
        assert words.isprintable()
    else:
        assert 0 <= float(response) <= 1

    scores_by_client = sites.score_own_models({1: INSTRUCTIONS[1]})
    for scores in scores_by_client.values():
        assert not any(score < 0 or score > 1 for score in scores.values())


def test_two_sites_that_disagree_on_report_shapes_are_both_left_out(folder):
    """Until most have reported one thing: the first to answer is not right for being first."""
    manager, transport = make_sites(folder)

    agreeing_responses = transport.says["train"]
    disagreeing_responses = {  # two updates, and a failure
        BOSTON_ADDRESS: make_update(0, change=torch.zeros(4)),
        LYON_ADDRESS: make_update(1),
        OSAKA_ADDRESS: Packet("failed", {"error": "it has stopped"}),
    }

    transport.says["train"] = disagreeing_responses
    with warns("the other sites report change.* or change") as warned:
        updates_and_broken = manager.train(INSTRUCTIONS, MODEL.device, SPACE)

    assert updates_and_broken == ([], [])
    assert sum(" or change" in str(warning.message) for warning in warned) == 2

    transport.says["train"] = agreeing_responses
    updates, _ = manager.train(INSTRUCTIONS, MODEL.device, SPACE)

    assert len(updates) == 3

    # Once most have agreed on shapes, only the site with other shapes is excluded.
    transport.says["train"] = disagreeing_responses
    with warns("'Boston' .* the other sites report change"):
        updates, _ = manager.train(INSTRUCTIONS, MODEL.device, SPACE)

    assert [update.client_id for update in updates] == [1]


def test_update_with_an_undeclared_report_is_left_out(folder):
    manager, transport = make_sites(folder)
    odd = make_update(1, change=torch.zeros(5), weights=torch.ones(3))
    transport.says["train"] |= {BOSTON_ADDRESS: odd, LYON_ADDRESS: odd}

    with warns("reports 'weights', which no strategy declares"):
        updates, _ = manager.train(INSTRUCTIONS, MODEL.device, SPACE)
    assert [update.client_id for update in updates] == [2]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("number", [1e308, -1e308, 1e19])
def test_update_with_an_impossible_loss_or_report_is_left_out(folder, number):
    honest = make_update(client=1)
    with_bad_loss = replace(honest, plain={**honest.plain, "loss": number})
    bad_change = torch.full((5,), number, dtype=torch.float64)
    with_bad_change = make_update(client=1, change=bad_change)
    no_change = torch.zeros(5, dtype=torch.float64)

    for packet in (with_bad_loss, with_bad_change):
        sites, transport = make_sites(folder, "train", packet)
        for client in (0, 2):
            transport.says["train"][ADDRESSES[client]] = make_update(client, change=no_change)

        updates, broken = sites.train(INSTRUCTIONS, MODEL.device, SPACE)

        assert [update.client_id for update in updates] == [0, 2]
        assert broken == []
        assert len(sites._state.incidents) == 1
