"""A curious server knows a site's inputs, and asks for labels, rows and memberships beyond what the loop asks."""

import hashlib
import json
import math
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import count

import lightning as L
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from flsv import ClientEvaluation, FederatedDataModule, FederatedLoop
from flsv.aggregation import FedAvg
from flsv.configuration.identity import sample_hashes
from flsv.data import OneClient, Splits
from flsv.metrics import ContributionEstimation, PartialFederatedShapley
from flsv.personalization import FedFomo
from flsv.sampling import PowerOfChoice
from flsv.sites import Packet, Site, SitePolicy, agreement
from flsv.sites.ledgers import ANSWERS_FILE
from flsv.sites.messages import pack, unpack
from helpers import warns

NUM_SAMPLES = 40
NUM_CLASSES = 2
ROUNDS = 3
LABELS = torch.arange(NUM_SAMPLES) % NUM_CLASSES
NUM_SITES = 3
#: Sizes in a greeting: of the training, validation and test samples.
NUM_SIZES = 3
MANY = range(30)
EVALUATED = {"evaluation": ClientEvaluation(every=1)}
LOCAL_LOSS = "flsv.sampling.power_of_choice:local_loss"
LEAVE_SELF_OUT = "flsv.metrics.contribution_estimation:leave_self_out"
SCORE_MODELS = "flsv.games.client_evaluation:score_models"
SCORE_COALITIONS = "flsv.games.client_evaluation:score_coalitions"
EVALUATED_BY_CLIENTS = {"metrics": {"sv": PartialFederatedShapley(evaluators="clients")}}
EVALUATED_BY_F1 = {
    "metrics": {"sv": PartialFederatedShapley(evaluators="clients", performance="f1")}
}
BY_LOSS = {"sampler": PowerOfChoice(2, NUM_SITES)}
BY_OTHERS = {"metrics": {"fedce": ContributionEstimation()}}
MIX_MODELS = "flsv.personalization.fedfomo:mix_models"
STARTED_FROM = "flsv.core.round:started_from"


class OneWeightPerSample(L.LightningModule):
    """Its prediction of each sample is a weight of its own, so that a server can set each prediction."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(NUM_SAMPLES, NUM_CLASSES, bias=False)

    def forward(self, inputs):
        return self.linear(inputs)

    def training_step(self, batch, batch_idx):
        inputs, labels = batch
        return nn.functional.cross_entropy(self(inputs), labels)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


class SiteData(L.LightningDataModule):
    """A site's table, whose inputs the server knows."""

    def __init__(self, labels=LABELS):
        super().__init__()
        self.labels = labels

    def train_dataloader(self):
        return DataLoader(TensorDataset(torch.eye(NUM_SAMPLES), self.labels), batch_size=8)


def make_data(labels=LABELS, held_out=0.25):
    splits = Splits(server_val=0.0, client_val=held_out, client_test=held_out)
    return FederatedDataModule(SiteData(labels), OneClient(), splits=splits)


def model_that_picks(sample):
    """A model that gives class 1 to one sample, and class 0 to all others."""
    weights = torch.zeros(NUM_CLASSES, NUM_SAMPLES)
    weights[0] = 1.0
    if sample is not None:
        weights[1, sample] = 2.0
    return weights.flatten()


class CuriousServer:
    """A server that has greeted a site, and has let it train in round 0. The site's app knows the run's size."""

    make_module = OneWeightPerSample

    def __init__(self, folder, policy=None, data=make_data, rounds=ROUNDS, greets=True, **options):
        all_options = {"aggregator": FedAvg(), "seed": 1}
        all_options |= options
        make_loop = partial(FederatedLoop, **all_options)
        self.folder = folder
        self.site = Site(
            self.make_module,
            data,
            make_loop,
            folder,
            policy=policy,
            run_size={"clients": NUM_SITES, "rounds": rounds},
        )
        self.agreement = agreement(self.make_module(), make_loop())
        self.last_visit: str | None = None
        if greets:
            self.greeting = self.send("handshake")
            update = self.send("train", model=self.untrained_model())
            self.last_visit = update.plain["state"]

    def untrained_model(self):
        return torch.zeros(sum(weights.numel() for weights in self.make_module().parameters()))

    def send(self, kind, tensors=None, model=None, **fields):
        plain = {
            "agreement": self.agreement,
            "run": "1" * 16,
            "client": 0,
            "clients": NUM_SITES,
            "name": "Boston",
            "classes": NUM_CLASSES,
            "rounds": ROUNDS,
            "round": 0,
            "seed": 1,
            "continue_from": self.last_visit,
            **fields,
        }
        sent_tensors = dict(tensors or {})
        if model is not None:
            sent_tensors["start"] = model
        return self.site.respond(Packet(kind, plain, sent_tensors))

    @property
    def responded(self):
        """How many numbers the site says it has answered."""
        book = json.loads((self.folder / ANSWERS_FILE).read_text())
        return sum(book["answers"].values())

    def request(self, function, *arguments, **fields):
        """Return the result of a function at the site. None: it is refused."""
        packed, tensors = pack((arguments, {}))
        fields = {"function": function, "arguments": packed, **fields}
        reply = self.send("query", tensors, **fields)
        if reply.kind == "failed":
            return None
        return unpack(reply.plain["result"], reply.tensors)


