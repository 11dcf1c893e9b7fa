"""Modules, callbacks and data with state that nothing declares, and plain federations of them.

:func:`serve` answers names of kinds with the utility of each coalition of three clients: a FederatedLoop with these
clients only, in a process of its own in which nothing else has happened.
"""

import itertools
import logging
import multiprocessing
import random
import tempfile
import threading
import warnings
import weakref
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import lightning as L
import numpy as np
import torch
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint, Timer
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from flsv import FederatedLoop, Reporting
from flsv.data import FederatedDataModule, SizePartitioner, Splits
from flsv.sampling import FixedCohort
from helpers.data import CLASSES, FEATURES, toy_sets
from helpers.fits import trainer_for, vector

SEED, ROUNDS, RATE = 5, 3, 0.1
MEMBERS = [s for k in (1, 2, 3) for s in itertools.combinations(range(3), k)]
entropy = nn.functional.cross_entropy


def data(sets: Callable[[], Any] = toy_sets) -> FederatedDataModule:
    return FederatedDataModule(sets(), SizePartitioner([4, 1, 2]), batch_size=8, splits=Splits(server_val=0.3))


class Base(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.net = nn.Sequential(nn.Linear(FEATURES, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, CLASSES))
        self.weight = 1.0

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)

    def loss(self, batch: Any) -> Tensor:
        return entropy(self.net(batch[0]), batch[1])

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.weight * self.loss(batch)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), RATE)


# ---- functions that hold the module


class Weak(Base):
    def __init__(self) -> None:
        super().__init__()
        self.me = weakref.ref(self)

    def loss(self, batch: Any) -> Tensor:
        return entropy(self.me().net(batch[0]), batch[1])  # type: ignore[union-attr]


class OfGenerator(Base):
    def __init__(self) -> None:
        super().__init__()

        def steps() -> Iterator[nn.Module]:
            while True:
                yield self.net

        self.nets = steps()

    def loss(self, batch: Any) -> Tensor:
        return entropy(next(self.nets)(batch[0]), batch[1])


# ---- what tensors carry


class BackwardHook(Base):
    def __init__(self) -> None:
        super().__init__()
        seen: list[int] = []

        def hook(layer: Any, into: Any, out: Any) -> Any:
            seen.append(1)
            return tuple(each if each is None else each * (1 + 0.1 / len(seen)) for each in into)

        self.net[3].register_full_backward_hook(hook)


# ---- state elsewhere

CALLS = 0
SHARED: dict[str, float] = {}
CONTEXT: ContextVar[int] = ContextVar("calls", default=0)
RANDOM = random.Random(7)
LOCAL = threading.local()


class Counting(Base):
    """Its loss grows with each call."""

    def next(self) -> float:
        raise NotImplementedError

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return (1 + 0.02 * self.next()) * self.loss(batch)


class Global(Counting):
    def next(self) -> float:
        global CALLS
        CALLS += 1
        return CALLS


class ClassAttribute(Counting):
    calls: ClassVar[int] = 0

    def next(self) -> float:
        type(self).calls += 1
        return self.calls


class IteratorOfCounts(Counting):
    def __init__(self) -> None:
        super().__init__()
        self.count = itertools.count()

    def next(self) -> float:
        return next(self.count)


class Closure(Counting):
    def __init__(self) -> None:
        super().__init__()
        calls = 0

        def more() -> int:
            nonlocal calls
            calls += 1
            return calls

        self.more = more

    def next(self) -> float:
        return self.more()


class OfContext(Counting):
    def next(self) -> float:
        CONTEXT.set(CONTEXT.get() + 1)
        return CONTEXT.get()


class OpenFile(Counting):
    def __init__(self) -> None:
        super().__init__()
        path = Path(tempfile.mkdtemp(), "numbers")
        path.write_bytes(bytes(range(256)) * 20)
        self.file = path.open("rb", buffering=0)

    def next(self) -> float:
        return self.file.read(1)[0]


class Doubled(torch.autograd.Function):
    calls = 0

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        Doubled.calls += 1
        return gradient * (1 + 0.02 * Doubled.calls)


class OwnGradient(Base):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return Doubled.apply(self.loss(batch))  # type: ignore[no-any-return]


class CountingSGD(torch.optim.SGD):
    calls = 0

    def step(self, closure: Any = None) -> Any:
        CountingSGD.calls += 1
        for group in self.param_groups:
            group["lr"] = RATE / (1 + 0.05 * CountingSGD.calls)
        return super().step(closure)


class OwnOptimizer(Base):
    def configure_optimizers(self) -> Any:
        return CountingSGD(self.parameters(), RATE)


class Augmented(TensorDataset):
    """Changes with each sample that is drawn."""

    drawn = 0

    def __getitem__(self, index: int) -> Any:
        x, y = super().__getitem__(index)
        self.drawn += 1
        return x + 0.3 * float(np.sin(self.drawn)), y


def augmented() -> tuple[Any, Any]:
    train, test = toy_sets()
    return Augmented(*train.tensors), test


# ---- callbacks


class Average(L.Callback):
    """A moving average of the weights, which takes their place while the module is not trained."""

    average: Any = None

    def on_train_epoch_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if self.average is not None:
            pl_module.load_state_dict(self.last)

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.last = {name: value.clone() for name, value in pl_module.state_dict().items()}
        old = self.average or self.last
        self.average = {n: 0.7 * old[n] + 0.3 * v if v.is_floating_point() else v.clone() for n, v in self.last.items()}
        pl_module.load_state_dict(self.average)


