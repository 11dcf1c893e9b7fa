"""LightningModules whose training depends on a state: of networks, optimizers, metrics, generators, and counters."""

import functools
import random
from collections.abc import Callable
from typing import Any, ClassVar

import numpy as np
import torch
import torchmetrics
from torch import Tensor, nn

from helpers.data import CLASSES
from helpers.hidden_state import RATE, Base, Kind

ANOTHER_MODEL = "another model than the run"


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
    "Lookahead that persists": Kind(make_lookahead, loop=persisting),
    "a global cache": Kind(GlobalCache, outcome="cached"),
    "weight norm by hooks": Kind(OldWeightNorm),
    "cumulative BatchNorm": Kind(CumulativeBatchNorm),
    "torchmetrics in steps": Kind(MetricsInSteps),
    "generators of four kinds": Kind(FourGenerators),
    "a frozen layer": Kind(FrozenLayer),
    "bf16-mixed": Kind(trainer={"precision": "bf16-mixed"}),
    "accumulated and clipped gradients": Kind(
        trainer={"accumulate_grad_batches": 2, "gradient_clip_val": 0.3},
        loop=lambda: {"optimizer_state": "persist", "local_epochs": 2},
    ),
    "outputs of a round that weigh the next one": Kind(WeighsByOutputs),
    "the Trainer's progress": Kind(ReadsProgress),
    "the logged validation loss": Kind(ReadsValidationLoss),
    "the logged loss of a round": Kind(
        ReadsLossOfRound,
        trainer={"logger": True},
    ),
    "a list of validation losses": Kind(KeepsValidationLosses),
    "`configure_optimizers` that counts": Kind(CountsItsOptimizers),
}
