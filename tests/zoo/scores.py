"""Modules whose score is more than that of their weights: hooks set it, it is a logged value, or nothing is trained."""

import copy
import tempfile

import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from helpers.models import loop_of
from zoo.program import Base


class ValidatesWithAverage(Base):
    """Trains its weights, and is used with their moving average, which a list hides from the state_dict: EMA."""

    def __init__(self):
        super().__init__()
        self.average = [copy.deepcopy(self.net).eval()]

    def forward(self, x):
        (average,) = self.average
        return self.net(x) if self.training else average(x)

    @torch.no_grad()
    def on_train_batch_end(self, *_):
        (average,) = self.average
        earlier_state = average.state_dict()
        average_state = self.net.state_dict()
        for name, value in average_state.items():
            if value.is_floating_point():
                average_state[name] = 0.8 * earlier_state[name] + 0.2 * value
        average.load_state_dict(average_state)


class TunesItsTemperature(Base):
    """Divides its outputs by a number that follows from the validation loss, as calibration does."""

    temperature = 1.0

    def forward(self, x):
        return self.net(x) if self.training else self.net(x) / self.temperature

    def on_train_epoch_end(self):
        self.temperature = 0.3 + float(self.trainer.callback_metrics["val_loss"])


class WarmsUp(Base):
    """Counts its steps in a buffer, and has the whole loss from the twelfth on, as warm-ups do."""

    def __init__(self):
        super().__init__()
        num_steps = torch.zeros((), dtype=torch.long)
        self.register_buffer("num_steps", num_steps)

    def training_step(self, batch, batch_idx):
        self.num_steps.add_(1)
        return self.loss(batch) * min(1.0, float(self.num_steps) / 12)


class DivergesButForClient2(Base):
    """Has a loss of NaN at all clients but one, as broken sensors give: the others have one finite model, the first."""

    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        if loop_of(self).current_client != 2:
            return loss * float("nan")
        return loss


class DivergesInRound2(Base):
    """Has a loss of NaN in the second round at clients with few batches, as training on small data does."""

    max_batches_of_small_client = 4

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        is_small_client = self.trainer.num_training_batches <= self.max_batches_of_small_client
        if self.current_epoch == 1 and is_small_client:
            return loss * float("nan")
        return loss


class CountsValidationSteps(Base):
    """Trains less after five validation steps, which it counts, as patience written by hand does."""

    num_validations = 0

    def validation_step(self, batch, batch_idx):
        super().validation_step(batch, batch_idx)
        self.num_validations += 1
        if self.num_validations > 5:
            self.weight = 0.3


class CountsEvaluations(Base):
    """Trains more from its third round on by the number of batches that were evaluated, which its class counts."""

    first_round = 2
    evaluations = 0

    def forward(self, x):
        if not self.training:
            CountsEvaluations.evaluations += 1
        return super().forward(x)

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        if self.current_epoch < self.first_round:
            return loss
        return (1 + 0.01 * CountsEvaluations.evaluations) * loss


class CountsEvaluationsAtOnce(CountsEvaluations):
    """Trains more from its first round on."""

    first_round = 0


class EndsWithItsBest(Base):
    """Gets worse from its third round on, and ends with the best weights of a ModelCheckpoint that it holds."""

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        return loss if self.current_epoch < 2 else -0.3 * loss

    def configure_callbacks(self):
        self.checkpoint = ModelCheckpoint(tempfile.mkdtemp(), monitor="val_loss")
        return [self.checkpoint]

    def on_train_end(self):
        best = torch.load(self.checkpoint.best_model_path, weights_only=True)
        self.load_state_dict(best["state_dict"])
