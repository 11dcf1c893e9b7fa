"""A curious server knows a site's inputs, and asks for labels, rows and memberships beyond what the loop asks."""

import hashlib
import json
from functools import partial

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
from flsv.sampling import PowerOfChoice
from flsv.sites import Packet, Site, SitePolicy, agreement
from flsv.sites.ledgers import BUDGET_FILE
from flsv.sites.messages import pack, unpack
from helpers import warns

NUM_SAMPLES = 40
NUM_CLASSES = 2
ROUNDS = 3
LABELS = torch.arange(NUM_SAMPLES) % NUM_CLASSES
NUM_SITES = 3
MANY = range(30)
EVALUATED = {"evaluation": ClientEvaluation(every=1)}
LOCAL_LOSS = "flsv.sampling.power_of_choice:local_loss"
LEAVE_SELF_OUT = "flsv.metrics.contribution_estimation:leave_self_out"
SCORE_MODELS = "flsv.games.client_evaluation:score_models"
SCORE_COALITIONS = "flsv.games.client_evaluation:score_coalitions"
EVALUATED_BY_CLIENTS = {"metrics": {"sv": PartialFederatedShapley(evaluators="clients")}}
BY_LOSS = {"sampler": PowerOfChoice(2, NUM_SITES)}
BY_OTHERS = {"metrics": {"fedce": ContributionEstimation()}}
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
    def train_dataloader(self):
        return DataLoader(TensorDataset(torch.eye(NUM_SAMPLES), LABELS), batch_size=8)


def make_data():
    splits = Splits(server_val=0.0, client_val=0.25, client_test=0.25)
    return FederatedDataModule(SiteData(), OneClient(), splits=splits)


def model_that_picks(sample):
    """A model that gives class 1 to one sample, and class 0 to all others."""
    weights = torch.zeros(NUM_CLASSES, NUM_SAMPLES)
    weights[0] = 1.0
    if sample is not None:
        weights[1, sample] = 2.0
    return weights.flatten()


class CuriousServer:
    """It has greeted a site, and let it train in the first round. The site's app knows the run's size."""

    def __init__(self, folder, policy=None, data=make_data, rounds=ROUNDS, **options):
        all_options = {"aggregator": FedAvg(), "seed": 1}
        all_options |= options
        make_loop = partial(FederatedLoop, **all_options)
        self.folder = folder
        self.site = Site(
            OneWeightPerSample,
            data,
            make_loop,
            folder,
            policy=policy,
            run_size={"clients": NUM_SITES, "rounds": rounds},
        )
        self.agreement = agreement(OneWeightPerSample(), make_loop())
        self.last_visit: str | None = None
        self.greeting = self.send("handshake")
        update = self.send("train", model=model_that_picks(None))
        self.last_visit = update.plain["state"]

    def send(
        self,
        kind,
        tensors=None,
        model=None,
        **fields,
    ):
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
        book = json.loads((self.folder / BUDGET_FILE).read_text())
        return sum(book["answers"].values())

    def test(self, sample, **fields):
        """The accuracy of a model that picks a sample, None if it is not told."""
        model = model_that_picks(sample)
        reply = self.send("test", model=model, **fields)
        return reply.plain.get("accuracy")

    def request(self, function, *arguments, **fields):
        packed, tensors = pack((arguments, {}))
        fields = {"function": function, "arguments": packed, **fields}
        reply = self.send("query", tensors, **fields)
        if reply.kind == "failed":
            return None
        return unpack(reply.plain["result"], reply.tensors)


def score_of_others(server, sample, score="accuracy", **fields):
    # A site's own weight of 0 leaves the aggregate as the server has made it.
    model = model_that_picks(sample)
    return server.request(LEAVE_SELF_OUT, model, 0.0, score, **fields)


def loss_of(server, sample, **fields):
    return server.request(LOCAL_LOSS, model_that_picks(sample), **fields)


