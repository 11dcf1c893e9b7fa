"""A curious server knows a site's inputs, and asks for labels, rows and memberships beyond what the loop asks."""

import hashlib
import json
from functools import partial

import pytest
import torch

from flsv.configuration.identity import sample_hashes
from flsv.personalization import FedFomo
from flsv.sites import Packet, SitePolicy, site_memory
from flsv.sites.ledgers import ANSWERS_FILE
from flsv.sites.messages import pack, unpack
from flsv.sites.site_memory import SiteMemory
from helpers import warns
from helpers.curious_server import (
    BY_LOSS,
    BY_OTHERS,
    EVALUATED,
    EVALUATED_BY_CLIENTS,
    EVALUATED_BY_F1,
    LOCAL_LOSS,
    MIX_MODELS,
    NUM_SAMPLES,
    NUM_SITES,
    ROUNDS,
    SCORE_COALITIONS,
    SCORE_MODELS,
    STARTED_FROM,
    CuriousServer,
    accuracy_of,
    loss_of,
    make_data,
    model_that_picks,
    score_models,
    score_of_others,
)


def scores_of_coalitions(server, num_clients):
    """Request scores of the clients' coalitions of none, of one and of all."""
    singles = torch.eye(num_clients, dtype=torch.bool)
    empty = torch.zeros(1, num_clients, dtype=torch.bool)
    trained = torch.cat([empty, singles, ~empty])
    models = torch.stack([model_that_picks(sample) for sample in range(len(trained))])
    return server.request(SCORE_COALITIONS, models, trained, torch.ones(num_clients))


#: Fields of messages about rounds, clients and classes that the run does not have.
OUTSIDE_OF_THE_RUN = [
    {"round": ROUNDS + 1},
    {"round": -5},
    {"round": True},
    {"round": 1.0},
    {"round": 77, "rounds": 100},
    {"client": True},
    {"client": NUM_SITES},
    {"client": 7, "clients": 8},
    {"classes": 0},
    {"classes": 10**9},
]


def outside_of_the_run(request, server):
    return [request(server, 3, **fields) for fields in OUTSIDE_OF_THE_RUN]


def train_outside_of_the_run(server):
    replies = [
        server.send("train", model=model_that_picks(3), **fields) for fields in OUTSIDE_OF_THE_RUN
    ]
    return [None if reply.kind == "failed" else reply for reply in replies]


def other_scores(server):
    """Scores that the run does not ask."""
    scores = ["balanced_accuracy", "negative_loss", "auroc", "val_loss", None]
    return [score_of_others(server, 3, score) for score in scores]


def rare_classes_by_accuracy(server):
    """Request the accuracy of a model that always says one class, which is this class's share of the samples."""
    return [score_models(server, [None], score) for score in ("accuracy", "negative_loss")]


def members_by_hashes(server):
    guess = make_data()
    guess.set_up_site(0)
    hash_of_guess = sample_hashes(guess)["0"]
    guesses = [hash_of_guess, hashlib.sha256(hash_of_guess.encode()).hexdigest()]
    contents = server.greeting.plain["contents"]
    return [guess if guess[:16] in contents else None for guess in guesses]


def rows_by_other_functions(server):
    """Call functions that the loop does not request."""
    functions = [STARTED_FROM, "builtins:vars", "torch:save", "flsv.core.responses:range_of_score"]
    return [server.request(function) for function in functions]


REFUSED_ATTEMPTS = {
    "tests outside of the run": (EVALUATED, partial(outside_of_the_run, accuracy_of)),
    "losses outside of the run": (BY_LOSS, partial(outside_of_the_run, loss_of)),
    "trainings outside of the run": ({}, train_outside_of_the_run),
    "tests without evaluation": ({}, lambda server: [accuracy_of(server, 3)]),
    "scores of models without client-side evaluation": (
        EVALUATED,
        lambda server: [score_models(server, [3])],
    ),
    "more models than coalitions": (
        EVALUATED_BY_CLIENTS,
        lambda server: [score_models(server, range(9))],
    ),
    "more scores than coalitions": (
        EVALUATED_BY_F1,
        lambda server: [score_models(server, range(10), "f1")],
    ),
    "coalitions of more clients": (
        EVALUATED_BY_CLIENTS,
        lambda server: [scores_of_coalitions(server, num_clients=6)],
    ),
    "counts by class of coalitions that are scored by F1": (
        EVALUATED_BY_F1,
        lambda server: [scores_of_coalitions(server, NUM_SITES)],
    ),
    "scores by more classes": (
        EVALUATED_BY_CLIENTS,
        lambda server: [score_models(server, range(8), classes=20)],
    ),
    "rare classes": (EVALUATED_BY_CLIENTS, rare_classes_by_accuracy),
    "other scores": (BY_OTHERS, other_scores),
    "hashes": (EVALUATED, members_by_hashes),
    "other functions": ({}, rows_by_other_functions),
}


