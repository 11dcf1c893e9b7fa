"""A site counts what it answers about its samples, each message once."""

import json
import math
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import count

import pytest
import torch
from torch import nn

from flsv import FederatedDataModule, FederatedLoop
from flsv.data import OneClient, Splits
from flsv.personalization import FedFomo
from flsv.sites import Packet, Site, SitePolicy, agreement
from flsv.sites.ledgers import ANSWERS_FILE
from flsv.sites.messages import pack
from helpers import warns
from helpers.curious_server import (
    BY_LOSS,
    BY_OTHERS,
    EVALUATED,
    EVALUATED_BY_CLIENTS,
    EVALUATED_BY_F1,
    LOCAL_LOSS,
    MANY,
    MIX_MODELS,
    NUM_CLASSES,
    NUM_SAMPLES,
    NUM_SITES,
    NUM_SIZES,
    REPEATED_ATTEMPTS,
    ROUNDS,
    SCORE_MODELS,
    CuriousServer,
    OneWeightPerSample,
    SiteData,
    accuracy_of,
    loss_of,
    make_data,
    make_rare_data,
    score_of_others,
)


def fields_of_another_run(number):
    """Return the fields of a message, as if it were of another round, client and run."""
    return {
        "round": number % ROUNDS,
        "client": number % NUM_SITES,
        "run": f"{number:016x}",
        "continue_from": None,
        "name": f"site {number}",
        "greeting": f"{number:016x}",
    }


def fields_of_the_run(server):
    """Return the fields of a message that continues from the site's last training."""
    return {"run": "1" * 16, "client": 0, "continue_from": server.last_visit}


def request_in_many_ways(server, request):
    """Return the responses to many messages that differ in all their fields."""
    responses = []
    for number in MANY:
        fields = fields_of_another_run(number)
        if request is score_of_others:
            fields |= fields_of_the_run(server)
        server.send("handshake", **fields)
        responses.append(request(server, number % NUM_SAMPLES, **fields))
    return [response for response in responses if response is not None]


@pytest.mark.fast_rows
@pytest.mark.parametrize(
    ("options", "send_request"), REPEATED_ATTEMPTS.values(), ids=REPEATED_ATTEMPTS
)
def test_all_responses_about_a_table_count_against_one_budget(tmp_path, options, send_request):
    max_answers = 20
    policy = SitePolicy(max_answers=max_answers)
    server = CuriousServer(tmp_path, policy, **options)

    with warns(f"answers at most {max_answers}. max_answers in its policy allows more"):
        responses = request_in_many_ways(server, send_request)

    num_responses = sum(torch.as_tensor(response).numel() for response in responses)
    assert 1 <= num_responses <= server.responded <= max_answers

    restarted_server = CuriousServer(tmp_path, policy, **options)
    request_again = partial(
        send_request, restarted_server, 39, round=1, continue_from=restarted_server.last_visit
    )
    assert request_again() is None
    assert restarted_server.responded == server.responded

    restarted_server.site.policy = SitePolicy(max_answers=2 * max_answers)
    assert request_again() is not None


#: Counts of classes by sites: of each class, and of the rare classes together.
COUNTS_PER_MODEL = NUM_CLASSES + 1
#: Of the coalitions of three clients, and of the samples themselves.
NUM_SCORED_MODELS = 2**NUM_SITES + 1
#: The number of times that a loop scores: before the run, or at its end, and in each round.
NUM_SCORINGS = ROUNDS + 1
#: Scores of a test: accuracy, balanced accuracy, AUROC.
NUM_TEST_SCORES = 3
COUNTS_OF_EVALUATORS = NUM_SCORINGS * NUM_SCORED_MODELS * COUNTS_PER_MODEL


@pytest.mark.parametrize(
    ("options", "numbers_of_run"),
    [
        ({}, 0),
        (EVALUATED, NUM_SCORINGS * NUM_TEST_SCORES),
        (BY_LOSS, NUM_SCORINGS),
        (BY_OTHERS, NUM_SCORINGS),
        (EVALUATED_BY_CLIENTS, COUNTS_OF_EVALUATORS + 2 * COUNTS_OF_EVALUATORS),
        (EVALUATED_BY_F1, NUM_SCORINGS * NUM_SCORED_MODELS),
    ],
    ids=["none", "tests", "losses", "others", "evaluators", "evaluators by F1"],
)
def test_default_budget_is_twice_what_the_loop_asks_whatever_the_server_says(
    tmp_path, options, numbers_of_run
):
    server = CuriousServer(tmp_path, **options)
    run = {"clients": 1000, "rounds": 1000}
    assert server.site._default_max_answers(run) == 2 * (NUM_SIZES + numbers_of_run)


