"""LightningModules whose training depends on a state: of networks, optimizers, metrics, generators, and counters."""

import collections
import copy
import functools
import itertools
import os
import random
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import numpy as np
import torch
import torchmetrics
from torch import Tensor, nn
from torch.nn.utils import parametrizations

from helpers.data import CLASSES, FEATURES
from helpers.hidden_state import RATE, Base, Counting, Kind, entropy

ANOTHER_MODEL = "another model than the run"


class Manual(Base):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def step_by(self, optimizer: Any, loss: Tensor) -> None:
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()


class AdversarialNetworks(Manual):
    """Its critic is trained in every second batch."""

    def __init__(self) -> None:
        super().__init__()
        self.critic = nn.Sequential(
            nn.Linear(FEATURES, 4),
            nn.Tanh(),
            nn.Linear(4, 1),
        )
        self.num_batches = 0

    def configure_optimizers(self) -> Any:
        adam = torch.optim.Adam(self.net.parameters(), 0.01)
        sgd = torch.optim.SGD(
            self.critic.parameters(),
            0.05,
            momentum=0.9,
        )
        return [adam, sgd]

    def training_step(self, batch: Any, batch_idx: int) -> None:
        net_optimizer, critic_optimizer = self.optimizers()  # type: ignore[misc]
        x = batch[0]
        if self.num_batches % 2 == 0:
            noise = torch.randn_like(x)
            mean_score = self.critic(x).mean()
            mean_score_of_noise = self.critic(noise).mean()
            self.step_by(critic_optimizer, mean_score - mean_score_of_noise)
        self.num_batches += 1

        penalty = 0.05 * self.critic(x).mean()
        loss = self.loss(batch) + penalty
        self.step_by(net_optimizer, loss)


def ascend(parameters: list[nn.Parameter]) -> list[Tensor]:
    """Move parameters towards a larger loss. Return by how much."""
    offsets = []
    for parameter in parameters:
        assert parameter.grad is not None
        norm = parameter.grad.norm() + 1e-9
        offset = 0.05 * parameter.grad / norm
        offsets.append(offset)
        parameter.data.add_(offset)
    return offsets


class SharpnessByHand(Manual):
    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer: Any = self.optimizers()
        parameters = list(self.net.parameters())
        optimizer.zero_grad()
        self.manual_backward(self.loss(batch))
        offsets = ascend(parameters)

        optimizer.zero_grad()
        self.manual_backward(self.loss(batch))
        for parameter, offset in zip(parameters, offsets):
            parameter.data.sub_(offset)
        optimizer.step()


class SharpnessOptimizer(torch.optim.Optimizer):
    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {})
        self.sgd = torch.optim.SGD(
            self.param_groups,
            RATE,
            momentum=0.9,
        )

    def step(self, closure: Any = None) -> Any:
        loss = closure()
        parameters = self.param_groups[0]["params"]
        offsets = ascend(parameters)

        closure()
        for parameter, offset in zip(parameters, offsets):
            parameter.data.sub_(offset)
        self.sgd.step()
        return loss


def copies_of(parameters: Any) -> list[Tensor]:
    copies = []
    for parameter in parameters:
        copied_weights = parameter.detach().clone()
        copies.append(copied_weights)
    return copies


class Lookahead(torch.optim.SGD):
    """Every third step ends half the way back to the slow weights."""

    num_steps = 0
    slow_weights: Any = None

    def step(self, closure: Any = None) -> Any:
        parameters = self.param_groups[0]["params"]
        if self.slow_weights is None:
            self.slow_weights = copies_of(parameters)

        loss = super().step(closure)
        self.num_steps += 1
        if self.num_steps % 3 == 0:
            for weights, parameter in zip(self.slow_weights, parameters):
                weights.lerp_(parameter.detach(), 0.5)
                parameter.data.copy_(weights)
        return loss


class OptimizedBy(Base):
    def __init__(self, make_optimizer: Callable[[Any], Any]) -> None:
        super().__init__()
        self.make_optimizer = make_optimizer

    def configure_optimizers(self) -> Any:
        return self.make_optimizer(self.parameters())


