"""The federations that are compared on one, two and three ranks."""

from typing import Any, NamedTuple

import lightning as L
import numpy as np
import torch
import torchmetrics
from torch import nn

from flsv import ClientEvaluation
from flsv.aggregation import FedAvg, ShapFedWA
from flsv.attacks import Attack, InnerProductManipulation, Scaling, SignFlip
from flsv.contrib import InRunShapley, InRunValues
from flsv.data import FederatedDataModule, SizePartitioner, Splits
from flsv.federation import FederatedLoop
from flsv.filters import OutlierFilter
from flsv.metrics import (
    CalibratedOTGradient,
    ClassSpecificShapley,
    CommunicationCost,
    ContributionEstimation,
    CumulativeShapley,
    DecayedShapley,
    DomainRelevance,
    GradientAgreement,
    LeaveOneOut,
    OneRoundShapley,
    PartialFederatedShapley,
    ShadowShapley,
    SurrogateFederatedShapley,
)
from flsv.personalization import FedFomo, PFedSV, ShapFedPersonalizer
from flsv.privacy import GaussianPrivacy
from flsv.sampling import PowerOfChoice, UniformSampler
from flsv.training.algorithms import SCAFFOLD, Ditto
from flsv.uploads import TopK
from helpers.data import CLASSES, toy_data
from helpers.models import Plain, adam, network
from zoo.samples import NoisySamples


class RankCase(NamedTuple):
    """What is fitted on ranks, and options of its Trainer."""

    loop: FederatedLoop
    module: L.LightningModule
    data: FederatedDataModule
    options: dict[str, Any] = {}  # noqa: RUF012


