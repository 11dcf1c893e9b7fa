"""A curious server knows a site's inputs, and asks for labels, rows and memberships beyond what the loop asks."""

import hashlib
from collections.abc import Iterator
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
from flsv.engines.remote import Packet, Site, agreement
from flsv.engines.remote.messages import pack, unpack
from flsv.metrics import ContributionEstimation
from flsv.sampling import PowerOfChoice, UniformSampler

NUM_SAMPLES = 40
NUM_CLASSES = 2
ROUNDS = 3
LABELS = torch.arange(NUM_SAMPLES) % NUM_CLASSES
GUESSES = range(10)
EVALUATED = {"evaluation": ClientEvaluation(every=1)}
LOCAL_LOSS = "flsv.sampling.power_of_choice:local_loss"
LEAVE_SELF_OUT = "flsv.metrics.contribution_estimation:leave_self_out"
JUDGE = "flsv.games.judges:judge"
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
    """It has greeted a site, and let it train in the first round."""

    def __init__(self, folder, **options):
        all_options = {"aggregator": FedAvg(), "seed": 1}
        all_options |= options
        make_loop = partial(FederatedLoop, **all_options)
        self.site = Site(OneWeightPerSample, make_data, make_loop, folder)
        self.agreement = agreement(OneWeightPerSample(), make_loop())
        self.last_visit: str | None = None
        self.greeting = self.send("hello")
        update = self.send("train", model=model_that_picks(None))
        self.last_visit = update.plain["visit"]

    def send(
        self,
        kind,
        tensors=None,
        model=None,
        **fields,
    ):
        plain = {
            "agreement": self.agreement,
            "greeting": "0" * 16,
            "run": "1" * 16,
            "client": 0,
            "clients": 3,
            "name": "Boston",
            "classes": NUM_CLASSES,
            "rounds": ROUNDS,
            "round": 0,
            "seed": 1,
            "counted": self.last_visit,
            **fields,
        }
        sent_tensors = dict(tensors or {})
        if model is not None:
            sent_tensors["start"] = model
        return self.site.answer(Packet(kind, plain, sent_tensors))

    def test(self, sample, **fields):
        """The accuracy of a model that picks a sample, None if it is not told."""
        model = model_that_picks(sample)
        reply = self.send("test", model=model, **fields)
        return reply.plain.get("accuracy")

    def ask(self, question, *arguments, **fields):
        packed, tensors = pack((arguments, {}))
        fields = {"question": question, "arguments": packed, **fields}
        reply = self.send("ask", tensors, **fields)
        if reply.kind == "failed":
            return None
        return unpack(reply.plain["answer"], reply.tensors)


def score_of_others(server, sample):
    # A site's own weight of 0 leaves the aggregate as the server has made it.
    model = model_that_picks(sample)
    return server.ask(LEAVE_SELF_OUT, model, 0.0, "accuracy")


def loss_of(server, sample):
    return server.ask(LOCAL_LOSS, model_that_picks(sample))


def differences(ask):
    """Labels, or members, by the answers about a model that picks nothing, and about others that pick a sample."""
    reference = ask(None)
    answers = [ask(sample) for sample in GUESSES]
    if reference is None:
        return []
    return [answer > reference for answer in answers if answer is not None]


def labels_by_judging(server):
    models = [model_that_picks(sample) for sample in GUESSES]
    answer = server.ask(JUDGE, torch.stack(models))
    return [] if answer is None else answer.tolist()


def splits_by_other_greetings(server):
    replies = [
        server.send("hello", client=1),
        server.send("hello", client=2),
        server.send("hello", clients=9),
        server.send("hello", name="Lyon"),
    ]
    return [reply.plain for reply in replies if reply.kind != "failed"]


def members_by_hashes(server):
    guess = make_data()
    guess.deal_from(0)
    hash_of_guess = sample_hashes(guess)["0"]
    guesses = [hash_of_guess, hashlib.sha256(hash_of_guess.encode()).hexdigest()]
    return [guess for guess in guesses if guess[:16] in server.greeting.plain["contents"]]


