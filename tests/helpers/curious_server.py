"""A curious server, which knows a site's inputs, and what it asks for beyond what the loop asks."""

import json
from functools import partial

import lightning as L
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from flsv import ClientEvaluation, FederatedDataModule, FederatedLoop
from flsv.aggregation import FedAvg
from flsv.data import OneClient, Splits
from flsv.metrics import ContributionEstimation, PartialFederatedShapley
from flsv.sampling import PowerOfChoice
from flsv.sites import Packet, Site, agreement
from flsv.sites.ledgers import ANSWERS_FILE
from flsv.sites.messages import pack, unpack

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


#: Of the 10 held-out samples, fewer than five are of class 1.
LABELS_WITH_A_RARE_CLASS = (torch.arange(NUM_SAMPLES) % 5 == 0).long()
make_rare_data = partial(make_data, LABELS_WITH_A_RARE_CLASS)