def accuracy_of(server, sample, **fields):
    """Return the accuracy of a model that picks a sample. None: the site does not tell it."""
    reply = server.send("test", model=model_that_picks(sample), **fields)
    return reply.plain.get("accuracy")


def score_of_others(server, sample, score="accuracy", **fields):
    # If the site's own weight is 0, its part of the aggregate is nothing.
    own_weight = 0.0
    return server.request(LEAVE_SELF_OUT, model_that_picks(sample), own_weight, score, **fields)


def loss_of(server, sample, **fields):
    return server.request(LOCAL_LOSS, model_that_picks(sample), **fields)


def score_models(server, samples, *arguments, **fields):
    models = torch.stack([model_that_picks(sample) for sample in samples])
    return server.request(SCORE_MODELS, models, *arguments, **fields)


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


def test_error_at_a_site_is_sent_without_its_words(tmp_path):
    server = CuriousServer(tmp_path, **EVALUATED)
    replies = [
        server.send("train", model=torch.zeros(3)),
        server.send("train", model=model_that_picks(None), classes=1),
        server.send("test", model=torch.zeros(3), round=1),
    ]
    for reply in replies:
        assert "tensor" not in str(reply.plain.get("error"))


#: Requests that a server repeats: in other rounds and runs, as other clients, and of other models.
REPEATED_ATTEMPTS = {
    "tests": (EVALUATED, accuracy_of),
    "losses": (BY_LOSS, loss_of),
    "scores of the others": (BY_OTHERS, score_of_others),
    "scores of models": (
        EVALUATED_BY_CLIENTS,
        lambda server, sample, **fields: score_models(server, [sample], **fields),
    ),
}


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


def test_size_of_the_first_run_decides_the_default_budget(tmp_path):
    make_loop = partial(FederatedLoop, seed=1, **EVALUATED)
    site = Site(OneWeightPerSample, make_data, make_loop, tmp_path)
    hello = {"agreement": agreement(OneWeightPerSample(), make_loop()), "client": 0, "clients": 3}
    for rounds in (3, 1000):
        assert site.respond(Packet("handshake", {**hello, "rounds": rounds})).kind == "handshake"

    book = json.loads((tmp_path / ANSWERS_FILE).read_text())
    assert book["run"] == {"clients": 3, "rounds": 3}


@pytest.mark.parametrize(
    "rounds", [-5, 0, math.nan, math.inf, 10**30, 1.0, True, "3", None], ids=repr
)
def test_greeting_of_a_number_of_rounds_that_no_run_has_decides_no_budget(tmp_path, rounds):
    make_loop = partial(FederatedLoop, seed=1, **EVALUATED)
    site = Site(OneWeightPerSample, make_data, make_loop, tmp_path)
    hello = {"agreement": agreement(OneWeightPerSample(), make_loop()), "client": 0, "clients": 3}

    reply = site.respond(Packet("handshake", {**hello, "rounds": rounds}))

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


@pytest.mark.parametrize("data_class", [FederatedDataModule, DataOfAnotherSizeForEachClient])
def test_sizes_under_each_client_id_count_whether_or_not_they_differ(tmp_path, data_class):
    splits = Splits(server_val=0.0, client_val=0.25, client_test=0.25)
    data = partial(data_class, SiteData(), OneClient(), splits=splits)
    server = CuriousServer(tmp_path, SitePolicy(max_answers=2 * NUM_SIZES), data)

    replies = [server.send("handshake", client=client) for client in range(NUM_SITES)]

    assert [reply.kind for reply in replies] == ["handshake", "handshake", "failed"]
    assert server.responded == 2 * NUM_SIZES