def greet_with_rounds(folder, rounds):
    make_loop = partial(FederatedLoop, seed=1, **EVALUATED)
    site = Site(OneWeightPerSample, make_data, make_loop, folder)
    hello = {"agreement": agreement(OneWeightPerSample(), make_loop()), "client": 0, "clients": 3}
    return site.respond(Packet("handshake", {**hello, "rounds": rounds}))


def test_size_of_the_first_run_decides_the_default_budget(tmp_path):
    for rounds in (3, 1000):
        assert greet_with_rounds(tmp_path, rounds).kind == "handshake"

    book = json.loads((tmp_path / ANSWERS_FILE).read_text())
    assert book["run"] == {"clients": 3, "rounds": 3}


@pytest.mark.parametrize(
    "rounds", [-5, 0, math.nan, math.inf, 10**30, 1.0, True, "3", None], ids=repr
)
def test_greeting_of_a_number_of_rounds_that_no_run_has_decides_no_budget(tmp_path, rounds):
    reply = greet_with_rounds(tmp_path, rounds)

    assert reply.kind == "failed"
    assert "'rounds'" in reply.plain["error"]
    assert not (tmp_path / ANSWERS_FILE).exists()


def test_message_that_two_processes_get_at_once_is_answered_once(tmp_path, monkeypatch):
    make_scores = count(1)

    def score_slowly(site, packet, withheld, site_state):
        time.sleep(0.5)
        return Packet("tested", {"accuracy": next(make_scores) / 10})

    monkeypatch.setattr(Site, "_own_scores", score_slowly)
    first_server = CuriousServer(tmp_path, **EVALUATED)
    second_server = CuriousServer(tmp_path, greets=False, **EVALUATED)
    second_server.last_visit = first_server.last_visit
    num_responses = first_server.responded

    with ThreadPoolExecutor() as pool:
        answers = list(pool.map(accuracy_of, [first_server, second_server], [3, 3]))

    assert answers == [0.1, 0.1]
    assert first_server.responded == num_responses + NUM_TEST_SCORES


def test_message_to_train_that_two_processes_get_at_once_trains_once(tmp_path, monkeypatch):
    numbers_of_trainings = count(1)

    def train_slowly(site, packet, memory):
        time.sleep(0.5)
        return Packet("update", {"number": next(numbers_of_trainings)})

    def send_training(server):
        return server.send("train", model=server.untrained_model(), round=1)

    first_server = CuriousServer(tmp_path)
    second_server = CuriousServer(tmp_path, greets=False)
    second_server.last_visit = first_server.last_visit
    monkeypatch.setattr(Site, "_trained", train_slowly)

    with ThreadPoolExecutor() as pool:
        updates = list(pool.map(send_training, [first_server, second_server]))

    assert [update.plain["number"] for update in updates] == [1, 1]


def test_message_that_is_sent_again_is_answered_again_and_counts_once(tmp_path):
    server = CuriousServer(tmp_path, **BY_LOSS)
    response = loss_of(server, 3)
    num_responses = server.responded

    assert loss_of(server, 3) == response
    assert server.responded == num_responses
    assert loss_of(server, 4) is not None
    assert server.responded == num_responses + 1


class DataOfAnotherSizeForEachClient(FederatedDataModule):
    """A site that holds out another number of samples as each client."""

    def client_indices(self, client, split="train"):
        indices = super().client_indices(client, split)
        if split == "val":
            return indices[self.partitioner.first_client :]
        return indices


@pytest.fixture(params=[FederatedDataModule, DataOfAnotherSizeForEachClient])
def make_data_of_sizes(request):
    splits = Splits(server_val=0.0, client_val=0.25, client_test=0.25)
    return partial(request.param, SiteData(), OneClient(), splits=splits)


def test_sizes_under_each_client_id_count_whether_or_not_they_differ(tmp_path, make_data_of_sizes):
    policy = SitePolicy(max_answers=2 * NUM_SIZES)
    server = CuriousServer(tmp_path, policy, make_data_of_sizes)

    replies = [server.send("handshake", client=client) for client in range(NUM_SITES)]

    assert [reply.kind for reply in replies] == ["handshake", "handshake", "failed"]
    assert server.responded == 2 * NUM_SIZES


def test_site_without_numbers_left_trains_under_its_first_client_id_alone(
    tmp_path, make_data_of_sizes
):
    """An update tells the size of a split of the client id."""
    server = CuriousServer(tmp_path, SitePolicy(max_answers=NUM_SIZES), make_data_of_sizes)
    train = partial(server.send, "train", model=server.untrained_model(), continue_from=None)

    replies = [train(client=client, run=f"{client:016x}") for client in range(NUM_SITES)]

    assert [reply.kind for reply in replies] == ["update", "failed", "failed"]
    assert server.responded == NUM_SIZES


