"""Kinds that no list of copied objects has had: what the standard library, torch and Lightning let a run hold."""

import contextvars
import enum
import functools
import logging
import queue
import tempfile
import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import torch
import torchmetrics
from torch import Tensor, nn
from torch.nn.utils import prune

from helpers.data import CLASSES
from helpers.hidden_state import RATE, Base, Counting, Kind
from helpers.kinds_of_modules import ANOTHER_MODEL, OptimizedBy


class Pruned(Base):
    def __init__(self) -> None:
        super().__init__()
        first_layer = self.net[0]
        prune.l1_unstructured(first_layer, "weight", amount=0.3)


class CachedProperty(Base):
    @functools.cached_property
    def factor(self) -> float:
        weight = self.net[0].weight
        return 1 + float(weight.abs().mean())

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.factor * self.loss(batch)


class WeakTable(Counting):
    """Counts by layer, in a table that does not keep the layers."""

    make_table: Any = weakref.WeakKeyDictionary

    def __init__(self) -> None:
        super().__init__()
        self.numbers = self.make_table()
        self.numbers[self.net[0]] = 0

    def next(self) -> float:
        self.numbers[self.net[0]] += 1
        return self.numbers[self.net[0]]


class WeakValues(Base):
    def __init__(self) -> None:
        super().__init__()
        self.layers = weakref.WeakValueDictionary({"last": self.net[3]})

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        weight = self.layers["last"].weight
        return self.loss(batch) + 0.1 * weight.square().sum()


class Proxy(Base):
    def __init__(self) -> None:
        super().__init__()
        self.last_layer = [weakref.proxy(self.net[3])]

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        (last_layer,) = self.last_layer
        return self.loss(batch) + 0.1 * last_layer.weight.square().sum()


@dataclass
class Numbers:
    steps: int = 0


class HyperparametersThatCount(Counting):
    def __init__(self, numbers: Numbers) -> None:
        super().__init__()
        self.save_hyperparameters()

    def next(self) -> float:
        self.hparams["numbers"].steps += 1
        return self.hparams["numbers"].steps


class Collection(Base):
    def __init__(self) -> None:
        super().__init__()
        accuracy = torchmetrics.Accuracy("multiclass", num_classes=CLASSES)
        metrics = {"accuracy": accuracy, "too": accuracy.clone()}
        self.scores = torchmetrics.MetricCollection(metrics)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        self.scores.update(self.net(x), y)
        self.log_dict(self.scores)

        accuracy = self.scores.compute()["too"]
        return self.loss(batch) * (1.5 - accuracy)