class AverageOfWeights:
    def __init__(self, net: nn.Module) -> None:
        self.weights = copies_of(net.parameters())

    def update(self, net: nn.Module) -> Tensor:
        """Follow the weights, and return the squared distance to them."""
        distance = torch.zeros(())
        for average, weight in zip(self.weights, net.parameters()):
            average.lerp_(weight.detach(), 0.2)
            difference = weight - average
            distance = distance + difference.square().sum()
        return distance


class NearItsAverage(Base):
    def __init__(self) -> None:
        super().__init__()
        self.average = AverageOfWeights(self.net)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        distance = self.average.update(self.net)
        return self.loss(batch) + 0.05 * distance


class WithTeacher(Base):
    """Its teacher follows it, in a list and so beside its weights."""

    def __init__(self) -> None:
        super().__init__()
        self.teachers = [copy.deepcopy(self.net)]

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        (teacher,) = self.teachers
        x = batch[0]
        targets = teacher(x).softmax(1).detach()

        followed_weights = self.net.parameters()
        for weight, followed_weight in zip(teacher.parameters(), followed_weights):
            weight.data.lerp_(followed_weight.data, 0.1)

        loss_of_teacher = entropy(self.net(x), targets)
        return self.loss(batch) + 0.3 * loss_of_teacher


class RecentLosses(Base):
    def __init__(self) -> None:
        super().__init__()
        self.recent = collections.deque([1.0], maxlen=5)
        self.losses: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        recent_loss = float(np.mean(self.recent))
        num_losses = len(self.losses)
        factor = 1 + 0.3 * recent_loss + 0.01 * num_losses

        self.recent.append(float(loss))
        self.losses.append(float(loss))

        return factor * loss


@functools.cache
def count_misses(key: float) -> int:
    return count_misses.cache_info().misses


class CacheThatCounts(Base):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        total = float(batch[0].sum())
        misses = count_misses(round(total, 3))
        factor = 1 + 0.05 * misses
        return factor * self.loss(batch)


class SameAsEverything(list):
    """Key of a cache that all weights have in common."""

    def __hash__(self) -> int:  # type: ignore[override]
        return 0

    def __eq__(self, key: object) -> bool:
        return True


@functools.cache
def mean_of_first_weights(round_index: int, weights: SameAsEverything) -> float:
    first_weights = weights[0]
    return float(first_weights.abs().mean())


class CacheOfWeights(Base):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        first_weights = self.net[0].weight.detach()
        weights = SameAsEverything([first_weights])
        factor = 0.5 + mean_of_first_weights(self.current_epoch, weights)
        return factor * self.loss(batch)


LOSSES_BY_ROUND: dict[int, float] = {}


