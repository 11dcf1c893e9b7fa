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

pytestmark = pytest.mark.filterwarnings("ignore")


def size_of_weights(module):
    last_layer = module.net[4]
    return last_layer.weight.detach().abs().mean()


class LogsSizeAndCountsValidations(L.Callback):
    """Its calls while the Trainer checks a first batch do not count."""

    def __init__(self):
        self.num_validations = 0

    def on_validation_epoch_end(self, trainer, pl_module):
        if not trainer.sanity_checking:
            self.num_validations += 1
        self.log("size", size_of_weights(pl_module))


class LogsMeanOutputAndCountsValidations(nn.Module, L.Callback):
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


@pytest.mark.slow
@pytest.mark.parametrize("kind", [ReturnsThreeCallbacks, ReturnsOneCallback, ReturnsItsLayer])
def test_values_by_a_logged_value_of_own_callbacks_sum_to_its_gain(kind, tmp_path):
    module = kind()
    size_before = size_of_weights(module)
    loop = make_loop()
    trainer = trainer_for(loop, tmp_path, rounds=2, enable_checkpointing=True)

    trainer.fit(module, make_three_clients())

    gain = float(size_of_weights(module) - size_before)
    values = loop.contributions["shadow"]
    assert float(values.sum()) == pytest.approx(gain, abs=1e-6)
    assert len(set(values.tolist())) == 3
    assert trainer.callback_metrics["size"] == pytest.approx(float(size_of_weights(module)))

    # Coalitions are scored with copies of the callbacks: this one counts the validation after each round only.
    (num_validations,) = [
        callback.num_validations
        for callback in trainer.callbacks
        if hasattr(callback, "num_validations")
    ]
    assert num_validations == 2
    # The copies save no checkpoints.
    assert len(list(tmp_path.rglob("*.ckpt"))) == 1


@pytest.mark.slow
def test_performance_that_a_callback_of_the_trainer_logs_is_refused(tmp_path):
    loop = make_loop()
    trainer = trainer_for(loop, tmp_path, rounds=1, callbacks=[LogsSizeAndCountsValidations()])

    with refused("chosen only if configure_callbacks returns"):
        trainer.fit(Plainest(), make_three_clients())
