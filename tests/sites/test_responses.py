"""A site sends impossible responses: they do not count, whatever was requested, and the run goes on without them."""

import importlib
from functools import partial

import pytest
import torch
from torch import Tensor

from flsv.core import NoResponse
from flsv.core.responses import expected_response
from flsv.sites import Packet
from flsv.sites.messages import pack
from flsv.sites.requests import REQUESTED_FUNCTIONS
from helpers import refused
from helpers.sites import (
    ADDRESSES,
    LYON_ADDRESS,
    Replay,
    announcement,
    sites_that_reply,
)

NUM_CLASSES = 3
HELD_OUT = 10
MODEL = torch.zeros(6)
STATE = "0" * 64

COUNTS = torch.tensor([[4, 6, 0, 0], [4, 2, 0, 0], [0, 6, 0, 0]])
SCORE = torch.tensor(0.5, dtype=torch.float64)
VALUES = torch.tensor([0.5, -0.2, 0.1], dtype=torch.float64)
TWO_MODELS = torch.zeros(2, 6)
COALITIONS = torch.tensor([[False], [True]])
#: The arguments of each request of flsv.
ARGUMENTS = {
    "flsv.personalization.pfedsv:collaborate": ([MODEL, MODEL], None),
    "flsv.personalization.fedfomo:mix_models": ([MODEL, MODEL], 6),
    "flsv.core.round:started_from": (),
    "flsv.sampling.power_of_choice:local_loss": (MODEL,),
    "flsv.metrics.contribution_estimation:leave_self_out": (MODEL, 0.3),
    "flsv.games.client_evaluation:score_models": (TWO_MODELS,),
    "flsv.games.client_evaluation:score_coalitions": (TWO_MODELS, COALITIONS, SCORE),
}
#: A response to each request.
RESPONSES = {
    "flsv.personalization.pfedsv:collaborate": VALUES,
    "flsv.personalization.fedfomo:mix_models": VALUES,
    "flsv.core.round:started_from": MODEL,
    "flsv.sampling.power_of_choice:local_loss": 2.3,
    "flsv.metrics.contribution_estimation:leave_self_out": SCORE,
    "flsv.games.client_evaluation:score_models": COUNTS,
    "flsv.games.client_evaluation:score_coalitions": torch.stack([COUNTS, COUNTS]),
}


def as_tensor(response):
    if isinstance(response, Tensor):
        return response
    return torch.tensor(response, dtype=torch.float64)


def convert_response(response, dtype):
    numbers = as_tensor(response)
    return numbers.clamp_min(0).to(dtype)


def fill_response(response, number):
    """The response's shape with one impossible number everywhere."""
    if isinstance(response, float):
        return number

    numbers = torch.full(response.shape, number, dtype=torch.float64)
    if response.is_floating_point():
        return numbers.to(response.dtype)
    return numbers


#: Functions that spoil a response.
SPOILERS = {
    "another dtype": partial(convert_response, dtype=torch.float16),
    "complex": partial(convert_response, dtype=torch.complex64),
    "uint16": partial(convert_response, dtype=torch.uint16),
    "too short": lambda response: as_tensor(response).flatten()[:-1],
    "NaN": partial(fill_response, number=float("nan")),
    "infinite": partial(fill_response, number=float("inf")),
    "1e308": partial(fill_response, number=1e308),
    "negative": partial(fill_response, number=-1e30),
    "text": lambda response: "x",
}


def make_reply(response):
    plain, tensors = pack(response)
    return Packet("result", {"result": plain, "state": STATE}, tensors)


def make_sites(folder, reply):
    transport = Replay()
    sizes = {"train": 40, "val": HELD_OUT, "test": 0}
    hello = Packet("handshake", announcement(sizes))
    transport.says["handshake"] = dict.fromkeys(ADDRESSES, hello)
    transport.says["query"] = {LYON_ADDRESS: reply}
    sites = sites_that_reply(folder, transport, num_classes=NUM_CLASSES)
    sites.directory.gather()
    sites._state.global_vector = MODEL
    return sites


def function_named(name):
    module_name, _, function = name.partition(":")
    module = importlib.import_module(module_name)
    return getattr(module, function)


def query_lyon(sites, name):
    return sites.query(site=1, function=function_named(name), args=ARGUMENTS[name], kwargs={})


@pytest.mark.parametrize("name", REQUESTED_FUNCTIONS)
def test_every_request_declares_and_accepts_its_response(tmp_path, name):
    assert expected_response(function_named(name)) is not None

    response = query_lyon(make_sites(tmp_path, make_reply(RESPONSES[name])), name)

    assert torch.equal(as_tensor(response), as_tensor(RESPONSES[name]))


def assert_no_response(sites, name):
    with pytest.raises(NoResponse, match="'Lyon' .* has sent no result of"):
        query_lyon(sites, name)

    (incident,) = sites._state.incidents
    assert incident["client"] == 1
    assert sites._accepted_states == {}


@pytest.mark.parametrize("spoil", SPOILERS.values(), ids=SPOILERS)
@pytest.mark.parametrize("name", REQUESTED_FUNCTIONS)
def test_spoiled_response_to_every_request_is_no_response_and_an_event(tmp_path, name, spoil):
    reply = make_reply(spoil(RESPONSES[name]))
    assert_no_response(make_sites(tmp_path, reply), name)


@pytest.mark.parametrize("name", REQUESTED_FUNCTIONS)
def test_reply_without_a_result_is_no_response_and_an_event(tmp_path, name):
    reply = Packet("result", {"state": STATE})
    assert_no_response(make_sites(tmp_path, reply), name)


def count_samples(local):
    return int(local.class_counts.sum())


def test_request_without_a_declared_response_is_refused(tmp_path):
    sites = make_sites(tmp_path, make_reply(3))
    with refused("Declare what the result must"):
        sites.query(site=1, function=count_samples, args=(), kwargs={})
