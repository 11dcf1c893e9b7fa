"""LightningModules whose training depends on a state of networks, optimizers, metrics and logged values."""

import copy
import functools
from typing import ClassVar

import torch
import torchmetrics
from timm.utils import AverageMeter
from torch import nn

from helpers.data import CLASSES
from helpers.hidden_state import RATE, Base, Kind, entropy

# ---- optimizers


class CountsInObject(torch.optim.SGD):
    """Counts its steps in an object of a library."""

    def __init__(self, parameters):
        super().__init__(parameters, RATE)
        self.meter = AverageMeter()

    def step(self, closure=None):
        self.meter.update(1.0)
        return super().step(closure)


class WithCountingOptimizer(Base):
    def configure_optimizers(self):
        return CountsInObject(self.parameters())


# ---- networks


class WithTeacher(Base):
    """Its teacher follows it, in a list and so beside its weights."""

    def __init__(self):
        super().__init__()
        self.teachers = [copy.deepcopy(self.net)]

    def training_step(self, batch, batch_idx):
        (teacher,) = self.teachers
        x = batch[0]
        targets = teacher(x).softmax(1).detach()

        followed_weights = self.net.parameters()
        for weight, followed_weight in zip(teacher.parameters(), followed_weights):
            weight.data.lerp_(followed_weight.data, 0.1)

        loss_of_teacher = entropy(self.net(x), targets)
        return self.loss(batch) + 0.3 * loss_of_teacher


class FlatWeights(Base):
    """All parameters are views of one tensor, which is clamped as a whole."""

    def __init__(self):
        super().__init__()
        parameters = list(self.net.parameters())
        self.flat = nn.utils.parameters_to_vector(parameters).detach()
        nn.utils.vector_to_parameters(self.flat, parameters)

    def on_before_zero_grad(self, optimizer):
        self.flat.clamp_(-0.3, 0.3)


class HooksThatCount(Base):
    decay = 1.0

    def __init__(self):
        super().__init__()
        self.counts = {"batches": 0}
        self.outputs = []
        self.net[0].register_forward_hook(self.scale)

    def scale(self, layer, inputs, output):
        num_batches = self.counts["batches"]
        return output * (1 + 0.01 * num_batches)

    def on_train_epoch_start(self):
        self.decay = 0.8**self.current_epoch

    def on_after_backward(self):
        self.counts["batches"] += 1

    def training_step(self, batch, batch_idx):
        loss = self.decay * self.weight * self.loss(batch)
        self.outputs.append(loss.detach())
        return loss


class ChangesItself(Base):
    """Changes its structure in its second step."""

    def __init__(self, *changes):
        super().__init__()
        self.changes = changes
        self.num_steps = 0

    def loss(self, batch):
        x, y = batch
        outputs = self.net(x)
        if hasattr(self, "added"):
            outputs = outputs + self.added(outputs)

        loss = entropy(outputs, y)
        weight = self.net[0].weight
        for anchor in vars(weight).values():
            loss = loss + (weight - anchor).square().sum()
        return loss

    def training_step(self, batch, batch_idx):
        self.num_steps += 1
        if self.num_steps == 2:
            for change in self.changes:
                change(self)
        return super().training_step(batch, batch_idx)


def freeze(module):
    module.net[0].requires_grad_(False)


def stop_tracking(module):
    module.net[1].eval()


def hook_forward(module):
    module.net[0].register_forward_hook(lambda layer, inputs, output: 1.5 * output)


def hook_gradient(module):
    module.net[3].weight.register_hook(lambda gradient: 0.1 * gradient)


def hook_accumulated_gradient(module):
    def shrink(parameter):
        assert parameter.grad is not None
        parameter.grad.mul_(0.1)

    module.net[3].weight.register_post_accumulate_grad_hook(shrink)


def set_attribute_of_parameter(module):
    weight = module.net[0].weight
    weight.anchor = weight.detach().clone()


def add_layer(module):
    module.added = nn.Dropout(0.0)


def replace_parameter(module):
    module.net[3].bias = nn.Parameter(torch.ones(CLASSES))


def replace_forward(module):
    layer = module.net[3]
    layer.forward = lambda x: 1.5 * nn.functional.linear(x, layer.weight, layer.bias)


CHANGES = (
    freeze,
    stop_tracking,
    hook_forward,
    hook_gradient,
    hook_accumulated_gradient,
    set_attribute_of_parameter,
    add_layer,
    replace_parameter,
    replace_forward,
)


# ---- metrics, and what is logged


class MetricsInSteps(Base):
    def __init__(self):
        super().__init__()
        self.accuracy = torchmetrics.Accuracy("multiclass", num_classes=CLASSES)
        self.mean_loss = torchmetrics.MeanMetric()

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = self.loss(batch)

        self.accuracy.update(self.net(x), y)
        self.mean_loss.update(loss.detach())
        self.log("accuracy", self.accuracy)

        factor_by_accuracy = 1.5 - self.accuracy.compute()
        factor_by_loss = 0.5 + self.mean_loss.compute()
        return loss * factor_by_accuracy * factor_by_loss


class ReadsProgress(Base):
    def training_step(self, batch, batch_idx):
        num_batches = self.trainer.fit_loop.epoch_loop.total_batch_idx
        factor = 1 + 0.02 * num_batches + 0.01 * self.global_step
        return factor * self.loss(batch)


class LogsLoss(Base):
    options: ClassVar[dict[str, bool]] = {}

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        self.log("train_loss", loss, **self.options)
        return loss

    def logged(self, name):
        logged_value = self.trainer.callback_metrics.get(name, 0.5)
        return 0.5 + float(logged_value)


class ReadsValidationLoss(LogsLoss):
    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        return loss * self.logged("val_loss")


class ReadsLossOfBatch(LogsLoss):
    options: ClassVar = {"on_step": True, "on_epoch": False}

    def training_step(self, batch, batch_idx):
        self.weight = self.logged("train_loss")
        return super().training_step(batch, batch_idx)


class WeightWhileValidating(Base):
    def validation_step(self, batch, batch_idx):
        super().validation_step(batch, batch_idx)
        self.weight = float(self.loss(batch))


KINDS = {
    "a teacher in a list": Kind(WithTeacher, outcome="by company", passes="module.teachers"),
    "weights that are views": Kind(FlatWeights, passes="module.flat"),
    "a hook of a layer, and hooks of the module": Kind(HooksThatCount),
    "an optimizer that holds an object": Kind(WithCountingOptimizer, passes="optimizers.0.meter"),
    "bf16-mixed": Kind(trainer={"precision": "bf16-mixed"}),
    "the Trainer's progress": Kind(ReadsProgress, outcome="by company"),
    "torchmetrics in steps": Kind(MetricsInSteps, outcome="by company"),
    "the logged validation loss": Kind(ReadsValidationLoss),
    "the logged loss of a batch": Kind(ReadsLossOfBatch, outcome="by company"),
    "a weight set while validating": Kind(WeightWhileValidating),
    "a structure that training changes": Kind(functools.partial(ChangesItself, *CHANGES)),
}
