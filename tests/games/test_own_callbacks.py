"""What the callbacks of a module's ``configure_callbacks`` log is what the module logs."""

import lightning as L
import pytest
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from torch import nn
from torchmetrics import MeanMetric

from flsv.metrics import ShadowShapley
from helpers import refused
from helpers.coalitions_by_hand import make_shadow_loop, make_three_clients
from helpers.fits import trainer_for
from helpers.models import Plainest

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]


def size_of_weights(module):
    last_layer = module.net[4]
    return last_layer.weight.detach().abs().mean()


class LogsSizeAndCountsValidations(L.Callback):
    num_validations = 0

    def on_validation_epoch_end(self, trainer, pl_module):
        self.num_validations += 1
        self.log("size", size_of_weights(pl_module))


class LogsMeanOutputAndCountsValidations(nn.Module, L.Callback):
    """A part of the module that collects outputs in a metric, as an evaluator of a library does."""

    num_validations = 0

    def __init__(self):
        super().__init__()
        self.mean = MeanMetric()

    def on_validation_batch_end(self, trainer, pl_module, outputs, *_):
        self.mean.update(outputs)

    def on_validation_epoch_end(self, trainer, pl_module):
        self.num_validations += 1
        pl_module.log("size", self.mean.compute())
        self.mean.reset()


class ReturnsThreeCallbacks(Plainest):
    def configure_callbacks(self):
        return [
            LogsSizeAndCountsValidations(),
            ModelCheckpoint(),
            EarlyStopping("size", patience=99),
        ]


class ReturnsOneCallback(Plainest):
    def configure_callbacks(self):
        return LogsSizeAndCountsValidations()


class ReturnsItsLayer(Plainest):
    def __init__(self):
        super().__init__()
        self.evaluator = LogsMeanOutputAndCountsValidations()

    def configure_callbacks(self):
        return [self.evaluator]

    def validation_step(self, batch, batch_idx):
        return size_of_weights(self)


def make_loop():
    metric = ShadowShapley(coalitions="all", performance="size", mode="max")
    return make_shadow_loop(metric)


@pytest.mark.by_turn
@pytest.mark.parametrize("kind", [ReturnsThreeCallbacks, ReturnsOneCallback, ReturnsItsLayer])
def test_values_by_a_logged_value_of_own_callbacks_sum_to_its_gain(kind, tmp_path):
    module = kind()
    size_before = size_of_weights(module)
    loop = make_loop()
    num_rounds = 2
    trainer = trainer_for(loop, tmp_path, num_rounds, enable_checkpointing=True)

    trainer.fit(module, make_three_clients())

    size = float(size_of_weights(module))
    values = loop.contributions["shadow"].tolist()
    assert sum(values) == pytest.approx(size - float(size_before), abs=1e-6)
    assert len(set(values)) == 3
    assert trainer.callback_metrics["size"] == pytest.approx(size)

    # Coalitions are scored with copies of the callbacks, which save no checkpoints.
    counting_callbacks = [cb for cb in trainer.callbacks if hasattr(cb, "num_validations")]
    assert [callback.num_validations for callback in counting_callbacks] == [num_rounds]
    assert len(list(tmp_path.rglob("*.ckpt"))) == 1


def test_performance_that_a_callback_of_the_trainer_logs_is_refused(tmp_path):
    loop = make_loop()
    trainer = trainer_for(loop, tmp_path, rounds=1, callbacks=[LogsSizeAndCountsValidations()])

    with refused("chosen only if configure_callbacks returns"):
        trainer.fit(Plainest(), make_three_clients())
