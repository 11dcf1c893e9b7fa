"""Small modules as users write them, the plain one first; below, those whose steps hang on more than their
parameters, buffers and batch. Only ``Diverges`` knows flsv."""

import copy
from collections.abc import Callable
from typing import Any

import lightning as L
import numpy as np
import torch
from lightning.pytorch.callbacks import GradientAccumulationScheduler, Timer
from torch import nn
from torchmetrics import MetricCollection
from torchmetrics.classification import MulticlassAccuracy, MulticlassConfusionMatrix

from flsv.federation import FederatedLoop
from helpers import make_generator
from helpers.data import CLASSES, FEATURES


def network(batch_norm=True, dropout=0.0):
    torch.manual_seed(3)
    norm = nn.BatchNorm1d(8) if batch_norm else nn.Identity()
    # A bias before BatchNorm has no gradient but rounding noise, which Adam would blow up to full steps.
    return nn.Sequential(
        nn.Linear(FEATURES, 8, bias=not batch_norm),
        norm,
        nn.ReLU(),
        nn.Dropout(dropout),
        nn.Linear(8, CLASSES),
    )


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def adam(parameters):
    return torch.optim.Adam(parameters, lr=0.001)


class Plain(L.LightningModule):
    """An ordinary LightningModule."""

    def __init__(
        self,
        net: nn.Module | None = None,
        optimizer: Callable[[Any], torch.optim.Optimizer] = sgd,
        scheduler: Callable[[torch.optim.Optimizer], Any] | None = None,
        interval: str = "epoch",
    ):
        super().__init__()
        self.net = net or network()
        self.make_optimizer = optimizer
        self.make_scheduler = scheduler
        self.interval = interval

    def forward(self, x):
        return self.net(x)

    def training_step(self, batch, batch_idx):
        x, y = batch
        return nn.functional.cross_entropy(self(x), y)

    def validation_step(self, batch, batch_idx):
        x, y = batch
        self.log("val_acc", (self(x).argmax(-1) == y).float().mean())

    def test_step(self, batch, batch_idx):
        x, y = batch
        self.log("test_acc", (self(x).argmax(-1) == y).float().mean())

    def configure_optimizers(self):
        optimizer = self.make_optimizer(self.parameters())
        if self.make_scheduler is None:
            return optimizer
        scheduler = {"scheduler": self.make_scheduler(optimizer), "interval": self.interval}
        return {"optimizer": optimizer, "lr_scheduler": scheduler}


class OfShape:
    """Shares what has so many dimensions."""

    def __init__(self, dimensions: int):
        self.dimensions = dimensions

    def __call__(self, name, tensor):
        return tensor.ndim == self.dimensions


class Plainest(Plain):
    """Without BatchNorm."""

    def __init__(self, optimizer: Any = sgd, **kwargs: Any):
        super().__init__(network(batch_norm=False), optimizer, **kwargs)


class Logs(Plain):
    """Logs per batch and per epoch, and its own ``step`` where it is told to."""

    own_step = False

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        self.log("train_loss", loss, on_step=True, on_epoch=True)
        if self.own_step:
            self.log("step", 100.0 + self.trainer.current_epoch, on_step=False, on_epoch=True)
        return loss


class LogsByRound(Plain):
    """Logs a value of each round under a name. None: nothing."""

    def __init__(self, name, values):
        super().__init__()
        self.name = name
        self.values = values

    def on_validation_epoch_end(self):
        if self.name is not None:
            self.log(self.name, self.values[self.current_epoch])


class Diverges(Plain):
    """Some clients' gradients are NaN in some rounds: pairs (round, client)."""

    def __init__(self, net, optimizer, failing):
        super().__init__(copy.deepcopy(net), optimizer)
        self.failing = failing

    def training_step(self, batch, batch_idx):
        loop = loop_of(self)
        broken = (loop.round_index, loop.current_client) in self.failing
        return super().training_step(batch, batch_idx) * (float("nan") if broken else 1.0)


def loop_of(module):
    (loop,) = [
        callback for callback in module.trainer.callbacks if isinstance(callback, FederatedLoop)
    ]
    return loop


class Stepped(Plain):
    """Its loss is a function of itself, the plain step's loss and the batch."""

    beta = 1.0

    def __init__(
        self,
        function: Callable[..., Any] | None = None,
        net: nn.Module | None = None,
        optimizer: Any = sgd,
    ):
        super().__init__(net or network(batch_norm=False), optimizer)
        self.function = function
        self.torch_rng = make_generator(1)
        self.numpy_rng = np.random.default_rng(1)
        self.accuracy = MulticlassAccuracy(CLASSES)
        train_metrics = {
            "all": MulticlassAccuracy(CLASSES),
            "matrix": MulticlassConfusionMatrix(CLASSES),
        }
        self.measures = MetricCollection(train_metrics, prefix="train_")

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx) * self.beta
        return loss if self.function is None else self.function(self, loss, batch)