@pytest.mark.fast_rows
@pytest.mark.parametrize(("options", "attempt"), REFUSED_ATTEMPTS.values(), ids=REFUSED_ATTEMPTS)
def test_curious_server_is_told_nothing_that_the_run_does_not_ask(tmp_path, options, attempt):
    server = CuriousServer(tmp_path, **options)
    responses = attempt(server)
    assert responses == [None] * len(responses)


@pytest.mark.slow
def test_error_at_a_site_is_sent_without_its_words(tmp_path):
    server = CuriousServer(tmp_path, **EVALUATED)
    replies = [
        server.send("train", model=torch.zeros(3)),
        server.send("train", model=model_that_picks(None), classes=1),
        server.send("test", model=torch.zeros(3), round=1),
    ]
    for reply in replies:
        assert "tensor" not in str(reply.plain.get("error"))


@pytest.mark.slow
def test_loss_has_three_digits_which_cannot_hold_all_labels(tmp_path):
    server = CuriousServer(tmp_path, **BY_LOSS)
    # By all its digits, the loss would be a binary number whose digits are the labels.
    powers_of_two = 2.0 ** torch.arange(-4, NUM_SAMPLES - 4)
    weights = torch.stack([torch.zeros(NUM_SAMPLES), powers_of_two])

    loss = server.request(LOCAL_LOSS, weights.flatten())

    assert loss == float(f"{loss:.3g}")


EVALUATED_BY_ALL = {**EVALUATED, **EVALUATED_BY_CLIENTS}


def send_every_kind(server):
    packed, tensors = pack(((torch.stack([model_that_picks(3)]),), {}))
    query = {"function": SCORE_MODELS, "arguments": packed}
    return [
        server.send("handshake"),
        server.send("train", model=model_that_picks(3)),
        server.send("test", model=model_that_picks(3)),
        server.send("query", tensors, **query),
        server.send("agree"),
    ]


@pytest.mark.parametrize("restrictions", [{}, {"functions": []}, {"reports": []}], ids=str)
def test_limit_without_noise_refuses_every_kind_of_message_before_a_handshake(
    tmp_path, restrictions
):
    policy = SitePolicy(max_epsilon=1.0, **restrictions)
    server = CuriousServer(tmp_path, policy, greets=False, **EVALUATED_BY_ALL)

    *replies, unknown_reply = send_every_kind(server)

    for reply in replies:
        assert reply.kind == "failed"
        assert "max_epsilon=1, but the app's updates have no noise" in reply.plain["error"]
    assert "has the unknown kind 'agree'" in unknown_reply.plain["error"]
    assert not (tmp_path / ANSWERS_FILE).exists()


NOT_LIMITED = ["handshake", "update", "tested", "result", "failed"]


@pytest.mark.parametrize(
    ("policy", "expected_kinds"),
    [
        (SitePolicy(max_epsilon=1.0), ["failed"] * 5),
        (
            SitePolicy(reports=["training_loss"]),
            ["handshake", "update", "failed", "failed", "failed"],
        ),
    ],
    ids=["max_epsilon", "reports"],
)
def test_limit_that_is_added_during_a_run_refuses_what_was_answered_before(
    tmp_path, policy, expected_kinds
):
    server = CuriousServer(tmp_path, **EVALUATED_BY_ALL)
    assert [reply.kind for reply in send_every_kind(server)] == NOT_LIMITED

    server.site.policy = policy

    assert [reply.kind for reply in send_every_kind(server)] == expected_kinds


@pytest.mark.parametrize(
    "facts", [{"flsv\n" * 999: "x"}, {"flsv": "x\n" * 999}], ids=["name", "value"]
)
def test_agreement_of_the_server_is_shortened_and_escaped_in_the_sites_log(tmp_path, caplog, facts):
    server = CuriousServer(tmp_path)
    caplog.clear()

    error = server.send("handshake", agreement=facts).plain["error"]

    assert "it and the server differ in 'flsv" in error
    assert len(error) < 700
    assert error.isprintable()
    assert "flsv\nflsv" not in caplog.text
    assert "x\nx" not in caplog.text


def nested(depth):
    value = 1
    for _ in range(depth):
        value = [value]
    return value