def loss_that_overflows(server, sample):
    """Request a loss that is out of range if a sample is of class 1, so that the site reports an error."""
    weights = torch.zeros(NUM_CLASSES, NUM_SAMPLES)
    weights[1, sample] = -3e38
    packed, tensors = pack(((weights.flatten(),), {}))
    return server.send("query", tensors, function=LOCAL_LOSS, arguments=packed)


@pytest.mark.slow
def test_failures_that_depend_on_samples_count_as_answers_and_have_one_text(tmp_path):
    server = CuriousServer(tmp_path, **BY_LOSS)

    replies = [loss_that_overflows(server, sample) for sample in range(4)]

    assert {reply.kind for reply in replies} == {"failed", "result"}
    assert server.responded == NUM_SIZES + 4
    errors = {reply.plain["error"] for reply in replies if reply.kind == "failed"}
    assert errors == {"it failed with an error; the site's own log has the details"}


def test_failures_and_successes_have_one_error_when_the_budget_is_spent(tmp_path):
    max_answers = NUM_SIZES + 1
    server = CuriousServer(tmp_path, SitePolicy(max_answers=max_answers), **BY_LOSS)
    loss_that_overflows(server, 0)

    replies = [loss_that_overflows(server, sample) for sample in range(1, 10)]

    errors = {reply.plain["error"] for reply in replies}
    answered = f"it has answered {max_answers} numbers about its samples"
    assert errors == {f"{answered}, and answers at most {max_answers}"}


@pytest.mark.parametrize("make_site_data", [make_rare_data, make_data], ids=["rare", "balanced"])
def test_request_for_no_scores_counts_since_its_refusal_tells_of_a_rare_class(
    tmp_path, make_site_data
):
    server = CuriousServer(tmp_path, data=make_site_data, **EVALUATED_BY_F1)
    no_models = torch.zeros(0, len(server.untrained_model()))

    server.request(SCORE_MODELS, no_models, "f1")

    assert server.responded == NUM_SIZES + 1


@pytest.mark.slow
def test_repeated_message_has_the_same_failure_and_counts_once(tmp_path):
    server = CuriousServer(tmp_path, **BY_LOSS)
    for sample in range(4):
        reply = loss_that_overflows(server, sample)
        repeated_reply = loss_that_overflows(server, sample)
        assert dict(repeated_reply.plain) == dict(reply.plain)

    assert server.responded == NUM_SIZES + 4


def test_site_that_may_answer_nothing_trains(tmp_path):
    server = CuriousServer(tmp_path, SitePolicy(max_answers=0), **EVALUATED)

    assert server.greeting.kind == "handshake"
    assert server.last_visit is not None
    assert accuracy_of(server, 3) is None


class MomentumModule(OneWeightPerSample):
    """Its bias is trained, so that the loss of held-out samples depends on the optimizer's state."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(NUM_SAMPLES, NUM_CLASSES)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


class ServerThatTrainsAgain(CuriousServer):
    """Lets a site train rounds again, also from states that the site has deleted."""

    make_module = MomentumModule

    def train(self, index, earlier_state):
        model = self.untrained_model()
        reply = self.send("train", model=model, round=index, continue_from=earlier_state)
        return reply.plain["state"]

    def weigh(self, state):
        """Return the site's weights of its own and another model, by their losses."""
        model = torch.linspace(-1, 1, len(self.untrained_model()))
        return self.request(
            MIX_MODELS, [model], len(model), "negative_loss", round=1, continue_from=state
        )


def test_message_has_one_response_although_an_earlier_state_is_gone(tmp_path):
    server = ServerThatTrainsAgain(tmp_path, personalizer=FedFomo(), optimizer_state="persist")
    first_state = server.last_visit
    state = server.train(1, first_state)
    response = server.weigh(state)
    num_responses = server.responded

    server.train(2, state)
    # The first state is deleted. A training without it has the same name.
    assert server.train(1, first_state) == state

    assert torch.equal(server.weigh(state), response)
    assert server.responded == num_responses


def test_training_that_is_sent_again_keeps_the_states_of_later_requests(tmp_path):
    server = ServerThatTrainsAgain(tmp_path, personalizer=FedFomo(), optimizer_state="persist")
    first_state = server.last_visit
    state = server.train(1, first_state)
    server.weigh(state)
    (path,) = tmp_path.rglob("state.pt")
    states = torch.load(path, weights_only=True).keys()

    (stored_update,) = tmp_path.rglob("update-*.pt")
    stored_update.unlink()  # a site is killed before it has stored it
    server.train(1, first_state)

    assert torch.load(path, weights_only=True).keys() == states
