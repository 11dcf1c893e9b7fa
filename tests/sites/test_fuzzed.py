"""Random packets of one site of three: they change nothing for the others."""

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
KNOWN_KINDS = ["update", "broken", "failed", "result", "tested", "handshake"]
KINDS = st.sampled_from(KNOWN_KINDS) | st.text(max_size=5)
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
    """Draw a tensor of any type and shape, often those of ``like``, with any number in it; or no tensor."""
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


NAMES_OF_TENSORS = ["report/", "report/x", "0", "x"]


def make_packet_or_none(kind, plain, tensors, further_tensors):
    try:
        return Packet(kind, plain, {**tensors, **further_tensors})
    except ValueError:
        return None


def packet_variants(packet):
    """Draw variants of a packet: of its kind, its fields and its tensors, and with further tensors."""
    fields = {}
    for name, value in packet.plain.items():
        fields[name] = st.just(value) | PLAIN
    some_fields = st.fixed_dictionaries({}, optional=fields)

    tensors = {}
    for name, tensor in packet.tensors.items():
        tensors[name] = st.just(tensor) | draw_tensor(tensor)
    *_, last_tensor = [torch.zeros(3), *packet.tensors.values()]
    further_names = st.sampled_from(NAMES_OF_TENSORS) | st.integers()
    further_tensors = st.dictionaries(
        further_names,
        draw_tensor(last_tensor),
        max_size=2,
    )

    packets = st.builds(
        make_packet_or_none,
        kind=st.just(packet.kind) | KINDS,
        plain=some_fields | PLAIN | st.just(packet.plain),
        tensors=st.fixed_dictionaries(tensors),
        further_tensors=further_tensors | st.just({}),
    )
    return packets.filter(bool)


SPACE = shared_space(make_mlp_module(), make_shapfed_loop().config)
MODEL = SPACE.read(make_mlp_module())


def make_instruction(client):
    return Instruction(round_index=0, client_id=client, seed=7, start=MODEL)


INSTRUCTIONS = {client: make_instruction(client) for client in range(3)}
HELLO = Packet("handshake", announcement({"train": SAMPLES, "val": 10, "test": 0}))
_plain, _tensors = pack(torch.tensor(0.5, dtype=torch.float64))
STATE = "0" * 64
RESULT = Packet("result", {"result": _plain, "state": STATE}, _tensors)
SCORES = dict.fromkeys(("accuracy", "balanced_accuracy", "auroc"), 0.5)
TEST_SCORES = Packet("tested", SCORES)


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

    return update_packet(client_update, STATE)


def make_sites(folder, kind="handshake", packet_of_lyon=HELLO):
    """Make sites that send what they should, but for Lyon's packet of this kind. Return their transport, too."""
    (folder / "book.json").unlink(missing_ok=True)

    transport = Replay()
    transport.says = {"handshake": {}, "train": {}, "query": {}, "test": {}}
    for client, address in enumerate(ADDRESSES):
        transport.says["handshake"][address] = HELLO
        transport.says["train"][address] = make_update(client)

    transport.says[kind][LYON_ADDRESS] = packet_of_lyon
    sites = sites_that_reply(folder, transport, reports={"change": None})
    return sites, transport


def train_at_sites(sites):
    """Return the updates by client."""
    updates, _ = sites.train(INSTRUCTIONS, MODEL.device, SPACE)
    return {update.client_id: update for update in updates}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("fuzzed")


@pytest.mark.slow
@FUZZED
@given(packet=packet_variants(make_update(1)))
@pytest.mark.filterwarnings("ignore")
def test_fuzzed_update_is_left_out_or_valid_and_changes_no_other_sites_update(folder, packet):
    sites, _ = make_sites(folder, "train", packet)
    updates = train_at_sites(sites)

    for client in (0, 2):
        update = updates[client]
        assert torch.equal(update.vector, MODEL + 0.1)
        assert update.loss == 0.5
        assert update.num_steps == 3
        assert update.reports["change"].tolist() == [0.5 + client] * 5

    # The run's record has the incidents as UTF-8: this must not raise.
    text = json.dumps(sites._state.incidents, ensure_ascii=False)
    text.encode()

    accepted_updates = [updates[1]] if 1 in updates else []
    for update in accepted_updates:
        assert update.vector.isfinite().all()
        assert update.vector.shape == MODEL.shape
        assert update.vector.dtype == MODEL.dtype
        assert not update.vector.requires_grad
        assert update.reports.keys() == {"change"}
        change = update.reports["change"]
        assert change.shape == (5,)
        assert change.dtype == torch.float32
        assert change.isfinite().all()