class LogsEverything(Plain):
    """Logs everything that can be logged of a training step."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.micro_accuracy = torchmetrics.classification.MulticlassAccuracy(
            num_classes=CLASSES, average="micro"
        )

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        x, y = batch
        num_rows = len(y)
        self.micro_accuracy(self(x), y)
        by_epoch = {"on_step": False, "on_epoch": True}
        self.log("loss", loss, on_step=True, on_epoch=True, prog_bar=True)
        self.log("seen", self.micro_accuracy, **by_epoch)
        self.log("worst", loss, reduce_fx="max", **by_epoch)
        self.log(f"rows_{num_rows}", float(num_rows), reduce_fx=torch.sum, **by_epoch)
        return loss

    def on_train_epoch_start(self):
        self.log("drawn", torch.rand(()))


class MovingAverage:
    """A moving average of weights, as in libraries."""

    def __init__(self):
        self.shadows = []
        self.num_updates = 0

    def update(self, weights):
        if not self.shadows:
            self.shadows.append(weights.clone())
        self.shadows[0].lerp_(weights, 0.3)
        self.num_updates += 1


class TrainsByKeptValues(Plain):
    """Keeps floating-point values, counters, a record and flags that its training changes, and trains by them, and by
    the Trainer's count of steps: if a rank had another client's of them, its model would be another one."""

    def __init__(self):
        super().__init__(network(dropout=0.3))
        self.average = MovingAverage()
        self.sum_from_first_batch = None
        self.average_in_array = np.zeros(3)
        self.losses = {"train": []}
        self.register_buffer("average_in_buffer", torch.zeros(3), persistent=False)

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        warm_up = min(1.0, 0.1 * (1 + self.global_step))
        penalty_by_former_values = self.penalty_by_averages()

        self.keep_values(loss)
        if self.average.num_updates == 3:
            self.change_flags()

        product = (self.sum_from_first_batch * self.net[4].bias).sum()
        return warm_up * loss + penalty_by_former_values + 0.1 * product

    def penalty_by_averages(self):
        average_in_array = torch.from_numpy(self.average_in_array).float()
        difference = self.net[4].bias - self.average_in_buffer - average_in_array
        num_counted = len(self.losses["train"]) + self.average.num_updates
        return difference.square().sum() / (1 + num_counted)

    def keep_values(self, loss):
        bias = self.net[4].bias.detach()
        self.losses["train"].append(float(loss))
        self.average.update(bias)
        if self.sum_from_first_batch is None:
            self.sum_from_first_batch = bias.clone()
        self.sum_from_first_batch = self.sum_from_first_batch + 0.1 * bias
        self.average_in_array = 0.9 * self.average_in_array + 0.1 * bias.numpy()
        self.average_in_buffer.lerp_(bias, 0.2)

    def change_flags(self):
        self.net[0].weight.requires_grad_(False)
        self.net[1].eval()
        weight = self.net[4].weight
        weight.anchor = weight.detach().clone()


class ValidatesOnRanks(Plain):
    """Logs what its games go by when it validates, where it also meets whoever else does. Where there is a default
    process group it reduces, where there are several processes it scales its loss: here is neither."""

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        if torch.distributed.is_initialized():
            torch.distributed.all_reduce(loss)
        return loss * self.trainer.world_size

    def validation_step(self, batch, batch_idx):
        x, y = batch
        self.log("val_loss", nn.functional.cross_entropy(self(x), y), sync_dist=True)
        self.log("val_hits", (self(x).argmax(-1) == y).float().mean())

    def on_validation_epoch_end(self):
        self.trainer.strategy.barrier("the end of a validation")


class AddsGlobalNoise(ShapFedWA):
    """Draws from the global generator, which the last client of the cohort has left where it is."""

    def aggregate(self, round, contributions):
        vector, weights = super().aggregate(round, contributions)
        return vector + 1e-3 * torch.rand(()), weights


class SendsNaN(Attack):
    """Sends NaN."""

    def attack(self, update, context, generator):
        return update * float("nan")


def plain_sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.1)


def step_schedule(optimizer):
    return torch.optim.lr_scheduler.StepLR(optimizer, 3, gamma=0.9)


def make_five_clients(**kwargs):
    return toy_data((4, 2, 3, 3, 2), **kwargs)


def shapfed_wa():
    metrics = {"cssv": ClassSpecificShapley(), "loo": LeaveOneOut()}
    loop = FederatedLoop(ShapFedWA("cssv"), metrics, seed=3)
    return RankCase(loop, Plain(network(batch_norm=False)), make_five_clients())


def pfedsv():
    loop = FederatedLoop(
        personalizer=PFedSV(),
        metrics={
            "relevance": DomainRelevance(),
            "cost": CommunicationCost(),
            "fedce": ContributionEstimation(),
        },
        sampler=UniformSampler(4),
        evaluation=ClientEvaluation(every=2),
        seed=3,
    )
    return RankCase(loop, Plain(), make_five_clients(client_val=0.2), {"rounds": 4})


def scaffold():
    loop = FederatedLoop(
        FedAvg(weighting="uniform", server_lr=0.8),
        {"cost": CommunicationCost()},
        client_algorithm=SCAFFOLD(),
        sampler=UniformSampler(3),
        seed=3,
    )
    return RankCase(
        loop, Plain(network(batch_norm=False), plain_sgd), make_five_clients(), {"rounds": 4}
    )


def own_models_of_the_worst_served():
    loop = FederatedLoop(
        FedAvg(weighting="uniform"),
        {"cost": CommunicationCost()},
        client_algorithm=Ditto(lamda=0.3, lr=0.05),
        sampler=PowerOfChoice(2, 4),
        evaluation=ClientEvaluation(every=2),
        seed=3,
    )
    data = FederatedDataModule(
        NoisySamples(),
        SizePartitioner([4, 2, 3, 3, 2]),
        batch_size=8,
        splits=Splits(client_test=0.2),
    )

    return RankCase(loop, Plain(network(dropout=0.3)), data, {"rounds": 4})


def in_run():
    metrics = {"in_run": InRunShapley(), "cost": CommunicationCost()}
    loop = FederatedLoop(
        metrics=metrics, client_algorithm=InRunValues(2), sampler=UniformSampler(3), seed=3
    )
    return RankCase(loop, Plain(network(batch_norm=False)), make_five_clients(server_val=0.2))


def kept_momentum():
    loop = FederatedLoop(
        metrics={"cssv": ClassSpecificShapley()},
        personalizer=ShapFedPersonalizer("cssv"),
        uploads=[SignFlip(clients=[1]), GaussianPrivacy(clip=1.0, noise_multiplier=0.1)],
        optimizer_state="persist",
        evaluation=ClientEvaluation(every=2, models="trained"),
        seed=3,
    )
    return RankCase(loop, Plain(network(batch_norm=False)), make_five_clients())


def adam_with_steps():
    module = LogsEverything(network(dropout=0.3), adam, step_schedule, interval="step")
    loop = FederatedLoop(
        AddsGlobalNoise("cssv"), {"cssv": ClassSpecificShapley()}, local_epochs="5 steps", seed=3
    )
    options = {
        "accumulate_grad_batches": 3,
        "gradient_clip_val": 1.0,
        "limit_train_batches": 0.5,
        "monitor": "loss_epoch",
        "logger": True,
    }
    return RankCase(loop, module, make_five_clients(batch_size=4), options)


def shadows():
    metrics = {
        "shadow": ShadowShapley(coalitions="all", performance="negative_loss"),
        "cost": CommunicationCost(),
    }
    module = Plain(network(dropout=0.3), scheduler=step_schedule)
    work = {"0": 1, "1": 2, "2": 3}
    loop = FederatedLoop(metrics=metrics, sampler=UniformSampler(2), local_epochs=work, seed=3)
    return RankCase(loop, module, toy_data(), {"gradient_clip_val": 1.0})


def evaluated_by_clients():
    """By the clients, each on its rank, and by whole fits of the coalitions, each rank's by all clients."""
    metrics = {
        "shadow": ShadowShapley(coalitions="both", evaluators="clients"),
        "loss": PartialFederatedShapley(performance="val_loss", mode="min", evaluators="clients"),
    }
    loop = FederatedLoop(metrics=metrics, optimizer_state="persist", seed=3)
    return RankCase(
        loop, ValidatesOnRanks(), toy_data(server_val=0.0, client_val=0.4), {"rounds": 2}
    )