class AroundAnother(Base):
    """A LightningModule in a LightningModule, which counts."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = InnerModule()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.inner.scale(self.loss(batch))


class InnerModule(L.LightningModule):
    num_steps = 0

    def scale(self, loss: Tensor) -> Tensor:
        self.num_steps += 1
        return loss * (1 + 0.02 * self.num_steps)


class KeepsTheTrainer(L.Callback):
    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        self.parts_of_run = (trainer, pl_module)

    def on_train_batch_start(self, *_: Any) -> None:
        trainer, module = self.parts_of_run
        module.weight = 1 / (1 + 0.02 * trainer.global_step)


class WrappedOptimizer(torch.optim.Optimizer):
    """Holds another optimizer, and slows it down."""

    def __init__(self, parameters: Any) -> None:
        self.inner = torch.optim.Adam(parameters, RATE)
        self.num_steps = 0
        super().__init__(self.inner.param_groups, self.inner.defaults)
        self.inner.param_groups = self.param_groups

    def step(self, closure: Any = None) -> Any:
        self.num_steps += 1
        (group,) = self.param_groups
        group["lr"] = RATE / self.num_steps
        return self.inner.step(closure)


class Phase(enum.Enum):
    WARM_UP = 0.5
    FULL = 1.0


class Phases(Base):
    def __init__(self) -> None:
        super().__init__()
        self.phase = Phase.WARM_UP

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.phase.value * self.loss(batch)
        if loss < 0.4:
            self.phase = Phase.FULL
        return loss


NUMBER = contextvars.ContextVar("NUMBER", default=0)


class ContextCounter(Counting):
    def next(self) -> float:
        NUMBER.set(NUMBER.get() + 1)
        return NUMBER.get()


class ContextOfModule(Counting):
    def __init__(self) -> None:
        super().__init__()
        self.number = contextvars.ContextVar("number", default=1)

    def next(self) -> float:
        return self.number.get()


class ReplacedBuffer(Base):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("factor", torch.ones(()))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.factor = 0.9 * self.factor + 0.1 * loss.detach()
        return loss * self.factor


class MemoryMap(Counting):
    def __init__(self) -> None:
        super().__init__()
        path = Path(tempfile.mkdtemp()) / "numbers"
        self.numbers = np.memmap(
            path,
            np.float32,
            mode="w+",
            shape=(3,),
        )

    def next(self) -> float:
        self.numbers[0] += 1
        return float(self.numbers[0])


class Queue(Counting):
    """Its numbers pass through a queue, with its lock and its conditions."""

    def __init__(self) -> None:
        super().__init__()
        self.numbers: Any = queue.Queue()
        self.has_begun = threading.Event()
        self.condition = threading.Condition()
        self.numbers.put(0)

    def next(self) -> float:
        self.has_begun.set()
        with self.condition:
            number = self.numbers.get()
            self.numbers.put(number + 1)
        return number


class ThreadLocal(Counting):
    def __init__(self) -> None:
        super().__init__()
        self.numbers = threading.local()


class TiedWeights(Base):
    """Two layers are one parameter, and a list holds it, too."""

    def __init__(self) -> None:
        super().__init__()
        self.net.insert(3, nn.Linear(8, 8))
        self.net.insert(4, nn.Linear(8, 8))
        self.net[4].weight = self.net[3].weight
        self.tied = [self.net[3].weight]

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        (tied_weights,) = self.tied
        return self.loss(batch) + 0.1 * tied_weights.square().sum()


class ViewOfWeights(Base):
    """A tensor beside the parameters shares the memory of one of them."""

    def __init__(self) -> None:
        super().__init__()
        weights = self.net[3].weight.data
        self.first_weights = weights[:1]

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        factor = 1 + float(self.first_weights.square().sum())
        return factor * self.loss(batch)


class FlatWeights(Base):
    """All parameters are views of one tensor, which is clamped as a whole."""

    def __init__(self) -> None:
        super().__init__()
        parameters = list(self.net.parameters())
        self.flat = nn.utils.parameters_to_vector(parameters).detach()
        nn.utils.vector_to_parameters(self.flat, parameters)

    def on_before_zero_grad(self, optimizer: Any) -> None:
        self.flat.clamp_(-0.3, 0.3)


class HookOfTensor(Base):
    """The gradients of a parameter are halved by its own hook."""

    def __init__(self) -> None:
        super().__init__()
        weight = self.net[3].weight
        weight.register_hook(lambda gradient: 0.5 * gradient)


class HookAfterAccumulation(Base):
    def __init__(self) -> None:
        super().__init__()
        self.net[3].weight.register_post_accumulate_grad_hook(halve_gradient)


def halve_gradient(parameter: Tensor) -> None:
    assert parameter.grad is not None
    parameter.grad.mul_(0.5)


class NotedParameter(Base):
    """An attribute of a parameter scales its decay."""

    def __init__(self) -> None:
        super().__init__()
        self.net[3].weight.decay = 0.3  # type: ignore[union-attr]

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        for parameter in self.parameters():
            decay = getattr(parameter, "decay", 0.0)
            loss = loss + decay * parameter.square().sum()
        return loss


class ReplacedStep(Base):
    """A method of the object takes the place of one of the class."""

    def __init__(self) -> None:
        super().__init__()
        step = self.training_step
        self.num_steps = 0

        def slower_step(batch: Any, batch_idx: int) -> Tensor:
            self.num_steps += 1
            loss = step(batch, batch_idx)
            return loss / (1 + 0.02 * self.num_steps)

        self.training_step = slower_step  # type: ignore[method-assign]


class StepsInTheData(Counting):
    """The data module counts."""

    def next(self) -> float:
        data: Any = self.trainer.datamodule  # type: ignore[attr-defined]
        data.num_steps = getattr(data, "num_steps", 0) + 1
        return data.num_steps


class Singleton:
    """One object of the whole process, whose copies are itself."""

    number = 0

    def __reduce__(self) -> str:
        return "SINGLETON"


SINGLETON = Singleton()


class HoldsSingleton(Counting):
    def __init__(self) -> None:
        super().__init__()
        self.singleton = SINGLETON
        self.messages = logging.getLogger("steps")

    def next(self) -> float:
        self.singleton.number += 1
        self.messages.debug("one more")
        return self.singleton.number


class WrapsTheOptimizersStep(L.Callback):
    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        self.make_step: Callable[..., Any] = trainer.optimizers[0].step
        self.num_steps = 0
        trainer.optimizers[0].step = self.step

    def step(self, *arguments: Any, **options: Any) -> Any:
        self.num_steps += 1
        return self.make_step(*arguments, **options)


KINDS: dict[str, Kind] = {
    "a pruned layer": Kind(Pruned),
    "a cached property": Kind(CachedProperty),
    "a table of weak keys": Kind(WeakTable, outcome="by company"),
    "a table of weak values": Kind(
        WeakValues, outcome="refused", message="the module.layers.* cannot be pickled"
    ),
    "a weak proxy": Kind(Proxy),
    "hyperparameters that count": Kind(
        lambda: HyperparametersThatCount(Numbers()), outcome="by company"
    ),
    "a collection of metrics": Kind(Collection, outcome="by company"),
    "a module in a module": Kind(AroundAnother),
    "a callback that keeps the Trainer": Kind(callback=KeepsTheTrainer),
    "an optimizer around another": Kind(lambda: OptimizedBy(WrappedOptimizer)),
    "a state of an enumeration": Kind(Phases),
    "a global context variable": Kind(
        ContextCounter,
        outcome="doubt",
        message=ANOTHER_MODEL,
    ),
    "a context variable of the module": Kind(
        ContextOfModule, outcome="refused", message="the module.number .ContextVar. cannot be"
    ),
    "a buffer that is replaced": Kind(ReplacedBuffer),
    "a memory map": Kind(MemoryMap),
    "a queue, an event and a condition": Kind(Queue, outcome="by company"),
    "a value of a thread": Kind(
        ThreadLocal, outcome="refused", message="the module.numbers .* cannot be pickled"
    ),
    "tied weights": Kind(TiedWeights),
    "a view of weights": Kind(ViewOfWeights),
    "weights that are views": Kind(FlatWeights),
    "a hook of a tensor": Kind(HookOfTensor),
    "a hook after accumulation": Kind(HookAfterAccumulation),
    "an attribute of a parameter": Kind(NotedParameter),
    "a replaced method": Kind(ReplacedStep),
    "an attribute of the data module": Kind(StepsInTheData, outcome="by company"),
    "a singleton": Kind(
        HoldsSingleton,
        outcome="doubt",
        message=ANOTHER_MODEL,
    ),
    "a callback that wraps a step": Kind(callback=WrapsTheOptimizersStep),
}
