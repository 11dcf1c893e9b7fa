"""The federations that are compared on one, two and three ranks."""

from collections.abc import Mapping
from types import MappingProxyType
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
    """What is fitted on ranks, and how."""

    loop: FederatedLoop
    module: L.LightningModule
    data: FederatedDataModule
    rounds: int = 2
    logs: bool = False
    monitor: str | None = None
    trainer_options: Mapping[str, Any] = MappingProxyType({})


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
        self.micro_accuracy(self(x), y)
        by_epoch = {"on_step": False, "on_epoch": True}
        self.log("loss", loss, on_step=True, on_epoch=True, prog_bar=True)
        self.log("accuracy", self.micro_accuracy, **by_epoch)
        self.log("largest_loss", loss, reduce_fx="max", **by_epoch)
        # A client whose batches are all full does not log the name of a smaller one.
        self.log(f"rows_of_batches_of_{len(y)}", float(len(y)), reduce_fx=torch.sum, **by_epoch)
        return loss

    def on_train_epoch_start(self):
        self.log("random_number", torch.rand(()))


class MovingAverage:
    """A moving average of weights in a list, as in libraries."""

    def __init__(self):
        self.averages = []
        self.num_updates = 0

    def update(self, weights):
        if not self.averages:
            self.averages.append(weights.clone())
        self.averages[0].lerp_(weights, 0.3)
        self.num_updates += 1


class TrainsByItsState(Plain):
    """Keeps averages of its last bias in an object, an array, a buffer and a tensor, counters and flags that training
    changes, and trains by them, and by the Trainer's count of steps: if a rank had another client's of them, its model
    would be another one."""

    def __init__(self):
        super().__init__(network(dropout=0.3))
        self.average_in_object = MovingAverage()
        self.average_in_array = np.zeros(3)
        self.register_buffer("average_in_buffer", torch.zeros(3), persistent=False)
        self.tensor_made_in_training = None
        self.losses = {"train": []}

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        penalty_by_earlier_steps = self.penalty_by_state()

        self.update_state(loss)
        if self.average_in_object.num_updates == 3:
            self.change_flags()

        warm_up = min(1.0, 0.1 * (1 + self.global_step))
        product = (self.tensor_made_in_training * self.net[4].bias).sum()
        return warm_up * loss + penalty_by_earlier_steps + 0.1 * product

    def penalty_by_state(self):
        average_in_array = torch.from_numpy(self.average_in_array).float()
        difference = self.net[4].bias - self.average_in_buffer - average_in_array
        num_steps = len(self.losses["train"]) + self.average_in_object.num_updates
        return difference.square().sum() / (1 + num_steps)

    def update_state(self, loss):
        bias = self.net[4].bias.detach()
        self.losses["train"].append(float(loss))
        self.average_in_object.update(bias)
        self.average_in_array = 0.9 * self.average_in_array + 0.1 * bias.numpy()
        self.average_in_buffer.lerp_(bias, 0.2)
        if self.tensor_made_in_training is None:
            self.tensor_made_in_training = bias.clone()
        self.tensor_made_in_training = self.tensor_made_in_training + 0.1 * bias

    def change_flags(self):
        self.net[0].weight.requires_grad_(False)
        self.net[1].eval()
        weight = self.net[4].weight
        weight.attribute = weight.detach().clone()


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
    return torch.optim.lr_scheduler.StepLR(optimizer, step_size=3, gamma=0.9)


def make_plain(**options):
    return Plain(network(batch_norm=False), **options)


def make_loop(**options):
    return FederatedLoop(seed=3, **options)


def make_five_clients(**options):
    return toy_data((4, 2, 3, 3, 2), **options)


def shapfed_wa():
    metrics = {"cssv": ClassSpecificShapley(), "loo": LeaveOneOut()}
    loop = make_loop(aggregator=ShapFedWA("cssv"), metrics=metrics)
    return RankCase(loop, make_plain(), make_five_clients())


def pfedsv():
    metrics = {
        "relevance": DomainRelevance(),
        "cost": CommunicationCost(),
        "fedce": ContributionEstimation(),
    }
    loop = make_loop(
        personalizer=PFedSV(),
        metrics=metrics,
        sampler=UniformSampler(cohort_size=4),
        evaluation=ClientEvaluation(every=2),
    )
    return RankCase(loop, Plain(), make_five_clients(client_val=0.2), rounds=3)


def scaffold():
    loop = make_loop(
        aggregator=FedAvg(weighting="uniform", server_lr=0.8),
        metrics={"cost": CommunicationCost()},
        client_algorithm=SCAFFOLD(),
        sampler=UniformSampler(cohort_size=3),
    )
    return RankCase(loop, make_plain(optimizer=plain_sgd), make_five_clients(), rounds=3)


def own_models_of_clients_with_a_large_loss():
    loop = make_loop(
        aggregator=FedAvg(weighting="uniform"),
        metrics={"cost": CommunicationCost()},
        client_algorithm=Ditto(lamda=0.3, lr=0.05),
        sampler=PowerOfChoice(cohort_size=2, candidates=4),
        evaluation=ClientEvaluation(every=2),
    )
    partitioner = SizePartitioner([4, 2, 3, 3, 2])
    data = FederatedDataModule(
        NoisySamples(), partitioner, batch_size=8, splits=Splits(client_test=0.2)
    )
    return RankCase(loop, Plain(network(dropout=0.3)), data, rounds=3)