@pytest.mark.slow
@FUZZED
@given(packet=packet_variants(HELLO))
def test_fuzzed_greeting_is_accepted_or_warned_about(folder, packet):
    sites, _ = make_sites(folder, "handshake", packet)
    directory = sites.directory
    with warnings.catch_warnings(record=True) as caught_warnings:
        warnings.simplefilter("always")
        addresses = directory.refresh(strict=True)

    assert {0, 2} <= addresses.keys()
    assert (1 in addresses) != bool(caught_warnings)
    for sizes in directory.sizes.values():
        assert sizes["train"] >= 1
        assert max(sizes.values()) <= 10**8


@pytest.mark.slow
@FUZZED
@given(packet=packet_variants(RESULT) | packet_variants(TEST_SCORES))
@pytest.mark.filterwarnings("ignore")
def test_fuzzed_result_is_valid_or_counts_as_no_response(folder, packet):
    sites, _ = make_sites(folder, "query", packet)
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


@pytest.mark.slow
@FUZZED
@given(packet=packet_variants(RESULT) | packet_variants(TEST_SCORES))
@pytest.mark.filterwarnings("ignore")
def test_fuzzed_scores_of_own_models_are_between_0_and_1_or_missing(folder, packet):
    sites, _ = make_sites(folder, "test", packet)
    sites.directory.refresh()

    scores_by_client = sites.score_own_models({1: INSTRUCTIONS[1]})

    for scores in scores_by_client.values():
        assert not any(score < 0 or score > 1 for score in scores.values())


#: Two updates with reports of different shapes, and a failure.
DISAGREEING_RESPONSES = {
    BOSTON_ADDRESS: make_update(0, change=torch.zeros(4)),
    LYON_ADDRESS: make_update(1),
    OSAKA_ADDRESS: Packet("failed", {"error": "it has stopped"}),
}


def test_two_sites_that_disagree_on_report_shapes_are_both_left_out(folder):
    sites, transport = make_sites(folder)
    transport.says["train"] = DISAGREEING_RESPONSES

    with warns("the other sites report change.* or change") as caught_warnings:
        updates = train_at_sites(sites)

    assert updates == {}
    assert sum(" or change" in str(warning.message) for warning in caught_warnings) == 2


def test_site_with_another_report_shape_than_most_had_is_left_out(folder):
    sites, transport = make_sites(folder)
    assert len(train_at_sites(sites)) == 3

    transport.says["train"] = DISAGREEING_RESPONSES
    with warns("'Boston' .* the other sites report change"):
        updates = train_at_sites(sites)

    assert updates.keys() == {1}


def test_update_with_an_undeclared_report_is_left_out(folder):
    sites, transport = make_sites(folder)
    update = make_update(1, change=torch.zeros(5), weights=torch.ones(3))
    transport.says["train"] |= {BOSTON_ADDRESS: update, LYON_ADDRESS: update}

    with warns("reports 'weights', which no strategy declares"):
        updates = train_at_sites(sites)
    assert updates.keys() == {2}


def update_with_loss(number):
    update = make_update(client=1)
    return replace(update, plain={**update.plain, "loss": number})


def update_with_report(number):
    return make_update(client=1, change=torch.full((5,), number, dtype=torch.float64))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("number", [1e308, -1e308, 1e19])
@pytest.mark.parametrize("make_impossible_update", [update_with_loss, update_with_report])
def test_update_with_an_impossible_loss_or_report_is_left_out(
    folder, make_impossible_update, number
):
    sites, transport = make_sites(folder, "train", make_impossible_update(number))
    no_change = torch.zeros(5, dtype=torch.float64)
    for client in (0, 2):
        transport.says["train"][ADDRESSES[client]] = make_update(client, change=no_change)

    assert train_at_sites(sites).keys() == {0, 2}
    assert len(sites._state.incidents) == 1