@pytest.mark.parametrize("data_class", [FederatedDataModule, DataOfAnotherSizeForEachClient])
def test_site_without_numbers_left_trains_under_its_first_client_id_alone(tmp_path, data_class):
    """An update tells the size of a split of the client id."""
    splits = Splits(server_val=0.0, client_val=0.25, client_test=0.25)
    data = partial(data_class, SiteData(), OneClient(), splits=splits)
    server = CuriousServer(tmp_path, SitePolicy(max_answers=NUM_SIZES), data)
    train = partial(server.send, "train", model=server.untrained_model(), continue_from=None)

    replies = [train(client=client, run=f"{client:016x}") for client in range(NUM_SITES)]

    assert [reply.kind for reply in replies] == ["update", "failed", "failed"]
    assert server.responded == NUM_SIZES


def test_loss_has_three_digits_which_cannot_hold_all_labels(tmp_path):
    server = CuriousServer(tmp_path, **BY_LOSS)
    # By all its digits, the loss would be a binary number whose digits are the labels.
    powers_of_two = 2.0 ** torch.arange(-4, NUM_SAMPLES - 4)
    weights = torch.stack([torch.zeros(NUM_SAMPLES), powers_of_two])

    loss = server.request(LOCAL_LOSS, weights.flatten())

    assert loss == float(f"{loss:.3g}")


@pytest.mark.fast_rows
@pytest.mark.parametrize("name", ["tests", "scores of the others", "scores of models"])
def test_site_tells_no_score_of_fewer_than_five_samples(tmp_path, name):
    options, send_request = REPEATED_ATTEMPTS[name]
    four_samples = 4 / NUM_SAMPLES
    server = CuriousServer(tmp_path, data=partial(make_data, held_out=four_samples), **options)
    assert send_request(server, 3) is None


#: Of the 10 held-out samples, fewer than five are of class 1.
LABELS_WITH_A_RARE_CLASS = (torch.arange(NUM_SAMPLES) % 5 == 0).long()
make_rare_data = partial(make_data, LABELS_WITH_A_RARE_CLASS)


def test_site_tells_the_accuracy_alone_if_a_class_has_fewer_than_five_samples(tmp_path):
    server = CuriousServer(tmp_path, data=make_rare_data, **EVALUATED)
    reply = server.send("test", model=model_that_picks(3))

    assert reply.plain["withheld"] == ["balanced_accuracy", "auroc"]
    assert 0 <= reply.plain["accuracy"] <= 1
    assert math.isnan(reply.plain["auroc"])


def test_site_tells_no_score_of_the_others_by_classes_if_one_is_rare(tmp_path):
    metric = ContributionEstimation(performance="balanced_accuracy")
    server = CuriousServer(tmp_path, data=make_rare_data, metrics={"fedce": metric})
    assert score_of_others(server, 3, "balanced_accuracy") is None


class FloatLabels(OneWeightPerSample):
    """Its labels are numbers with a point, which may be values to predict, so that the site knows no classes."""

    def training_step(self, batch, batch_idx):
        inputs, labels = batch
        return super().training_step((inputs, labels.long()), batch_idx)


class FloatLabelsServer(CuriousServer):
    make_module = FloatLabels


def test_site_that_does_not_know_its_classes_tells_no_score_of_classes(tmp_path):
    data = partial(make_data, LABELS_WITH_A_RARE_CLASS.float())
    server = FloatLabelsServer(tmp_path, data=data, **EVALUATED)

    reply = server.send("test", model=model_that_picks(3))

    assert reply.plain["withheld"] == ["balanced_accuracy", "auroc"]
    assert reply.plain["auroc"] != reply.plain["auroc"]


def test_size_of_a_rare_class_is_not_the_difference_of_reported_sizes(tmp_path):
    server = CuriousServer(tmp_path, data=make_rare_data, **EVALUATED_BY_CLIENTS)
    class_sizes, _ = score_models(server, [None])

    assert server.greeting.plain["sizes"]["val"] == 10
    # Otherwise the rare class's size would be the difference to the sum.
    assert class_sizes.tolist() == [0, 0, 0]


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


def loss_that_overflows(server, sample):
    """Request a loss that is out of range if a sample is of class 1, so that the site reports an error."""
    weights = torch.zeros(NUM_CLASSES, NUM_SAMPLES)
    weights[1, sample] = -3e38
    packed, tensors = pack(((weights.flatten(),), {}))
    return server.send("query", tensors, function=LOCAL_LOSS, arguments=packed)


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
