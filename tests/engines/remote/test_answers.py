"""Answers of one site that cannot be: they are no answers, whatever was asked, and the run goes on without them."""

import copy
import importlib
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from flsv import FederatedLoop
from flsv.aggregation import FedAvg
from flsv.core import FederationState, LocalData, NoAnswer
from flsv.core.answers import expected_answer
from flsv.engines.remote import Directory, Packet
from flsv.engines.remote.federation import RemoteSites
from flsv.engines.remote.messages import pack
from flsv.engines.remote.policy import QUESTIONS
from flsv.metrics import (
    ClassSpecificShapley,
    DomainRelevance,
    LeaveOneOut,
    ShadowShapley,
)
from flsv.personalization import FedFomo, PFedSV
from flsv.sampling import PowerOfChoice
from flsv.utilities.errors import ConfigurationError
from helpers.sites import (
    ADDRESSES,
    LYON_ADDRESS,
    NAMES,
    SPLITS,
    Replay,
    ServerData,
    SitesInProcess,
    announcement,
    make_shapfed_loop,
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
ARGUMENTS: dict[str, tuple[Any, ...]] = {
    "flsv.personalization.pfedsv:collaborate": ([MODEL, MODEL], None),
    "flsv.personalization.fedfomo:mix_models": ([MODEL, MODEL], 6),
    "flsv.core.round:started_from": (),
    "flsv.sampling.power_of_choice:local_loss": (MODEL,),
    "flsv.metrics.contribution_estimation:leave_self_out": (MODEL, 0.3),
    "flsv.games.judges:judge": (TWO_MODELS,),
    "flsv.games.judges:judge_coalitions": (TWO_MODELS, COALITIONS, SCORE),
}
#: An answer to each question.
ANSWERS: dict[str, Any] = {
    "flsv.personalization.pfedsv:collaborate": VALUES,
    "flsv.personalization.fedfomo:mix_models": VALUES,
    "flsv.core.round:started_from": MODEL,
    "flsv.sampling.power_of_choice:local_loss": 2.3,
    "flsv.metrics.contribution_estimation:leave_self_out": SCORE,
    "flsv.games.judges:judge": COUNTS,
    "flsv.games.judges:judge_coalitions": torch.stack([COUNTS, COUNTS]),
}


def as_tensor(answer: Any) -> Tensor:
    if isinstance(answer, Tensor):
        return answer
    return torch.tensor(answer, dtype=torch.float64)


def convert_answer(answer: Any, dtype: torch.dtype) -> Tensor:
    numbers = as_tensor(answer)
    return numbers.clamp_min(0).to(dtype)


def fill_answer(answer: Any, number: float) -> Any:
    """The answer's shape with one impossible number everywhere."""
    if isinstance(answer, float):
        return number

    numbers = torch.full(answer.shape, number, dtype=torch.float64)
    if answer.is_floating_point():
        return numbers.to(answer.dtype)
    return numbers


#: Ten ways to spoil an answer. "missing" is a reply without one.
WAYS: dict[str, Callable[[Any], Any]] = {
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


def make_reply(answer: Any) -> Packet:
    plain, tensors = pack(answer)
    return Packet("answer", {"answer": plain, "visit": VISIT}, tensors)


def make_sites(folder: Path, reply: Packet) -> RemoteSites:
    transport = Replay()
    sizes = {"train": 40, "val": HELD_OUT, "test": 0}
    hello = Packet("hello", announcement(sizes))
    transport.says["hello"] = dict.fromkeys(ADDRESSES, hello)
    transport.says["ask"] = {LYON_ADDRESS: reply}
    book = folder / "book.json"
    directory = Directory(transport, NAMES, {}, book, timeout=1, wait=0.2)
    directory.gather()

    state = FederationState(run="0" * 16, num_clients=3)
    state.global_vector = MODEL
    return RemoteSites(
        directory,
        state,
        rounds=1,
        max_steps=lambda site, samples: samples,
        num_classes=NUM_CLASSES,
    )


def question_named(name: str) -> Callable[..., Any]:
    module_name, _, function = name.partition(":")
    module = importlib.import_module(module_name)
    return getattr(module, function)


@pytest.mark.parametrize("name", QUESTIONS)
def test_spoiled_answer_to_every_question_is_no_answer_and_an_event(
    tmp_path: Path, name: str
) -> None:
    """A new question needs an example here, and a declaration beside it."""
    arguments = ARGUMENTS[name]
    answer = ANSWERS[name]
    question = question_named(name)
    # What is not declared could not be told from a spoiled answer.
    assert expected_answer(question) is not None

    def ask_lyon(sites: RemoteSites) -> Any:
        return sites.ask(site=1, round_index=0, question=question, args=arguments, kwargs={})

    received = ask_lyon(make_sites(tmp_path, make_reply(answer)))
    assert torch.equal(as_tensor(received), as_tensor(answer))

    for manner, spoil in WAYS.items():
        if manner == "missing":
            reply = Packet("answer", {"visit": VISIT})
        else:
            reply = make_reply(spoil(answer))
        sites = make_sites(tmp_path, reply)

        with pytest.raises(NoAnswer, match="'Lyon' .* did not answer"):
            ask_lyon(sites)

        (incident,) = sites._state.incidents
        assert incident["client"] == 1, manner
        assert sites._accepted_visits == {}, manner


def undeclared(local: LocalData) -> int:
    return int(local.class_counts.sum())


def test_question_without_a_declared_answer_is_refused(tmp_path: Path) -> None:
    sites = make_sites(tmp_path, make_reply(3))
    with pytest.raises(ConfigurationError, match="Declare what its answer must be"):
        sites.ask(1, 0, undeclared, (), {})


#: Federations in which all kinds of questions are asked: before and after training, of one client and of coalitions.
FEDERATIONS: dict[str, dict[str, Any]] = {
    "mix_models and started_from": {
        "metrics": {"cssv": ClassSpecificShapley()},
        "personalizer": FedFomo(),
    },
    "collaborate and started_from": {
        "metrics": {"relevance": DomainRelevance(), "cssv": ClassSpecificShapley()},
        "personalizer": PFedSV(),
    },
    "judge": {"metrics": {"value": LeaveOneOut(judges="clients", performance="negative_loss")}},
    "judge_coalitions": {"metrics": {"value": ShadowShapley(judges="clients")}},
    "local_loss": {"sampler": PowerOfChoice(2, 3)},
}


FIRST_SPOILED_ROUND = 2


def spoil_lyons_answers(address: int, packet: Packet, reply: Packet) -> Any:
    """Lyon answers in round 0, is silent in round 1, and spoils its answers in another way in each later round."""
    if packet.kind != "ask" or address != LYON_ADDRESS:
        return reply

    if reply.kind != "answer":
        return reply

    round_index = packet.plain["round"]
    if round_index == 0:
        return reply

    if round_index < FIRST_SPOILED_ROUND:
        return None

    # Judges are asked once more after the last round, and the ways begin anew.
    ways = list(WAYS.values())
    spoil = ways[(round_index - FIRST_SPOILED_ROUND) % len(ways)]

    tensors = {name: spoil(tensor) for name, tensor in reply.tensors.items()}
    are_tensors = [isinstance(tensor, Tensor) for tensor in tensors.values()]
    if tensors and all(are_tensors):
        return replace(reply, tensors=tensors)

    # An answer without tensors, or one that is missing or a text, becomes a word.
    plain = {**reply.plain, "answer": "x"}
    return replace(reply, plain=plain, tensors={})


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("federation", FEDERATIONS)
def test_run_goes_on_without_the_spoiled_answers_of_one_site(
    tmp_path: Path, federation: str
) -> None:
    settings = {"aggregator": FedAvg(), "metrics": {}, **FEDERATIONS[federation]}

    def make() -> FederatedLoop:
        return make_shapfed_loop(**copy.deepcopy(settings))

    remote = SitesInProcess(tmp_path, make, **SPLITS)
    remote.transport.on_reply = spoil_lyons_answers
    rounds = FIRST_SPOILED_ROUND + len(WAYS)
    loop = remote.fit(rounds=rounds, server_data=ServerData())

    assert loop.state.round_index == rounds
    boston_and_osaka = [0, 2]
    # In each round, or as often as two of three sites are drawn.
    assert loop.participations[boston_and_osaka].min() >= rounds // 2
    assert {event.client for event in loop.events} == {1}

    for values in loop.contributions.values():
        plain_values = values.as_subclass(Tensor)
        honest_values = plain_values[boston_and_osaka]
        assert honest_values.isfinite().all()
        assert honest_values.abs().max() < 10  # spoiled answers are 1e30 and more