class Hooks(L.Callback):
    """One hook, a function of the trainer and the module."""

    def __init__(self, hook, function):
        setattr(self, hook, lambda trainer, module, *_: function(trainer, module))


def raise_beta(trainer, module):
    if trainer.current_epoch:  # from round 2 on
        module.beta += 0.2


@torch.no_grad()
def clamp_weights(trainer, module):
    for parameter in module.parameters():
        parameter.clamp_(-0.4, 0.4)


class Clamps(Timer):
    """Not what it is known as."""

    def on_train_batch_start(self, trainer, pl_module, *_):
        clamp_weights(trainer, pl_module)


def make_hooked_sgd(parameters):
    optimizer = sgd(parameters)
    optimizer.register_step_post_hook(lambda *_: None)
    return optimizer


def freeze_layer(trainer, module):
    module.net[0].requires_grad_(trainer.current_epoch == 0)


def make_mixup_loss(draw):
    def loss_of(module, loss, batch):
        x, y = batch
        share = draw(module)
        return share * loss + (1 - share) * nn.functional.cross_entropy(module(x.flip(0)), y)

    return loss_of


def masked_loss(module, loss, batch):
    x, y = batch
    is_labeled = y != 2
    return nn.functional.cross_entropy(module(x)[is_labeled], y[is_labeled])


def loss_with_logged_metrics(module, loss, batch):
    x, y = batch
    logits = module(x)
    module.log("accuracy", module.accuracy(logits, y))
    module.log("all", module.measures(logits, y)["train_all"])
    module.log("running", module.accuracy.compute())

    return loss


def loss_with_annealed_beta(module, loss, batch):
    module.beta = module.beta * 0.99
    return loss


class Twice(Stepped):
    """One layer under two names."""

    def __init__(self):
        super().__init__()
        self.body = self.net


class Renormed(nn.Module):
    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(8, 4, max_norm=1.0)
        self.head = nn.Linear(4 * FEATURES, CLASSES)

    def forward(self, x):
        return self.head(self.words((x * 2).long().clamp(-3, 4) + 3).flatten(1))


BATCH = "Hooks defines on_train_batch_"
Make = tuple[Callable[[], L.LightningModule], Callable[[], list[L.Callback]], str | None]


def make_hooked(hook, function, refused):
    return Stepped, lambda: [Hooks(hook, function)], refused


def make_stepped(function, refused):
    return lambda: Stepped(function), list, refused


#: A module, its callbacks, and why clients cannot be trained at once, None where they can.
STEP_CASES = {
    "annealed per batch by a callback": make_hooked("on_train_batch_start", raise_beta, BATCH),
    "annealed per round by a callback": make_hooked("on_train_epoch_start", raise_beta, None),
    "annealed by global_step": make_stepped(
        lambda m, loss, _: loss / (1 + 0.01 * m.global_step), "trainer.global_step"
    ),
    "annealed by current_epoch": make_stepped(
        lambda m, loss, _: loss * (1 + 0.3 * m.current_epoch), None
    ),
    "annealed by an attribute that a step sets": make_stepped(
        loss_with_annealed_beta, "differs by"
    ),
    "a layer frozen by a callback": make_hooked("on_train_epoch_start", freeze_layer, None),
    "a timer": (Stepped, lambda: [Timer()], None),
    "a timer that clamps weights": (
        Stepped,
        lambda: [Clamps()],
        "Clamps defines on_train_batch_start",
    ),
    "accumulated": (
        Stepped,
        lambda: [GradientAccumulationScheduler({0: 2, 1: 3})],
        "gradients are accum",
    ),
    "a hook of the optimizer": (
        lambda: Stepped(optimizer=make_hooked_sgd),
        list,
        "SGD has hooks around its steps",
    ),
    "a generator of torch": make_stepped(
        make_mixup_loss(lambda m: torch.rand((), generator=m.torch_rng)), "random operation"
    ),
    "a generator of NumPy": make_stepped(
        make_mixup_loss(lambda m: m.numpy_rng.beta(0.4, 0.4)), "differs by"
    ),
    "NumPy's own generator": make_stepped(
        make_mixup_loss(lambda m: np.random.beta(0.4, 0.4)),  # noqa: NPY002
        "draws random numbers",
    ),
    "a masked loss": make_stepped(masked_loss, "vmap: .*dynamic shape"),
    "torchmetrics": make_stepped(loss_with_logged_metrics, None),
    "a layer under two names": (Twice, list, None),
    "an embedding with max_norm": (
        lambda: Stepped(None, Renormed()),
        list,
        "an embedding with max_norm",
    ),
}


class OfOtherPackage(nn.Linear):
    __module__ = "pytorch_lightning.core.module"