def kept_values():
    """The cohort's first is on another rank in most rounds, and once excluded."""
    loop = FederatedLoop(
        sampler=UniformSampler(3),
        uploads=[Scaling(1e6, clients=[1])],
        filters=[OutlierFilter(exclude=True)],
        seed=3,
    )
    return RankCase(loop, TrainsByKeptValues(), make_five_clients(), {"rounds": 5})


def two_clients():
    metrics = {"distance": CalibratedOTGradient()}
    return RankCase(
        FederatedLoop(metrics=metrics, seed=3), Plain(), toy_data((1, 1)), {"rounds": 2}
    )


def by_a_logged_value():
    """Every question by what the module logs: of the server's validation set and of the clients' own. Two and three
    ranks share five clients and 32 coalitions out unequally."""
    by_loss = {"performance": "val_loss", "mode": "min"}
    by_hits = {"performance": "val_hits", "mode": "max"}
    metrics = {
        "pfsv": PartialFederatedShapley(**by_loss),
        "cumulative": CumulativeShapley(**by_hits),
        "decayed": DecayedShapley(**by_loss),
        "loo": LeaveOneOut(**by_loss),
        "one_round": OneRoundShapley(2, **by_loss),
        "surrogate": SurrogateFederatedShapley(**by_loss),
        "agreement": GradientAgreement(loss="val_loss"),
        "fedce": ContributionEstimation(**by_hits),
    }
    personalizer = FedFomo(**by_loss)
    loop = FederatedLoop(metrics=metrics, personalizer=personalizer, seed=3)

    return RankCase(loop, ValidatesOnRanks(), make_five_clients(client_val=0.2), {"rounds": 2})


def colluders():
    # On different ranks, and each knows what the other would have sent.
    uploads = [TopK(0.3), InnerProductManipulation(clients=[0, 1, 3], seed=1)]
    metrics = {"cost": CommunicationCost(), "cssv": ClassSpecificShapley()}
    loop = FederatedLoop(metrics=metrics, uploads=uploads, seed=3)
    return RankCase(loop, Plain(), make_five_clients(), {"rounds": 2})


def broken_rank():
    # Of four clients of one size, the second and the fourth are on rank 1 of two, the second alone on rank 1 of three.
    loop = FederatedLoop(uploads=[SendsNaN(clients=[1, 3])], seed=3)
    return RankCase(loop, LogsEverything(), toy_data((1, 1, 1, 1)))


RANK_CASES = {
    function.__name__: function
    for function in (
        shapfed_wa, pfedsv, scaffold, own_models_of_the_worst_served, in_run, shadows, evaluated_by_clients,
        kept_momentum, adam_with_steps, kept_values, two_clients, by_a_logged_value,
        broken_rank, colluders,
    )
}  # fmt: skip