def score_models(server, samples, *arguments, **fields):
    models = torch.stack([model_that_picks(sample) for sample in samples])
    return server.request(SCORE_MODELS, models, *arguments, **fields)


def score_other_coalitions(server):
    """Of as many clients as the server likes."""
    num_clients = 6
    trained = torch.eye(num_clients, dtype=torch.bool)
    models = torch.stack([model_that_picks(sample) for sample in range(num_clients)])
    return server.request(SCORE_COALITIONS, models, trained, torch.ones(num_clients))


#: Fields of messages about rounds, clients and classes that the run does not have.
OUTSIDE_OF_THE_RUN = [
    {"round": ROUNDS + 1},
    {"round": 77},
    {"round": 123_456},
    {"round": -5},
    {"round": True},
    {"round": 1.0},
    {"round": 77, "rounds": 100},
    {"client": True},
    {"client": NUM_SITES},
    {"client": 7, "clients": 8},
    {"classes": 0},
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
    """A model that answers with a class always has that class's share as its accuracy, counts hide it."""
    return [score_models(server, [None], score) for score in ("accuracy", "negative_loss")]


def members_by_hashes(server):
    guess = make_data()
    guess.set_up_site(0)
    hash_of_guess = sample_hashes(guess)["0"]
    guesses = [hash_of_guess, hashlib.sha256(hash_of_guess.encode()).hexdigest()]
    contents = server.greeting.plain["contents"]
    return [guess if guess[:16] in contents else None for guess in guesses]


def rows_by_other_functions(server):
    """By functions that the loop does not request, and by that for the model that the site started from."""
    functions = [STARTED_FROM, "builtins:vars", "torch:save", "flsv.core.responses:range_of_score"]
    return [server.request(function) for function in functions]


def rows_by_errors(server):
    replies = [
        server.send("train", model=torch.zeros(3)),
        server.send("train", model=model_that_picks(None), classes=1),
        server.send("test", model=torch.zeros(3), round=1),
    ]
    texts = [str(reply.plain.get("error")) for reply in replies]
    return [text if "tensor" in text else None for text in texts]


REFUSED_ATTEMPTS = {
    "tests outside of the run": (EVALUATED, partial(outside_of_the_run, CuriousServer.test)),
    "losses outside of the run": (BY_LOSS, partial(outside_of_the_run, loss_of)),
    "trainings outside of the run": ({}, train_outside_of_the_run),
    "tests without evaluation": ({}, lambda server: [server.test(3)]),
    "scores of models without client-side evaluation": (
        EVALUATED,
        lambda server: [score_models(server, [3])],
    ),
    "620 models": (EVALUATED_BY_CLIENTS, lambda server: [score_models(server, [None, *MANY] * 20)]),
    "more models than coalitions": (
        EVALUATED_BY_CLIENTS,
        lambda server: [score_models(server, range(9))],
    ),
    "coalitions of more clients": (
        EVALUATED_BY_CLIENTS,
        lambda server: [score_other_coalitions(server)],
    ),
    "scores by more classes": (
        EVALUATED_BY_CLIENTS,
        lambda server: [score_models(server, range(8), classes=20)],
    ),
    "rare classes": (EVALUATED_BY_CLIENTS, rare_classes_by_accuracy),
    "other scores": (BY_OTHERS, other_scores),
    "hashes": (EVALUATED, members_by_hashes),
    "other functions": ({}, rows_by_other_functions),
    "errors": (EVALUATED, rows_by_errors),
}


@pytest.mark.fast_rows
@pytest.mark.parametrize(("options", "attempt"), REFUSED_ATTEMPTS.values(), ids=REFUSED_ATTEMPTS)
def test_curious_server_is_told_nothing_that_the_run_does_not_ask(tmp_path, options, attempt):
    server = CuriousServer(tmp_path, **options)
    responses = attempt(server)
    assert responses == [None] * len(responses)


#: How a server asks once more, each time otherwise: in other rounds, runs, as other clients, of other models.
REPEATED_ATTEMPTS = {
    "tests": (EVALUATED, CuriousServer.test),
    "losses": (BY_LOSS, loss_of),
    "scores of the others": (BY_OTHERS, score_of_others),
    "scores of models": (
        EVALUATED_BY_CLIENTS,
        lambda server, sample, **fields: score_models(server, [sample], **fields),
    ),
}


def request_in_many_ways(server, request):
    """Return the responses to many messages, by their numbers."""
    responses = {}
    for number in MANY:
        fields = {
            "round": number % ROUNDS,
            "client": number % NUM_SITES,
            "run": f"{number:016x}",
            "continue_from": None,
            "name": f"site {number}",
            "greeting": f"{number:016x}",
        }
        if request is score_of_others:  # about what the site has sent
            fields |= {"run": "1" * 16, "client": 0, "continue_from": server.last_visit}
        server.send("handshake", **fields)
        response = request(server, number % NUM_SAMPLES, **fields)
        if response is not None:
            responses[number] = response
    return responses


@pytest.mark.parametrize(
    ("options", "send_request"), REPEATED_ATTEMPTS.values(), ids=REPEATED_ATTEMPTS
)
def test_all_responses_about_a_table_count_against_one_budget(tmp_path, options, send_request):
    max_answers = 20
    policy = SitePolicy(max_answers=max_answers)
    server = CuriousServer(tmp_path, policy, **options)

    with warns(f"answers at most {max_answers}. max_answers in its policy allows more"):
        responses = request_in_many_ways(server, send_request)

    num_responses = sum(torch.as_tensor(response).numel() for response in responses.values())
    assert 1 <= num_responses <= server.responded <= max_answers

    restarted_server = CuriousServer(tmp_path, policy, **options)
    assert (
        send_request(restarted_server, 39, round=1, continue_from=restarted_server.last_visit)
        is None
    )
    assert restarted_server.responded == server.responded

    restarted_server.site.policy = SitePolicy(max_answers=2 * max_answers)
    assert (
        send_request(restarted_server, 39, round=1, continue_from=restarted_server.last_visit)
        is not None
    )


@pytest.mark.parametrize(
    ("options", "numbers_of_run"),
    [
        ({}, 0),
        (EVALUATED, 3 * 4),  # three scores in each round, and at the end
        (BY_LOSS, 4),  # before the run, too
        (BY_OTHERS, 4),
        # The counts of eight coalitions' models and of the samples, of two classes and of the rare ones.
        (EVALUATED_BY_CLIENTS, 4 * (1 + 8) * 3 + 4 * 2 * (1 + 8) * 3),
    ],
    ids=["none", "tests", "losses", "others", "evaluators"],
)
def test_default_budget_is_twice_what_the_loop_asks_whatever_the_server_says(
    tmp_path, options, numbers_of_run
):
    server = CuriousServer(tmp_path, **options)
    num_sizes = 3
    run = {"clients": 1000, "rounds": 1000}
    assert server.site._default_max_answers(run) == 2 * (num_sizes + numbers_of_run)


def test_size_of_the_first_run_decides_the_default_of_an_app_that_does_not_know_it(tmp_path):
    make_loop = partial(FederatedLoop, seed=1, **EVALUATED)
    site = Site(OneWeightPerSample, make_data, make_loop, tmp_path)
    hello = {"agreement": agreement(OneWeightPerSample(), make_loop()), "client": 0, "clients": 3}
    for rounds in (3, 1000):
        assert site.respond(Packet("handshake", {**hello, "rounds": rounds})).kind == "handshake"

    book = json.loads((tmp_path / BUDGET_FILE).read_text())
    assert book["run"] == {"clients": 3, "rounds": 3}


def test_message_that_is_sent_again_is_answered_again_and_counts_once(tmp_path):
    server = CuriousServer(tmp_path, **BY_LOSS)
    response = loss_of(server, 3)
    num_responses = server.responded

    assert loss_of(server, 3) == response
    assert server.responded == num_responses
    assert loss_of(server, 4) is not None
    assert server.responded == num_responses + 1


def sizes_in_greetings(server):
    """The sizes of held-out splits, of which a site takes others as another client."""
    replies = [server.send("handshake", client=client) for client in range(NUM_SITES)]
    return [reply.plain["sizes"] for reply in replies if reply.kind == "handshake"]


class DataOfEachClient(FederatedDataModule):
    """A site that holds out another number of samples as each client."""

    def client_indices(self, client, split="train"):
        indices = super().client_indices(client, split)
        return indices[self.partitioner.first_client :] if split == "val" else indices


def test_sizes_under_another_number_count_if_they_differ(tmp_path):
    splits = Splits(server_val=0.0, client_val=0.25, client_test=0.25)
    data = partial(DataOfEachClient, SiteData(), OneClient(), splits=splits)

    server = CuriousServer(tmp_path, SitePolicy(max_answers=6), data)
    sizes = sizes_in_greetings(server)

    assert [split_sizes["val"] for split_sizes in sizes] == [10, 9]
    assert server.responded == 6

    usual_server = CuriousServer(tmp_path / "usual", SitePolicy(max_answers=3))
    assert len(sizes_in_greetings(usual_server)) == 3


def test_loss_has_three_digits_which_cannot_hold_all_labels(tmp_path):
    server = CuriousServer(tmp_path, **BY_LOSS)
    powers = 2.0 ** torch.arange(-4, NUM_SAMPLES - 4)
    weights = torch.stack([torch.zeros(NUM_SAMPLES), powers])
    # With all digits the loss would be a binary number of labels.
    loss = server.request(LOCAL_LOSS, weights.flatten())

    assert loss == float(f"{loss:.3g}")


@pytest.mark.fast_rows
@pytest.mark.parametrize(
    ("options", "send_request"),
    [
        (EVALUATED, CuriousServer.test),
        (BY_OTHERS, score_of_others),
        (EVALUATED_BY_CLIENTS, REPEATED_ATTEMPTS["scores of models"][1]),
    ],
    ids=["test", "others", "scores of models"],
)
def test_site_tells_no_score_of_fewer_than_five_samples(tmp_path, options, send_request):
    def make_small_data():
        splits = Splits(server_val=0.0, client_val=0.1, client_test=0.1)  # four samples
        return FederatedDataModule(SiteData(), OneClient(), splits=splits)

    server = CuriousServer(tmp_path, data=make_small_data, **options)
    assert send_request(server, 3) is None


def test_site_tells_no_score_of_classes_if_one_has_fewer_than_five_samples(tmp_path):
    """It tells the accuracy of all samples alone."""

    class RareClass(SiteData):
        def train_dataloader(self):
            labels = (torch.arange(NUM_SAMPLES) % 5 == 0).long()  # 8 of 40
            return DataLoader(TensorDataset(torch.eye(NUM_SAMPLES), labels), batch_size=8)

    def make_rare_data():
        splits = Splits(server_val=0.0, client_val=0.25, client_test=0.25)
        return FederatedDataModule(RareClass(), OneClient(), splits=splits)

    reply = CuriousServer(tmp_path / "a", data=make_rare_data, **EVALUATED).send(
        "test", model=model_that_picks(3)
    )
    assert reply.plain["withheld"] == ["balanced_accuracy", "auroc"]
    assert reply.plain["accuracy"] == reply.plain["accuracy"]
    assert reply.plain["auroc"] != reply.plain["auroc"]

    options = {"metrics": {"fedce": ContributionEstimation(performance="balanced_accuracy")}}
    server = CuriousServer(tmp_path / "b", data=make_rare_data, **options)
    assert score_of_others(server, 3, "balanced_accuracy") is None