def rows_by_other_functions(server):
    """By functions that are no questions of the loop, and by that for the model that the site started from."""
    questions = [STARTED_FROM, "builtins:vars", "torch:save", "flsv.core.answers:range_of_score"]
    answers = [server.ask(question) for question in questions]
    return [answer for answer in answers if answer is not None]


def rows_by_errors(server):
    replies = [
        server.send("train", model=torch.zeros(3)),
        server.send("train", model=model_that_picks(None), classes=1),
        server.send("test", model=torch.zeros(3), round=1),
    ]
    texts = [str(reply.plain.get("error")) for reply in replies]
    return [text for text in texts if "tensor" in text]


def labels_by_tests(server, **fields):
    """By the accuracy of models that pick a sample, with these fields, each a value or all values in turn."""

    def test(sample):
        values = {}
        for name, value in fields.items():
            values[name] = next(value) if isinstance(value, Iterator) else value
        return server.test(sample, **values)

    return differences(test)


def labels_by_tests_without_training(server):
    server.test(None)
    return labels_by_tests(server, round=2)


def labels_by_tests_of_other_runs(server):
    runs = (f"{number:016x}" for number in range(100))
    return labels_by_tests(server, run=runs, counted=None)


ATTEMPTS = {
    "tests of one round": (EVALUATED, labels_by_tests),
    "tests without training": (EVALUATED, labels_by_tests_without_training),
    "tests after the run": (
        {**EVALUATED, "sampler": UniformSampler(2)},
        lambda server: labels_by_tests(server, round=iter(range(ROUNDS + 1, 100))),
    ),
    "tests of other runs": (EVALUATED, labels_by_tests_of_other_runs),
    "tests as another client": (EVALUATED, partial(labels_by_tests, client=1, counted=None)),
    "tests of more classes": (EVALUATED, partial(labels_by_tests, classes=7)),
    "tests without evaluation": ({}, labels_by_tests),
    "scores of the others": (
        {"metrics": {"fedce": ContributionEstimation()}},
        lambda server: differences(partial(score_of_others, server)),
    ),
    "judging": (EVALUATED, labels_by_judging),
    "losses": (
        {"sampler": PowerOfChoice(2, 3)},
        lambda server: differences(partial(loss_of, server)),
    ),
    "other greetings": (EVALUATED, splits_by_other_greetings),
    "hashes": (EVALUATED, members_by_hashes),
    "other functions": ({}, rows_by_other_functions),
    "errors": (EVALUATED, rows_by_errors),
}


@pytest.mark.fast_rows
@pytest.mark.parametrize(("options", "attempt"), ATTEMPTS.values(), ids=ATTEMPTS)
def test_curious_server_learns_nothing_beyond_what_the_loop_asks(tmp_path, options, attempt):
    server = CuriousServer(tmp_path, **options)
    assert attempt(server) == []


@pytest.mark.fast_rows
@pytest.mark.parametrize(
    ("options", "ask"),
    [
        (EVALUATED, CuriousServer.test),
        ({"metrics": {"fedce": ContributionEstimation()}}, score_of_others),
        (
            {"sampler": PowerOfChoice(2, 3)},
            loss_of,
        ),
    ],
    ids=["test", "leave_self_out", "local_loss"],
)
def test_what_the_loop_asks_is_answered_once_and_again_after_a_training(tmp_path, options, ask):
    server = CuriousServer(tmp_path, **options)
    answer = ask(server, 3)
    assert answer is not None
    assert ask(server, 3) == answer  # as after a kill of the server
    assert ask(server, 4) is None

    server.send("train", model=model_that_picks(5))
    assert ask(server, 4) is not None


def test_refusals_of_a_site_name_what_was_pinned_and_are_logged(tmp_path, caplog):
    server = CuriousServer(tmp_path, **EVALUATED)
    reply = server.send("hello", client=2)

    words = "it was greeted as client 0 of this run, and is asked now as 2"
    assert reply.plain["error"] == words
    assert words in caplog.text


def test_another_run_may_be_greeted_otherwise_and_pins_are_kept_over_restarts(tmp_path):
    server = CuriousServer(tmp_path, **EVALUATED)
    assert server.send("hello", client=2, greeting="1" * 16).kind == "hello"

    restarted_site = CuriousServer(tmp_path, **EVALUATED)
    assert restarted_site.send("hello", client=2).kind == "failed"