def values_of_samples():
    loop = make_loop(
        metrics={"in_run": InRunShapley(), "cost": CommunicationCost()},
        client_algorithm=InRunValues(every=2),
        sampler=UniformSampler(cohort_size=3),
    )
    return RankCase(loop, make_plain(), make_five_clients(server_val=0.2))


def persistent_optimizers():
    attack = SignFlip(clients=[1])
    privacy = GaussianPrivacy(clip=1.0, noise_multiplier=0.1)
    loop = make_loop(
        metrics={"cssv": ClassSpecificShapley()},
        personalizer=ShapFedPersonalizer("cssv"),
        uploads=[attack, privacy],
        optimizer_state="persist",
        evaluation=ClientEvaluation(every=2, models="trained"),
    )
    return RankCase(loop, make_plain(), make_five_clients())


def adam_with_three_steps_a_round():
    module = LogsEverything(network(dropout=0.3), adam, step_schedule, interval="step")
    loop = make_loop(
        aggregator=AddsGlobalNoise("cssv"),
        metrics={"cssv": ClassSpecificShapley()},
        local_epochs="3 steps",
    )
    options = {
        "accumulate_grad_batches": 2,
        "gradient_clip_val": 1.0,
        "limit_train_batches": 0.5,
    }
    return RankCase(
        loop,
        module,
        make_five_clients(batch_size=4),
        logs=True,
        monitor="loss_epoch",
        trainer_options=options,
    )


def all_coalitions_retrained():
    loop = make_loop(
        metrics={
            "shadow": ShadowShapley(coalitions="all", performance="negative_loss"),
            "cost": CommunicationCost(),
        },
        sampler=UniformSampler(cohort_size=2),
        local_epochs={"0": 1, "1": 2, "2": 3},  # by client
    )
    module = Plain(network(dropout=0.3), scheduler=step_schedule)
    return RankCase(loop, module, toy_data(), trainer_options={"gradient_clip_val": 1.0})


def evaluated_by_clients():
    """By the clients, each on its rank, and by whole fits of the coalitions, each rank's by all clients."""
    shadow = ShadowShapley(coalitions="leave-one-out", evaluators="clients")
    by_loss = PartialFederatedShapley(performance="val_loss", mode="min", evaluators="clients")
    loop = make_loop(metrics={"shadow": shadow, "loss": by_loss}, optimizer_state="persist")
    data = toy_data(server_val=0.0, client_val=0.4)
    return RankCase(loop, ValidatesOnRanks(), data)


def module_with_state():
    """The cohort's first is on another rank in most rounds, and once excluded."""
    loop = make_loop(
        sampler=UniformSampler(cohort_size=3),
        uploads=[Scaling(1e6, clients=[1])],
        filters=[OutlierFilter(exclude=True)],
    )
    return RankCase(loop, TrainsByItsState(), make_five_clients(), rounds=3)


def two_clients():
    loop = make_loop(metrics={"distance": CalibratedOTGradient()})
    return RankCase(loop, Plain(), toy_data((1, 1)))


def by_a_logged_value():
    """Every question by what the module logs: of the server's validation set and of the clients' own. Two ranks share
    three clients and seven coalitions out unequally."""
    by_loss = {"performance": "val_loss", "mode": "min"}
    by_hits = {"performance": "val_hits", "mode": "max"}
    metrics = {
        "pfsv": PartialFederatedShapley(**by_loss),
        "cumulative": CumulativeShapley(**by_hits),
        "decayed": DecayedShapley(**by_loss),
        "loo": LeaveOneOut(**by_loss),
        "one_round": OneRoundShapley(rounds=2, **by_loss),
        "surrogate": SurrogateFederatedShapley(**by_loss),
        "agreement": GradientAgreement(loss="val_loss"),
        "fedce": ContributionEstimation(**by_hits),
    }
    loop = make_loop(metrics=metrics, personalizer=FedFomo(**by_loss))
    return RankCase(loop, ValidatesOnRanks(), toy_data((3, 2, 2), client_val=0.2))


def colluders():
    """On different ranks, and each knows what the other would have sent."""
    loop = make_loop(
        metrics={"cost": CommunicationCost(), "cssv": ClassSpecificShapley()},
        uploads=[TopK(0.3), InnerProductManipulation(clients=[0, 1, 3], seed=1)],
    )
    return RankCase(loop, Plain(), make_five_clients())


def rank_without_a_finite_update():
    """Of four clients of one size, the second and the fourth are on rank 1 of two, the second alone on rank 1 of
    three."""
    loop = make_loop(uploads=[SendsNaN(clients=[1, 3])])
    return RankCase(loop, LogsEverything(), toy_data((1, 1, 1, 1)))


RANK_CASES = {
    make_case.__name__: make_case
    for make_case in (
        shapfed_wa, pfedsv, scaffold, own_models_of_clients_with_a_large_loss, values_of_samples,
        all_coalitions_retrained, evaluated_by_clients, persistent_optimizers, adam_with_three_steps_a_round,
        module_with_state, two_clients, by_a_logged_value, rank_without_a_finite_update, colluders,
    )
}  # fmt: skip
