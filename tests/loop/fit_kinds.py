"""Ordinary kinds of LightningModules, Trainers and callbacks, and beside each the training of a client by hand."""

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import lightning as L
import numpy as np
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torchmetrics.classification import MulticlassAccuracy
from toys import CLASSES, FEATURES, toy_data

from flsv.data import FederatedDataModule
from flsv.seeding import generator_for, seed_global_rngs

SEED, ROUNDS, RATE = 5, 2, 0.1


def data() -> FederatedDataModule:
    return toy_data((4, 1, 2), server_val=0.3)


def mlp(*between: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Linear(FEATURES, 8), *between, nn.ReLU(), nn.Linear(8, CLASSES))


class Cells(nn.Module):
    """Features as cells of a table, to be embedded."""

    def forward(self, x: Tensor) -> Tensor:
        return (4 * x).long().clamp(-20, 20) + 20


def embedding() -> nn.Module:
    return nn.Sequential(Cells(), nn.Embedding(41, 4), nn.Flatten(), nn.Linear(4 * FEATURES, CLASSES))


def cnn() -> nn.Module:
    return nn.Sequential(nn.Unflatten(1, (1, 2, 3)), nn.Conv2d(1, 4, 2), nn.ReLU(), nn.Flatten(), nn.Linear(8, CLASSES))


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gru, self.head = nn.GRU(2, 8, batch_first=True), nn.Linear(8, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.gru(x.reshape(-1, 3, 2))[0][:, -1])


class Module(L.LightningModule):
    def __init__(self, net: Callable[[], nn.Module] = mlp, optimizer: Any = None) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.net, self.optimizer = net(), optimizer or partial(torch.optim.SGD, lr=RATE)
        self.beta = 1.0

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)

    def loss(self, batch: Any) -> Tensor:
        return nn.functional.cross_entropy(self(batch[0]), batch[1])

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.loss(batch)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch))

    def configure_optimizers(self) -> Any:
        return self.optimizer(self.parameters())


class Counts(Module):
    def __init__(self) -> None:
        super().__init__()
        self.train_acc = MulticlassAccuracy(CLASSES)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        logits = self(batch[0])
        self.train_acc(logits, batch[1])
        self.log("train_acc", self.train_acc)
        return nn.functional.cross_entropy(logits, batch[1])


class Items(Module):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.last = loss.item()
        return loss


class Manual(Module):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizers: Any = self.optimizers()
        optimizers = optimizers if isinstance(optimizers, list) else [optimizers]
        loss = self.loss(batch)
        for each in optimizers:
            each.zero_grad()
        self.manual_backward(loss)
        for each in optimizers:
            each.step()


class Two(Manual):
    def configure_optimizers(self) -> Any:
        first, last = self.net[0].parameters(), self.net[-1].parameters()
        return [torch.optim.SGD(first, lr=RATE), torch.optim.Adam(last, lr=0.01)]


class Hooked(Module):
    def on_train_batch_end(self, *_: Any) -> None:
        clamp(self)


class Mixup(Module):
    def loss(self, batch: Any) -> Tensor:
        return mixed(self, batch) if self.training else super().loss(batch)


class ByStep(Module):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.loss(batch) * (1 + 0.01 * self.global_step)


class ByRound(Module):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.loss(batch) * (1 + 0.2 * self.current_epoch)


class ByAttribute(Module):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.beta *= 0.95
        return self.loss(batch) * self.beta


class OwnGenerator(Module):
    def __init__(self) -> None:
        super().__init__()
        self.generator, self.random = torch.Generator().manual_seed(1), np.random.default_rng(1)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return noisy(self.net, batch, self.generator) * (1 + 0.1 * self.random.random())


class Plateau(Module):
    def configure_optimizers(self) -> Any:
        optimizer = self.optimizer(self.parameters())
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": plateau(optimizer), "monitor": "val_loss"}}


class DigitsPlateau(Plateau):
    """As a configuration names it."""

    def __init__(self) -> None:
        super().__init__(lambda: nn.Sequential(nn.Flatten(), nn.Linear(64, 10)))


class Clamps(L.Callback):
    def on_train_batch_end(self, trainer: L.Trainer, pl_module: L.LightningModule, *_: Any) -> None:
        clamp(pl_module)


