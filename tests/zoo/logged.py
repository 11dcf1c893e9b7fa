"""Modules that train by what they have logged, or by what a validation has left."""

from typing import ClassVar

from zoo.program import Base


class LogsLoss(Base):
    """Logs its training loss, as every module does."""

    options: ClassVar[dict[str, bool]] = {}

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        self.log("train_loss", loss, **self.options)
        return loss

    def logged(self, name):
        logged_value = self.trainer.callback_metrics.get(name, 0.5)
        return 0.5 + float(logged_value)


class TrainsByValidationLoss(LogsLoss):
    """Weighs its loss by the logged validation loss, as self-paced learning does."""

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        return loss * self.logged("val_loss")


class TrainsByLossOfLastBatch(LogsLoss):
    """Weighs its loss by the logged one of the batch before, as loss balancing does."""

    options: ClassVar = {"on_step": True, "on_epoch": False}

    def training_step(self, batch, batch_idx):
        self.weight = self.logged("train_loss")
        return super().training_step(batch, batch_idx)


class WeighsWhileValidating(Base):
    """Sets the weight of its loss in validation steps, as tuning on the validation set does."""

    def validation_step(self, batch, batch_idx):
        super().validation_step(batch, batch_idx)
        self.weight = float(self.loss(batch))
