"""Answers of one site that cannot be: they are no answers, whatever was asked, and the run goes on without them."""

import importlib
from functools import partial

import pytest
import torch
from torch import Tensor

from flsv.configuration.questions import QUESTIONS
from flsv.core import NoAnswer
from flsv.core.answers import expected_answer
from flsv.engines.remote import Packet
from flsv.engines.remote.messages import pack
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
VISIT = "0" * 64

COUNTS = torch.tensor([[4, 6, 0, 0], [4, 2, 0, 0], [0, 6, 0, 0]])
SCORE = torch.tensor(0.5, dtype=torch.float64)
VALUES = torch.tensor([0.5, -0.2, 0.1], dtype=torch.float64)
TWO_MODELS = torch.zeros(2, 6)
COALITIONS = torch.tensor([[False], [True]])
#: The arguments of each question of flsv.
ARGUMENTS = {
    "flsv.personalization.pfedsv:collaborate": ([MODEL, MODEL], None),
    "flsv.personalization.fedfomo:mix_models": ([MODEL, MODEL], 6),
    "flsv.core.round:started_from": (),
    "flsv.sampling.power_of_choice:local_loss": (MODEL,),
    "flsv.metrics.contribution_estimation:leave_self_out": (MODEL, 0.3),
    "flsv.games.judges:judge": (TWO_MODELS,),
    "flsv.games.judges:judge_coalitions": (TWO_MODELS, COALITIONS, SCORE),
}
#: An answer to each question.
ANSWERS = {
    "flsv.personalization.pfedsv:collaborate": VALUES,
    "flsv.personalization.fedfomo:mix_models": VALUES,
    "flsv.core.round:started_from": MODEL,
    "flsv.sampling.power_of_choice:local_loss": 2.3,
    "flsv.metrics.contribution_estimation:leave_self_out": SCORE,
    "flsv.games.judges:judge": COUNTS,
    "flsv.games.judges:judge_coalitions": torch.stack([COUNTS, COUNTS]),
}


def as_tensor(answer):
    if isinstance(answer, Tensor):
        return answer
    return torch.tensor(answer, dtype=torch.float64)


def convert_answer(answer, dtype):
    numbers = as_tensor(answer)
    return numbers.clamp_min(0).to(dtype)


def fill_answer(answer, number):
    """The answer's shape with one impossible number everywhere."""
    if isinstance(answer, float):
        return number

    numbers = torch.full(answer.shape, number, dtype=torch.float64)
    if answer.is_floating_point():
        return numbers.to(answer.dtype)
    return numbers


#: Ten ways to spoil an answer. "missing" is a reply without one.
WAYS = {
    "another dtype": partial(convert_answer, dtype=torch.float16),
    "complex": partial(convert_answer, dtype=torch.complex64),
    "uint16": partial(convert_answer, dtype=torch.uint16),
    "too short": lambda answer: as_tensor(answer).flatten()[:-1],
    "NaN": partial(fill_answer, number=float("nan")),
    "infinite": partial(fill_answer, number=float("inf")),
    "1e308": partial(fill_answer, number=1e308),
    "negative": partial(fill_answer, number=-1e30),
    "missing": lambda answer: None,
    "text": lambda answer: "x",
}


def make_reply(answer):
    plain, tensors = pack(answer)
    return Packet("result", {"result": plain, "state": VISIT}, tensors)


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


def question_named(name):
    module_name, _, function = name.partition(":")
    module = importlib.import_module(module_name)
    return getattr(module, function)


@pytest.mark.parametrize("name", QUESTIONS)
def test_spoiled_answer_to_every_question_is_no_answer_and_an_event(tmp_path, name):
    """A new question needs an example here, and a declaration beside it."""
    arguments = ARGUMENTS[name]
    answer = ANSWERS[name]
    question = question_named(name)
    # What is not declared could not be told from a spoiled answer.
    assert expected_answer(question) is not None

    def ask_lyon(sites):
        return sites.query(site=1, function=question, args=arguments, kwargs={})

    received = ask_lyon(make_sites(tmp_path, make_reply(answer)))
    assert torch.equal(as_tensor(received), as_tensor(answer))

    for manner, spoil in WAYS.items():
        if manner == "missing":
            reply = Packet("result", {"state": VISIT})
        else:
            reply = make_reply(spoil(answer))
        sites = make_sites(tmp_path, reply)

        with pytest.raises(NoAnswer, match="'Lyon' .* has sent no result of"):
            ask_lyon(sites)

        (incident,) = sites._state.incidents
        assert incident["client"] == 1, manner
        assert sites._accepted_states == {}, manner


def undeclared(local):
    return int(local.class_counts.sum())


def test_question_without_a_declared_answer_is_refused(tmp_path):
    sites = make_sites(tmp_path, make_reply(3))
    with refused("Declare what its answer must"):
        sites.query(1, undeclared, (), {})