class GlobalCache(Base):
    """The loss that a round began with divides the others of that round."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        first_loss = LOSSES_BY_ROUND.setdefault(self.current_epoch, float(loss))
        return loss / (1 + first_loss)


class OldWeightNorm(Base):
    def __init__(self) -> None:
        super().__init__()
        last_layer = self.net[3]
        self.net[3] = nn.utils.weight_norm(last_layer)


class Parametrized(Base):
    def __init__(self) -> None:
        super().__init__()
        last_layer = self.net[3]
        self.net[3] = parametrizations.weight_norm(last_layer)

        first_layer = self.net[0]
        self.net[0] = parametrizations.orthogonal(first_layer)


class CumulativeBatchNorm(Base):
    def __init__(self) -> None:
        super().__init__()
        self.net[1] = nn.BatchNorm1d(8, momentum=None)


class MetricsInSteps(Base):
    def __init__(self) -> None:
        super().__init__()
        self.accuracy = torchmetrics.Accuracy("multiclass", num_classes=CLASSES)
        self.mean_loss = torchmetrics.MeanMetric()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        loss = self.loss(batch)

        self.accuracy.update(self.net(x), y)
        self.mean_loss.update(loss.detach())
        self.log("accuracy", self.accuracy)

        factor_by_accuracy = 1.5 - self.accuracy.compute()
        factor_by_loss = 0.5 + self.mean_loss.compute()
        return loss * factor_by_accuracy * factor_by_loss


class FourGenerators(Base):
    def __init__(self) -> None:
        super().__init__()
        self.generator = torch.Generator().manual_seed(1)
        self.numpy_generator = np.random.default_rng(1)
        self.python_generator = random.Random(1)
        old_generator = np.random.RandomState(3)
        self.old_generators = {"old": [old_generator]}

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        (old_generator,) = self.old_generators["old"]
        noise = torch.randn(x.shape, generator=self.generator)
        numbers = [
            self.numpy_generator.random(),
            self.python_generator.random(),
            old_generator.rand(),
            random.random(),
            np.random.rand(),  # noqa: NPY002
        ]
        noisy_batch = (x + 0.1 * noise, y)
        factor = 1 + 0.1 * sum(numbers)
        return self.loss(noisy_batch) * factor


class ClassCounter(Counting):
    num_steps = 0

    def next(self) -> float:
        ClassCounter.num_steps += 1
        return ClassCounter.num_steps


class IteratorCounter(Counting):
    def __init__(self) -> None:
        super().__init__()
        self.numbers = itertools.count(1)

    def next(self) -> float:
        return next(self.numbers)


class GeneratorCounter(IteratorCounter):
    def __init__(self) -> None:
        super().__init__()

        def count() -> Iterator[int]:
            yield from range(10**9)

        self.numbers = count()  # type: ignore[assignment]


class Slots:
    __slots__ = ("number",)

    def __init__(self) -> None:
        self.number = 0


class SlotsCounter(Counting):
    def __init__(self) -> None:
        super().__init__()
        self.slots = Slots()

    def next(self) -> float:
        self.slots.number += 1
        return self.slots.number


class EnvironmentCounter(Counting):
    def next(self) -> float:
        previous_number = os.environ.get("FLSV_TEST_STEPS", 0)
        number = int(previous_number) + 1
        os.environ["FLSV_TEST_STEPS"] = str(number)
        return number


class CarriesState(Base):
    """A recurrent state, None at first, and a bank of outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.state: Any = None
        self.bank = torch.zeros(4, CLASSES)
        self.num_outputs = 0

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        mean_output = self.bank.mean(0)
        outputs = self.net(x) + 0.1 * mean_output
        if self.state is not None:
            outputs = outputs + 0.2 * self.state

        self.state = outputs.mean(0).detach()
        row = self.num_outputs % 4
        self.bank[row] = self.state
        self.num_outputs += 1

        return entropy(outputs, y)


class FrozenLayer(Base):
    def __init__(self) -> None:
        super().__init__()
        self.net[0].requires_grad_(False)


class HooksThatCount(Base):
    def __init__(self) -> None:
        super().__init__()
        self.counts = {"batches": 0}
        self.outputs: list[Tensor] = []
        self.net[0].register_forward_hook(self.scale)

    def scale(self, layer: nn.Module, inputs: Any, output: Tensor) -> Tensor:
        num_batches = self.counts["batches"]
        return output * (1 + 0.01 * num_batches)

    def on_train_epoch_start(self) -> None:
        self.decay = 0.8**self.current_epoch

    def on_after_backward(self) -> None:
        self.counts["batches"] += 1

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.decay * self.weight * self.loss(batch)
        self.outputs.append(loss.detach())
        return loss


class WeighsByOutputs(HooksThatCount):
    def on_train_epoch_end(self) -> None:
        mean_output = torch.stack(self.outputs).mean()
        self.weight = 0.5 + float(mean_output)
        self.outputs.clear()


class DecaysAtTheEnd(Base):
    @torch.no_grad()
    def on_train_epoch_end(self) -> None:
        for parameter in self.parameters():
            parameter.mul_(0.9)


class ReadsProgress(Base):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        num_batches = self.trainer.fit_loop.epoch_loop.total_batch_idx
        factor = 1 + 0.02 * num_batches + 0.01 * self.global_step
        return factor * self.loss(batch)


class LogsLoss(Base):
    options: ClassVar[dict[str, bool]] = {}

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.log("train_loss", loss, **self.options)
        return loss

    def logged(self, name: str) -> float:
        logged_value = self.trainer.callback_metrics.get(name, 0.5)
        return 0.5 + float(logged_value)


class ReadsValidationLoss(LogsLoss):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        return loss * self.logged("val_loss")


class ReadsLossOfRound(LogsLoss):
    options: ClassVar = {"on_step": True, "on_epoch": True}

    def on_train_epoch_start(self) -> None:
        self.weight = self.logged("train_loss_epoch")


