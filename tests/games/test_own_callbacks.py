"""What the callbacks of a module's ``configure_callbacks`` log is what the module logs."""

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from torch import Tensor, nn
from torchmetrics import MeanMetric

from flsv.metrics import ShadowShapley
from helpers import refused
from helpers.coalitions_by_hand import make_shadow_loop, make_three_clients
from helpers.fits import trainer_for
from helpers.models import Plainest

pytestmark = pytest.mark.filterwarnings("ignore")


def size_of_weights(module) -> Tensor:
    last_layer = module.net[4]
    return last_layer.weight.detach().abs().mean()


class LogsSize(L.Callback):
    """Logs a function of the weights, and counts its validations."""

    def __init__(self):
        self.num_validations = 0

    def on_validation_epoch_end(self, trainer, pl_module):
        if not trainer.sanity_checking:
            self.num_validations += 1
        self.log("size", size_of_weights(pl_module))


class Evaluator(nn.Module, L.Callback):
    """A part of the module that collects outputs in a metric, as an evaluator of a library does."""

    def __init__(self):
        super().__init__()
        self.mean = MeanMetric()
        self.num_validations = 0

    def on_validation_batch_end(self, trainer, pl_module, outputs, *_):
        self.mean.update(outputs)

    def on_validation_epoch_end(self, trainer, pl_module):
        if not trainer.sanity_checking:
            self.num_validations += 1
        pl_module.log("size", self.mean.compute())
        self.mean.reset()


class MakesCallbacks(Plainest):
    def configure_callbacks(self):
        return [LogsSize(), ModelCheckpoint(), EarlyStopping("size", patience=99)]


class MakesOne(Plainest):
    def configure_callbacks(self):
        return LogsSize()


class HasEvaluator(Plainest):
    def __init__(self):
        super().__init__()
        self.evaluator = Evaluator()

    def configure_callbacks(self):
        return [self.evaluator]

    def validation_step(self, batch, batch_idx):
        return size_of_weights(self)


def make_loop():
    metric = ShadowShapley(coalitions="all", performance="size", mode="max")
    return make_shadow_loop(metric)


@pytest.mark.slow
@pytest.mark.parametrize("kind", [MakesCallbacks, MakesOne, HasEvaluator])
def test_values_by_what_own_callbacks_log_sum_to_the_gain(kind, tmp_path):
    torch.manual_seed(0)
    module = kind()
    size_before = size_of_weights(module)
    loop = make_loop()
    trainer = trainer_for(loop, tmp_path, rounds=2, enable_checkpointing=True)

    trainer.fit(module, make_three_clients())

    size_after = size_of_weights(module)
    gain = float(size_after - size_before)
    values = loop.contributions["shadow"]
    assert float(values.sum()) == pytest.approx(gain, abs=1e-6)
    assert len(set(values.tolist())) == 3

    logged_size = trainer.callback_metrics["size"]
    assert logged_size == pytest.approx(float(size_after))

    counting_callbacks = []
    for callback in trainer.callbacks:
        if hasattr(callback, "num_validations"):
            counting_callbacks.append(callback)
    (counting_callback,) = counting_callbacks
    assert counting_callback.num_validations == 2  # scoring has used copies

    checkpoints = list(tmp_path.rglob("*.ckpt"))
    assert len(checkpoints) == 1  # and no copy has saved one


def test_what_the_trainers_callbacks_log_does_not_count(tmp_path):
    loop = make_loop()
    trainer = trainer_for(loop, tmp_path, rounds=1, callbacks=[LogsSize()])

    with refused("counts only if configure_callbacks returns"):
        trainer.fit(Plainest(), make_three_clients())
