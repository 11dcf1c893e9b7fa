"""Modules and callbacks that train by what hooks do, and data modules that have hooks of their own."""

import lightning as L
import torch
from lightning.pytorch.callbacks import LambdaCallback, ModelCheckpoint
from torch import nn

from zoo.program import Base, Sets, Small, make_images


class KnowsItsClasses(Sets):
    """Has an attribute that the module reads, and scales batches when they reach the device."""

    outputs = 3

    def on_after_batch_transfer(self, batch, dataloader_idx):
        x, y = batch
        return 0.5 * x, y


def make_images_with_classes():
    images = make_images()
    return KnowsItsClasses(images.train, *images.val)


class UsesMostHooks(Small):
    """Makes its layers in ``configure_model`` of what the data module says, and trains by a dozen further hooks, as
    configurable frameworks on top of Lightning do."""

    def __init__(self, dropout=0.2):
        super().__init__(lambda o: torch.optim.lr_scheduler.ExponentialLR(o, 0.9))
        self.save_hyperparameters()
        self.net = None
        self.visits = []

    def configure_model(self):
        if self.net is None:
            torch.manual_seed(0)
            num_outputs = self.trainer.datamodule.outputs
            self.net = nn.Sequential(
                nn.Flatten(),
                nn.Linear(64, 12),
                nn.ReLU(),
                nn.Dropout(self.hparams.dropout),
                nn.Linear(12, num_outputs),
            )

    def configure_callbacks(self):
        def note_epoch(trainer, module):
            module.visits.append("callback")

        return [LambdaCallback(on_train_epoch_start=note_epoch)]

    def on_fit_start(self):
        self.register_buffer("scale", torch.full((), 0.5), persistent=False)

    def on_train_epoch_start(self):
        self.visits.append(f"epoch {self.current_epoch}")

    def on_before_batch_transfer(self, batch, dataloader_idx):
        x, y = batch
        return x.float() * self.scale, y

    def training_step(self, batch, batch_idx):
        return self.loss(batch) * (1 + self.current_epoch)

    def on_after_backward(self):
        for parameter in self.parameters():
            parameter.grad.mul_(0.5)

    def configure_gradient_clipping(self, optimizer, gradient_clip_val=None, **kwargs):
        self.clip_gradients(optimizer, gradient_clip_val=0.1, gradient_clip_algorithm="norm")

    def lr_scheduler_step(self, scheduler, metric):
        scheduler.step()

    def on_save_checkpoint(self, checkpoint):
        checkpoint["visits"] = self.visits

    def on_load_checkpoint(self, checkpoint):
        self.visits = checkpoint["visits"]


class FetchesItsBatches(Small):
    """Gets its batches from an iterator itself, as overlapping transfers do."""

    def training_step(self, dataloader_iter):
        return self.loss(next(dataloader_iter)[0])


class CountsInHooks(Base):
    """Scales a layer's output by a number of batches, and the loss by the epoch, as annealing by hooks does."""

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


class ScalesByItsCounts(L.Callback):
    """Weighs the loss and shrinks weights by how many batches and epochs it has seen, as schedules in callbacks do."""

    def __init__(self):
        self.num_batches = 0
        self.num_rounds = 0

    def on_train_batch_start(self, trainer, pl_module, *_):
        self.num_batches += 1
        divisor = 1 + 0.02 * self.num_batches
        pl_module.weight = 1 / divisor

    @torch.no_grad()
    def on_train_epoch_end(self, trainer, pl_module):
        self.num_rounds += 1
        for parameter in pl_module.parameters():
            factor = 1 - 0.03 * self.num_rounds
            parameter.mul_(factor)


class ActsIfAccurate(L.Callback):
    """Adds noise to gradients, and lowers the rate of a round after an accurate one, which not all coalitions have."""

    num_hits = 0
    num_samples = 0

    def on_after_backward(self, trainer, pl_module):
        for parameter in pl_module.parameters():
            parameter.grad.add_(torch.randn_like(parameter.grad), alpha=0.01)

    @torch.no_grad()
    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        x, y = batch
        self.num_hits += int((pl_module(x).argmax(1) == y).sum())
        self.num_samples += len(y)

    def on_train_epoch_end(self, trainer, pl_module):
        is_accurate = self.num_hits > 0.5 * self.num_samples
        for group in trainer.optimizers[0].param_groups:
            group["lr"] = 0.02 if is_accurate else 0.1
        self.num_hits = self.num_samples = 0


class WrapsTheOptimizersStep(L.Callback):
    """Replaces the optimizer's ``step`` by one that counts, as profilers do."""

    def on_fit_start(self, trainer, pl_module):
        self.make_step = trainer.optimizers[0].step
        self.num_steps = 0
        trainer.optimizers[0].step = self.step

    def step(self, *arguments, **options):
        self.num_steps += 1
        return self.make_step(*arguments, **options)


class WeighsAfterSaving(ModelCheckpoint):
    """Weighs the loss by the validated one after it has saved, as subclasses of ModelCheckpoint add to their base."""

    def on_train_epoch_end(self, trainer, pl_module):
        super().on_train_epoch_end(trainer, pl_module)
        pl_module.weight = float(trainer.callback_metrics["val_loss"])


def make_weight_averaging():
    from lightning.pytorch.callbacks.weight_averaging import EMAWeightAveraging

    return EMAWeightAveraging(decay=0.8)