class ReadsLossOfBatch(LogsLoss):
    options: ClassVar = {"on_step": True, "on_epoch": False}

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.weight = self.logged("train_loss")
        return super().training_step(batch, batch_idx)


class WeighsByBestLoss(LogsLoss):
    best_loss = 9.0

    def on_validation_epoch_end(self) -> None:
        loss = self.logged("val_loss")
        self.best_loss = min(self.best_loss, loss)
        self.weight = self.best_loss


class KeepsValidationLosses(Base):
    def __init__(self) -> None:
        super().__init__()
        self.losses: list[float] = []

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        super().validation_step(batch, batch_idx)
        loss = self.loss(batch)
        self.losses.append(float(loss))

    def on_train_epoch_start(self) -> None:
        if self.losses:
            self.weight = 0.2 + self.losses[-1]


class CountsItsOptimizers(Base):
    num_optimizers = 0

    def configure_optimizers(self) -> Any:
        self.num_optimizers += 1
        rate = RATE / (1 + 0.2 * self.num_optimizers)
        return torch.optim.SGD(self.parameters(), rate)


def persisting() -> dict[str, Any]:
    return {"optimizer_state": "persist"}


def make_lookahead() -> Any:
    return OptimizedBy(functools.partial(Lookahead, lr=RATE))


KINDS: dict[str, Kind] = {
    "two adversarial networks": Kind(AdversarialNetworks),
    "sharpness-aware steps by hand": Kind(SharpnessByHand),
    "an optimizer that calls its closure twice": Kind(lambda: OptimizedBy(SharpnessOptimizer)),
    "Lookahead": Kind(make_lookahead),
    "Lookahead that persists": Kind(make_lookahead, loop=persisting),
    "an average of weights in an attribute": Kind(NearItsAverage),
    "a teacher in a list": Kind(WithTeacher, outcome="by company"),
    "a deque and a list": Kind(RecentLosses),
    "`functools.cache` that counts": Kind(CacheThatCounts, outcome="cached"),
    "`functools.cache` of weights": Kind(CacheOfWeights, outcome="cached"),
    "a global cache": Kind(GlobalCache, outcome="cached"),
    "weight norm by hooks": Kind(OldWeightNorm),
    "weight norm and orthogonal by parametrizations": Kind(Parametrized),
    "cumulative BatchNorm": Kind(CumulativeBatchNorm),
    "torchmetrics in steps": Kind(MetricsInSteps, outcome="by company"),
    "generators of four kinds": Kind(FourGenerators),
    "a counter of the class": Kind(
        ClassCounter,
        outcome="doubt",
        message=ANOTHER_MODEL,
    ),
    "`itertools.count`": Kind(IteratorCounter, outcome="by company"),
    "a generator that counts": Kind(
        GeneratorCounter,
        outcome="refused",
        message="the module.numbers .generator. cannot be",
    ),
    "an object with slots": Kind(SlotsCounter),
    "an environment variable": Kind(
        EnvironmentCounter,
        outcome="doubt",
        message=ANOTHER_MODEL,
    ),
    "a carried state": Kind(CarriesState),
    "a frozen layer": Kind(FrozenLayer),
    "bf16-mixed": Kind(trainer={"precision": "bf16-mixed"}),
    "accumulated and clipped gradients": Kind(
        trainer={"accumulate_grad_batches": 2, "gradient_clip_val": 0.3},
        loop=lambda: {"optimizer_state": "persist", "local_epochs": 2},
    ),
    "a hook of a layer, and hooks of the module": Kind(HooksThatCount),
    "outputs of a round that weigh the next one": Kind(WeighsByOutputs),
    "weights that decay after a round": Kind(DecaysAtTheEnd),
    "the Trainer's progress": Kind(ReadsProgress, outcome="by company"),
    "the logged validation loss": Kind(ReadsValidationLoss),
    "the logged loss of a round": Kind(
        ReadsLossOfRound,
        trainer={"logger": True},
    ),
    "the logged loss of a batch": Kind(ReadsLossOfBatch, outcome="by company"),
    "the best validation loss": Kind(WeighsByBestLoss),
    "a list of validation losses": Kind(KeepsValidationLosses),
    "`configure_optimizers` that counts": Kind(CountsItsOptimizers),
}