class AtTheEnd(L.Callback):
    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        with torch.no_grad():
            for parameter in pl_module.parameters():
                parameter.mul_(0.5)


class ShrinksAtTheEnd(Base):
    def on_train_end(self) -> None:
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.mul_(0.5)


def averaging() -> L.Callback:
    from lightning.pytorch.callbacks.weight_averaging import EMAWeightAveraging

    return EMAWeightAveraging(decay=0.8)


class StopsAndWeighs(EarlyStopping):
    def __init__(self) -> None:
        super().__init__("val_loss", patience=100)

    def on_validation_end(self, trainer: L.Trainer, pl_module: Any) -> None:
        super().on_validation_end(trainer, pl_module)
        pl_module.weight = float(trainer.callback_metrics["val_loss"])


class SavesAndWeighs(ModelCheckpoint):
    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: Any) -> None:
        super().on_train_epoch_end(trainer, pl_module)
        pl_module.weight = float(trainer.callback_metrics["val_loss"])


class TimesAndWeighs(Timer):
    def on_train_batch_start(self, trainer: L.Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        pl_module.weight = 1 / (1 + trainer.current_epoch + batch_idx)


class HoldsTheModule(L.Callback):
    """Sees the module through something else."""

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        self.reach = {"net": [lambda: pl_module.net]}

    def on_train_batch_end(self, *_: Any) -> None:
        with torch.no_grad():
            for parameter in self.reach["net"][0]().parameters():
                parameter.clamp_(-0.3, 0.3)


class RateAfterValidation(L.Callback):
    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        trainer.optimizers[0].param_groups[0]["lr"] = RATE * float(trainer.callback_metrics["val_loss"])


class RateAfterRound(L.Callback):
    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        trainer.optimizers[0].param_groups[0]["lr"] = RATE * float(trainer.callback_metrics["val_loss"])


class WeightAfterValidation(Base):
    def on_validation_epoch_end(self) -> None:
        self.weight = float(self.trainer.callback_metrics["val_loss"])


class WeightWhileValidating(Base):
    def validation_step(self, batch: Any, batch_idx: int) -> None:
        super().validation_step(batch, batch_idx)
        self.weight = float(self.loss(batch))


@dataclass
class Kind:
    """A module and what else its fit has.

    Args:
    """

    module: Callable[[], Any] = Base
    callback: Callable[[], L.Callback] | None = None
    sets: Callable[[], Any] = toy_sets
    trainer: dict[str, Any] = field(default_factory=dict)


KINDS: dict[str, Kind] = {
    "a weak reference": Kind(Weak),
    "a generator that holds the module": Kind(OfGenerator),
    "a backward hook that counts": Kind(BackwardHook),
    "a global": Kind(Global),
    "a class attribute": Kind(ClassAttribute),
    "an iterator": Kind(IteratorOfCounts),
    "a closure": Kind(Closure),
    "a context variable": Kind(OfContext),
    "an open file": Kind(OpenFile),
    "a class of autograd with state": Kind(OwnGradient),
    "an optimizer's class with state": Kind(OwnOptimizer),
    "a data set with state": Kind(sets=augmented),
    "an average swapped in after a round": Kind(callback=Average),
    "EMAWeightAveraging": Kind(callback=averaging),
    "a callback that changes weights at the end": Kind(callback=AtTheEnd),
    "a module that changes weights at the end": Kind(ShrinksAtTheEnd),
    "a callback that holds the module": Kind(callback=HoldsTheModule),
    "a subclass of EarlyStopping": Kind(callback=StopsAndWeighs),
    "a subclass of ModelCheckpoint": Kind(callback=SavesAndWeighs, trainer={"enable_checkpointing": True}),
    "a subclass of Timer": Kind(callback=TimesAndWeighs),
    "a rate set after validation": Kind(callback=RateAfterValidation),
    "a rate set after a round": Kind(callback=RateAfterRound),
    "a weight set after validation": Kind(WeightAfterValidation),
    "a weight set while validating": Kind(WeightWhileValidating),
}


def fitted(kind: Kind, folder: Path, **options: Any) -> tuple[FederatedLoop, Any]:
    loop = FederatedLoop(seed=SEED, reporting=Reporting(table=False), **options)
    callbacks = [] if kind.callback is None else [kind.callback()]
    module = kind.module()
    trainer_for(loop, folder, ROUNDS, callbacks=callbacks, **kind.trainer).fit(module, data(kind.sets))
    return loop, module


def utility(module: Any) -> float:
    dealt = data()
    dealt.setup("fit")
    x, y = (torch.cat(parts) for parts in zip(*dealt.val_dataloader()))
    module.eval()
    with torch.no_grad():
        return -float(entropy(module.net(x), y))


def alone(name: str, members: tuple[int, ...], pipe: Any) -> None:
    with tempfile.TemporaryDirectory() as folder:
        _, module = fitted(KINDS[name], Path(folder), sampler=FixedCohort(members))
    state = vector(module).tolist()
    pipe.send((utility(module), state))


def serve(names: Any) -> None:
    """In a process that trains nothing itself, until the names end."""
    warnings.simplefilter("ignore")
    logging.disable(logging.CRITICAL)
    fork = multiprocessing.get_context("fork")
    while name := names.recv():
        found = []
        for members in MEMBERS:
            ours, theirs = fork.Pipe()
            process = fork.Process(target=alone, args=(name, members, theirs))
            process.start()
            found.append(ours.recv())
            process.join()
        names.send({"utilities": [each[0] for each in found], "model": found[-1][1]})
