"""Modules whose score is more than that of their weights: hooks set it, it is a logged value, or nothing is trained."""

import copy
import tempfile

import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from flsv import FederatedLoop
from helpers.hidden_state import Base, Kind


class ValidatesWithAverage(Base):
    """Is trained with its weights, and used with their moving average, which is no part of its state."""

    def __init__(self):
        super().__init__()
        self.average = [copy.deepcopy(self.net).eval()]

    def forward(self, x):
        return self.net(x) if self.training else self.average[0](x)

    @torch.no_grad()
    def on_train_batch_end(self, *_):
        earlier_state = self.average[0].state_dict()
        average_state = {}
        for name, value in self.net.state_dict().items():
            if value.is_floating_point():
                average_state[name] = 0.8 * earlier_state[name] + 0.2 * value
            else:
                average_state[name] = value
        self.average[0].load_state_dict(average_state)


class TunesItsTemperature(Base):
    """Its outputs are divided by a number that follows from the validation loss."""

    temperature = 1.0

    def forward(self, x):
        return self.net(x) if self.training else self.net(x) / self.temperature

    def on_train_epoch_end(self):
        self.temperature = 0.3 + float(self.trainer.callback_metrics["val_loss"])


class WarmsUp(Base):
    """Counts its steps, and has the whole loss from the twelfth on."""

    def __init__(self):
        super().__init__()
        self.register_buffer(
            "steps",
            torch.zeros((), dtype=torch.long),
        )

    def training_step(self, batch, batch_idx):
        steps = self.steps
        steps += 1
        return self.loss(batch) * min(1.0, float(steps) / 12)


class DivergesButForClient2(Base):
    """A federation of the others has no finite model but its first."""

    def training_step(self, batch, batch_idx):
        callbacks = self.trainer.callbacks
        (loop,) = (part for part in callbacks if isinstance(part, FederatedLoop))
        loss = self.loss(batch)
        if loop.current_client in (0, 1):
            return loss * float("nan")
        return loss


class PatienceInSteps(Base):
    """Trains less after five validations, which its validation steps count."""

    num_validations = 0

    def validation_step(self, batch, batch_idx):
        super().validation_step(batch, batch_idx)
        self.num_validations += 1
        if self.num_validations > 5:
            self.weight = 0.3


class EndsWithItsBest(Base):
    """Gets worse from its third round on, and ends with the weights that its ModelCheckpoint has found best."""

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        return loss if self.current_epoch < 2 else -0.3 * loss

    def configure_callbacks(self):
        return [ModelCheckpoint(tempfile.mkdtemp(), monitor="val_loss")]

    def on_train_end(self):
        best = torch.load(
            self.trainer.checkpoint_callback.best_model_path,
            weights_only=True,
        )
        self.load_state_dict(best["state_dict"])


class HoldsItsCheckpoint(EndsWithItsBest):
    """Likewise, and no trainer is asked for the ModelCheckpoint, which it holds."""

    def configure_callbacks(self):
        (self.checkpoint,) = super().configure_callbacks()
        return [self.checkpoint]

    def on_train_end(self):
        best = torch.load(self.checkpoint.best_model_path, weights_only=True)
        self.load_state_dict(best["state_dict"])


def epochs_of_each_client():
    return {"local_epochs": {"0": 1, "1": 3, "2": 2}}


KINDS = {
    "average, outputs": Kind(ValidatesWithAverage),
    "temperature, logged": Kind(TunesItsTemperature, performance="val_loss"),
    "diverging members": Kind(DivergesButForClient2),
    "patience in validation steps": Kind(PatienceInSteps, rounds=6),
    "best weights of its own checkpoint": Kind(HoldsItsCheckpoint, rounds=4),
    "a counter and epochs of each client": Kind(WarmsUp, loop=epochs_of_each_client),
}