class SetsRate(L.Callback):
    def on_train_batch_start(self, trainer: L.Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        trainer.optimizers[0].param_groups[0]["lr"] = RATE / (1 + batch_idx)


class Freezes(L.Callback):
    def on_train_epoch_start(self, trainer: L.Trainer, pl_module: Any) -> None:
        pl_module.net[0].requires_grad_(trainer.current_epoch == 0)


class Anneals(L.Callback):
    """From the second round on."""

    def on_train_batch_start(self, trainer: L.Trainer, pl_module: Any, *_: Any) -> None:
        pl_module.beta *= 0.95 if trainer.current_epoch else 1.0


class Annealed(Module):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.loss(batch) * self.beta


@torch.no_grad()
def clamp(module: Any) -> None:
    for parameter in module.net.parameters():
        parameter.clamp_(-0.3, 0.3)


def mixed(net: nn.Module, batch: Any) -> Tensor:
    (x, y), weight = batch, np.random.beta(1, 1)  # noqa: NPY002 - as users do
    other, entropy = torch.randperm(len(y)), nn.functional.cross_entropy
    logits = net(weight * x + (1 - weight) * x[other])
    return weight * entropy(logits, y) + (1 - weight) * entropy(logits, y[other])


def noisy(net: nn.Module, batch: Any, generator: torch.Generator) -> Tensor:
    x, y = batch
    return nn.functional.cross_entropy(net(x + 0.1 * torch.randn(x.shape, generator=generator)), y)


def plateau(optimizer: Any) -> ReduceLROnPlateau:
    return ReduceLROnPlateau(optimizer, factor=0.1, patience=0, threshold=0.4, threshold_mode="abs")


class Hand:
    """FedAvg of some clients, and a client's training, in plain torch."""

    def __init__(self, net: nn.Module, optimizer: Any) -> None:
        self.net, self.make, self.beta, self.steps, self.round = net, optimizer, 1.0, 0, 0

    def train(self, batches: list[Any], client: int) -> None:
        optimizer = self.make(self.net.parameters())
        for index, batch in enumerate(batches):
            self.step(optimizer, batch, index, len(batches))
            self.steps += 1

    def step(self, optimizer: Any, batch: Any, index: int, of: int) -> None:
        optimizer.zero_grad()
        self.loss(batch).backward()
        optimizer.step()

    def loss(self, batch: Any) -> Tensor:
        return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    def end_round(self, val: list[Any]) -> None:
        pass

    def utility(self, members: Sequence[int]) -> float:
        dealt = data()
        dealt.setup("fit")
        val = list(dealt.val_dataloader())
        for self.round in range(ROUNDS if members else 0):
            start, states, sizes = copy.deepcopy(self.net.state_dict()), [], []
            for client in members:
                self.net.load_state_dict(start)
                seed_global_rngs(SEED, "train", self.round, client)
                stream = generator_for(SEED, "shuffle", self.round, client, 0)
                self.train(list(dealt.client_loader(client, "train", generator=stream)), client)
                states.append(copy.deepcopy(self.net.state_dict()))
                sizes.append(float(dealt.num_samples[client]))
            mean = {
                n: sum(w * s[n] for w, s in zip(sizes, states)) / sum(sizes) if v.is_floating_point() else states[0][n]
                for n, v in start.items()
            }
            self.net.load_state_dict(mean)
            self.end_round(val)
        return -self.validation_loss(val)

    @torch.no_grad()
    def validation_loss(self, val: list[Any]) -> float:
        x, y = (torch.cat(parts) for parts in zip(*val))
        self.net.eval()
        loss = float(nn.functional.cross_entropy(self.net(x), y))
        self.net.train()
        return loss


class TwoByHand(Hand):
    def train(self, batches: list[Any], client: int) -> None:
        net: Any = self.net
        optimizers = torch.optim.SGD(net[0].parameters(), lr=RATE), torch.optim.Adam(net[-1].parameters(), lr=0.01)
        for batch in batches:
            self.net.zero_grad()
            self.loss(batch).backward()
            for each in optimizers:
                each.step()


class ClampedByHand(Hand):
    def step(self, *args: Any) -> None:
        super().step(*args)
        clamp(self)


class LBFGSByHand(Hand):
    def step(self, optimizer: Any, batch: Any, index: int, of: int) -> None:
        def closure() -> Tensor:
            optimizer.zero_grad()
            loss = self.loss(batch)
            loss.backward()
            return loss

        optimizer.step(closure)


class MixupByHand(Hand):
    def loss(self, batch: Any) -> Tensor:
        return mixed(self.net, batch)


class ByStepByHand(Hand):
    def loss(self, batch: Any) -> Tensor:
        return super().loss(batch) * (1 + 0.01 * self.steps)


class ByRoundByHand(Hand):
    def loss(self, batch: Any) -> Tensor:
        return super().loss(batch) * (1 + 0.2 * self.round)


class ByAttributeByHand(Hand):
    def loss(self, batch: Any) -> Tensor:
        self.beta *= 0.95
        return super().loss(batch) * self.beta


class OwnGeneratorByHand(Hand):
    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.generator, self.random = torch.Generator().manual_seed(1), np.random.default_rng(1)

    def loss(self, batch: Any) -> Tensor:
        return noisy(self.net, batch, self.generator) * (1 + 0.1 * self.random.random())


class AnnealedByHand(Hand):
    def loss(self, batch: Any) -> Tensor:
        self.beta *= 0.95 if self.round else 1.0
        return super().loss(batch) * self.beta


class AccumulatedByHand(Hand):
    def step(self, optimizer: Any, batch: Any, index: int, of: int) -> None:
        (self.loss(batch) / 2).backward()
        if index % 2 or index + 1 == of:
            optimizer.step()
            optimizer.zero_grad()


class ClippedByHand(Hand):
    def step(self, optimizer: Any, batch: Any, index: int, of: int) -> None:
        optimizer.zero_grad()
        self.loss(batch).backward()
        nn.utils.clip_grad_value_(self.net.parameters(), 0.02)
        optimizer.step()


class PersistedByHand(Hand):
    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.optimizers: dict[int, Any] = {}

    def train(self, batches: list[Any], client: int) -> None:
        optimizer = self.optimizers.setdefault(client, self.make(self.net.parameters()))
        for batch in batches:
            self.step(optimizer, batch, 0, 0)


class PlateauByHand(Hand):
    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.optimizer = self.make(self.net.parameters())
        self.scheduler = plateau(self.optimizer)

    def train(self, batches: list[Any], client: int) -> None:
        for batch in batches:  # plain SGD has no state
            self.step(self.optimizer, batch, 0, 0)

    def end_round(self, val: list[Any]) -> None:
        self.scheduler.step(self.validation_loss(val))


class RateByHand(Hand):
    def step(self, optimizer: Any, batch: Any, index: int, of: int) -> None:
        optimizer.param_groups[0]["lr"] = RATE / (1 + index)
        super().step(optimizer, batch, index, of)


class FrozenByHand(Hand):
    def train(self, *args: Any) -> None:
        net: Any = self.net
        net[0].requires_grad_(self.round == 0)
        super().train(*args)


@dataclass
class Kind:
    """A module, how its clients train by hand, and what else the fit has.

    Args:
        way: how its coalitions are trained, ``"rows"`` or ``"fits"``.
    """

    way: str
    module: Callable[[], Module] = Module
    hand: type[Hand] = Hand
    callback: Callable[[], L.Callback] | None = None
    trainer: dict[str, Any] = field(default_factory=dict)
    loop: dict[str, Any] = field(default_factory=dict)


ADAM = partial(torch.optim.Adam, lr=0.01)
MOMENTUM = partial(torch.optim.SGD, lr=RATE, momentum=0.9)
KINDS: dict[str, Kind] = {
    "a plain MLP": Kind("rows"),
    "a CNN": Kind("rows", partial(Module, cnn)),
    "dropout": Kind("rows", partial(Module, partial(mlp, nn.Dropout(0.3)))),
    "BatchNorm": Kind("rows", partial(Module, lambda: mlp(nn.BatchNorm1d(8)))),
    "Adam": Kind("rows", partial(Module, optimizer=ADAM)),
    "an embedding": Kind("rows", partial(Module, embedding)),
    "`self.train_acc(y_hat, y)` in `training_step`": Kind("rows", Counts),
    "`loss.item()` in `training_step`": Kind("fits", Items),
    "manual optimization": Kind("fits", Manual),
    "two optimizers": Kind("fits", Two, TwoByHand),
    "a hook of the module around a batch": Kind("fits", Hooked, ClampedByHand),
    "LBFGS": Kind("fits", partial(Module, optimizer=partial(torch.optim.LBFGS, lr=0.01, max_iter=2)), LBFGSByHand),
    "mixup by NumPy": Kind("rows", Mixup, MixupByHand),
    "a loss by `global_step`": Kind("fits", ByStep, ByStepByHand),
    "a loss by `current_epoch`": Kind("rows", ByRound, ByRoundByHand),
    "a loss by an attribute that `training_step` sets": Kind("fits", ByAttribute, ByAttributeByHand),
    "generators of torch and NumPy on the module": Kind("fits", OwnGenerator, OwnGeneratorByHand),
    "a GRU": Kind("fits", partial(Module, Recurrent)),
    "`accumulate_grad_batches=2`": Kind("rows", hand=AccumulatedByHand, trainer={"accumulate_grad_batches": 2}),
    "clipping by value": Kind(
        "rows", hand=ClippedByHand, trainer={"gradient_clip_val": 0.02, "gradient_clip_algorithm": "value"}
    ),
    '`optimizer_state="persist"`': Kind(
        "fits", partial(Module, optimizer=MOMENTUM), PersistedByHand, loop={"optimizer_state": "persist"}
    ),
    "`ReduceLROnPlateau`": Kind("fits", Plateau, PlateauByHand),
    "a callback that clamps weights": Kind("fits", hand=ClampedByHand, callback=Clamps),
    "a callback that sets the rate": Kind("fits", hand=RateByHand, callback=SetsRate),
    "a callback that freezes a layer": Kind("rows", hand=FrozenByHand, callback=Freezes),
    "a callback that anneals an attribute": Kind("fits", Annealed, AnnealedByHand, Anneals),
}