def hostile_fields():
    """Yield values of a message's fields that a program may write, but no server of flsv."""
    values_by_name = {
        "clients": [10**9, -1, "3", nested(900)],
        "rounds": [10**9, 1e9, None],
        "classes": [10**9, "2", [2]],
        "round": [10**9, "0", {}],
        "seed": [10**4000, -5, 1.5, nested(900)],
        "seconds": ["1", None, nested(900)],
        "continue_from": [5, [1], "x" * 10**5],
        "name": [{"a": 1}, nested(900)],
        "run": ["../../x", "1" * 10**5, 7],
        "message": [nested(900), {"a": nested(900)}],
        "function": [7, "os:system", nested(900)],
        "arguments": [{"tensor": "0"}, {"list": [{"tensor": "0"}] * 10**4}, nested(900)],
    }
    for name, values in values_by_name.items():
        for value in values:
            yield {name: value}


LONG_SHAPES = [(0, 10**9), (10**12, 0), (3, 0, 10**12)]
KINDS_OF_REPLIES = ["handshake", "update", "tested", "result", "failed"]


@pytest.fixture(scope="module")
def asked_site(tmp_path_factory):
    """A site whose app leaves the numbers of sites and rounds to the server."""
    server = CuriousServer(tmp_path_factory.mktemp("site"), **EVALUATED_BY_ALL)
    server.site._size_of_app = {}
    return server


@pytest.mark.fast_rows
@pytest.mark.parametrize("kind", ["handshake", "test", "query", "train"])
def test_hostile_message_of_any_kind_is_answered_or_refused_at_once(asked_site, kind):
    packed, models = pack(((torch.stack([model_that_picks(3)]),), {}))
    tensors = {"start": model_that_picks(3), **models}
    query = {"function": SCORE_MODELS, "arguments": packed}

    for fields in hostile_fields():
        reply = asked_site.send(kind, tensors, **{**query, **fields})
        assert reply.kind in KINDS_OF_REPLIES
        json.dumps(reply.plain)  # raises an error if it is nested too deep

    for shape in LONG_SHAPES:
        long_tensors = {name: torch.empty(shape) for name in tensors}
        reply = asked_site.send(kind, long_tensors, **query)
        assert "has an empty tensor" in reply.plain["error"]


def test_coalitions_of_too_many_clients_are_refused_before_they_are_counted(asked_site):
    trained = torch.zeros(1, 10**5, dtype=torch.bool)
    packed, tensors = pack(((torch.zeros(1, 80), trained, torch.ones(10**5)), {}))
    reply = asked_site.send("query", tensors, function=SCORE_COALITIONS, arguments=packed)
    assert "coalitions of 100000 clients are to be scored" in reply.plain["error"]


def test_number_of_clients_times_rounds_is_bounded(asked_site):
    reply = asked_site.send("train", model=model_that_picks(3), clients=10**6, rounds=10**6)
    assert "expected a whole number from 1 to 10)" in reply.plain["error"]


def test_packet_and_its_value_are_not_larger_than_the_bytes_that_came():
    with pytest.raises(ValueError, match="but fewer entries in memory"):
        Packet("train", {}, {"start": torch.zeros(1).expand(10**9)})

    packed, tensors = pack([torch.zeros(3)])
    packed["list"] *= 2  # two names of one tensor
    with pytest.raises(ValueError, match="has not been made by `pack`"):
        unpack(packed, tensors)


def test_number_of_runs_whose_states_a_site_keeps_is_bounded(tmp_path, monkeypatch):
    monkeypatch.setattr(site_memory, "MAX_STORED_RUNS", 2)
    server = CuriousServer(tmp_path)  # has trained in a run
    train = partial(server.send, "train", model=model_that_picks(3), continue_from=None)

    assert train(run="2" * 16).kind == "update"
    with warns("refuses a new run, since it keeps the states of 2 runs, and keeps at most 2"):
        reply = train(run="3" * 16)

    assert "it keeps the states of 2 runs" in reply.plain["error"]
    assert train(round=1).kind == "update"  # of the first run


@pytest.mark.parametrize(
    ("options", "function", "arguments", "changes_state"),
    [
        (BY_LOSS, LOCAL_LOSS, [model_that_picks(3)], False),
        ({"personalizer": FedFomo()}, STARTED_FROM, [], False),
        ({"personalizer": FedFomo()}, MIX_MODELS, [[model_that_picks(3)], 80], True),
    ],
    ids=["loss", "start", "mixture"],
)
def test_only_a_request_that_changes_the_state_of_a_site_saves_another(
    tmp_path, options, function, arguments, changes_state
):
    server = CuriousServer(tmp_path, **options)
    packed, tensors = pack((arguments, {}))
    query = partial(server.send, "query", tensors, function=function, arguments=packed)

    states = {query(seconds=seconds).plain["state"] for seconds in (1, 2)}

    saved_states = SiteMemory(tmp_path, "1" * 16, client=0).load_all()
    if changes_state:
        assert len(states) == 2
        assert saved_states.keys() == {server.last_visit, *states}
    else:
        assert states == {server.last_visit}
        assert saved_states.keys() == states
