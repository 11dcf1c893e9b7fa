"""A Trainer's options in a federation: each means to a client what it means to a Trainer that trains it alone."""

from functools import partial

import lightning as L
import pytest
import torch
from compat.runs import make_small_program, train_both_ways, train_federated
from lightning.pytorch import callbacks as cb
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from lightning.pytorch.profilers import PyTorchProfiler
from lightning.pytorch.strategies import SingleDeviceStrategy
from torch.optim import lr_scheduler

from helpers import refused
from helpers.fits import read_logged_metrics
from zoo.program import Program, Small, make_images


def make_rounded_program(precision, tolerance):
    return Program(Small, make_images, trainer={"precision": precision}, tolerance=tolerance)


class RateByRound(Small):
    """Halves its rate when a round begins."""

    def on_train_epoch_start(self):
        self.optimizers().param_groups[0]["lr"] *= 0.5


class PlateauByStep(Small):
    """Halves its rate after each batch that is no better than the best before it."""

    def configure_optimizers(self):
        optimizer = self.make_optimizer(self.parameters())
        schedule = lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0)
        return [optimizer], [{"scheduler": schedule, "interval": "step", "monitor": "train_loss"}]


class HooksWhenConfigured(Small):
    """Puts a hook into a layer and draws random numbers, once in a fit, where its optimizer is made."""

    def configure_optimizers(self):
        torch.rand(7)
        if not self.net[-1]._forward_hooks:
            self.net[-1].register_forward_hook(lambda layer, inputs, out: 2 * out)
        return super().configure_optimizers()


@torch.no_grad()
def shrink_head(_, module):
    module.net[-1].weight.mul_(0.5)


class ActsOnBatches(cb.Callback):
    """Changes inputs, learning rate, momentum and weights at certain batches of a client."""

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        x, _ = batch
        x.mul_(1 + batch_idx / 10)
        (group,) = trainer.optimizers[0].param_groups
        if batch_idx == 0:
            group["lr"] *= 0.8
        if batch_idx == 1:
            group["momentum"] *= 0.9
        if trainer.is_last_batch:
            group["lr"] *= 0.5

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        if batch_idx % 2 or trainer.is_last_batch:
            shrink_head(trainer, pl_module)


AS_BY_HAND = {
    # Averages are rounded to what the module's entries are: half a unit in their last place is to be expected.
    "precision-64-true": make_small_program(),
    "precision-bf16-mixed": make_rounded_program("bf16-mixed", 1e-6),
    "precision-16-mixed-on-a-cpu": make_rounded_program("16-mixed", 1e-6),
    "precision-bf16-true": make_rounded_program("bf16-true", 1e-2),
    "clipping-by-value": make_small_program(
        gradient_clip_val=0.01, gradient_clip_algorithm="value"
    ),
    "plateau-by-step": make_small_program(PlateauByStep),
    "every-second-epoch": make_small_program(
        partial(Small, partial(lr_scheduler.ExponentialLR, gamma=0.5), "epoch", 2)
    ),
    "lbfgs": make_small_program(
        partial(Small, optimizer=partial(torch.optim.LBFGS, lr=1e-2, max_iter=3))
    ),
    "fused-optimizer": make_small_program(
        partial(Small, optimizer=partial(torch.optim.AdamW, lr=1e-2, fused=True))
    ),
    "together": make_small_program(gradient_clip_val=0.1, accumulate_grad_batches=3),
    "rate-by-round": make_small_program(RateByRound),
    "weights-by-a-callback": make_small_program(
        Small, lambda: cb.LambdaCallback(on_train_epoch_start=shrink_head)
    ),
    "batch-callback": make_small_program(Small, ActsOnBatches),
    "hooks-when-configured": make_small_program(HooksWhenConfigured),
    "accumulation-by-a-callback": make_small_program(
        Small, lambda: cb.GradientAccumulationScheduler({0: 2, 1: 1})
    ),
}


@pytest.mark.by_turn
@pytest.mark.fast_rows("precision-64-true", "clipping-by-value")
@pytest.mark.parametrize("option", AS_BY_HAND)
def test_trainer_option_equals_the_loop_by_hand(tmp_path, option):
    train_both_ways(AS_BY_HAND[option], tmp_path).check()


def test_callback_before_the_loop_acts_on_the_training_client_and_gets_its_hooks_back(tmp_path):
    callback = ActsOnBatches()
    program = make_small_program(Small, lambda: callback)
    train_both_ways(program, tmp_path, is_first=False).check()
    assert not {"on_train_batch_start", "on_train_batch_end"} & vars(callback).keys()


# ---- what only looks, or only matters elsewhere


@pytest.fixture(scope="module")
def plain_state(tmp_path_factory):
    module, _ = train_federated(Program(Small, make_images), tmp_path_factory.mktemp("plain"))
    return module.state_dict()


#: It refuses the very arguments that would say the same.
SWITCHED = (
    "logger",
    "enable_checkpointing",
    "enable_progress_bar",
    "enable_model_summary",
    "num_sanity_val_steps",
)
CHANGES_NOTHING = {
    "output": lambda f: {
        "logger": [CSVLogger(f), TensorBoardLogger(f)],
        "log_every_n_steps": 1,
        "enable_progress_bar": True,
        "enable_model_summary": True,
        "enable_checkpointing": True,
    },
    "barebones": lambda f: {"barebones": True, **dict.fromkeys((*SWITCHED, "log_every_n_steps"))},
    "checks": lambda f: {
        "profiler": PyTorchProfiler(f, schedule=None),
        "benchmark": True,
        "detect_anomaly": True,
        "inference_mode": False,
    },
    "deterministic": lambda f: {"deterministic": True, "profiler": "simple", "logger": True},
    "validation": lambda f: {
        "num_sanity_val_steps": 2,
        "check_val_every_n_epoch": 2,
        "max_time": "00:01:00:00",
    },
    "no-validation": lambda f: {"limit_val_batches": 0},
    "devices": lambda f: {
        "strategy": SingleDeviceStrategy("cpu"),
        "accelerator": "auto",
        "sync_batchnorm": True,
        "use_distributed_sampler": False,
    },
}


@pytest.mark.by_turn
@pytest.mark.fast_rows("barebones")
@pytest.mark.parametrize("option", CHANGES_NOTHING)
def test_trainer_option_leaves_the_fit_bitwise_unchanged(tmp_path, plain_state, option):
    assert_same_bits(
        tmp_path,
        Program(Small, make_images, trainer=CHANGES_NOTHING[option](tmp_path)),
        plain_state,
    )


@pytest.mark.skipif(
    not hasattr(cb, "WeightAveraging"),
    reason="Lightning's ThroughputMonitor before 2.6 fails at a last batch with fewer samples",
)
@pytest.mark.fast_rows
@pytest.mark.parametrize("loop_is_first", [True, False], ids=["after-the-loop", "before-the-loop"])
def test_lightnings_monitoring_callbacks_leave_the_fit_bitwise_unchanged(
    tmp_path,
    plain_state,
    loop_is_first,
    capsys,
):
    bar = cb.RichProgressBar() if loop_is_first else cb.TQDMProgressBar()
    callbacks = [
        bar,
        cb.LearningRateMonitor("step"),
        cb.ThroughputMonitor(lambda batch: len(batch[0]), window_size=2),
        cb.EarlyStopping("val_loss", patience=9),
        cb.ModelCheckpoint(tmp_path, monitor="val_loss", save_top_k=2, save_last=True),
        cb.ModelCheckpoint(tmp_path, every_n_train_steps=2, save_top_k=-1),
        cb.OnExceptionCheckpoint(tmp_path),
        cb.Timer(duration="00:01:00:00"),
        cb.RichModelSummary(),
    ]
    options = {
        "enable_model_summary": True,
        "enable_progress_bar": True,
        "enable_checkpointing": True,
        "logger": CSVLogger(tmp_path),
        "log_every_n_steps": 1,
    }
    program = Program(Small, make_images, lambda: callbacks, options)

    trainer = assert_same_bits(tmp_path, program, plain_state, is_first=loop_is_first)
    printed = "".join(capsys.readouterr())
    assert "2/2" in printed
    assert "3/2" not in printed
    rates = [row["lr-SGD"] for row in read_logged_metrics(tmp_path) if row["lr-SGD"]]
    assert len(rates) == trainer.global_step


def assert_same_bits(folder, program, expected, **options):
    module, loop = train_federated(program, folder, **options)
    assert loop.round_index == 2
    state = module.state_dict()
    assert state.keys() == expected.keys()
    assert all(torch.equal(state[name], value) for name, value in expected.items())
    return module.trainer


@pytest.mark.parametrize(
    ("program", "message"),
    [
        (make_small_program(limit_train_batches=0), "limit_train_batches=0: no client would train"),
        (make_small_program(max_steps=9), "max_steps=9"),
        (
            make_small_program(Small, partial(cb.StochasticWeightAveraging, 1e-2, 0.5)),
            "StochasticWeightAveraging",
        ),
    ],
)
def test_trainer_option_that_rounds_cannot_follow_is_refused(tmp_path, program, message):
    with refused(message):
        train_federated(program, tmp_path)


# ---- beside training


def test_validate_test_and_predict_see_the_global_model(tmp_path):
    """Of the trainer that has trained it, and of one that knows nothing of a federation."""
    module, loop = train_federated(Program(Small, make_images), tmp_path)
    data = make_images()
    data.test_dataloader = data.val_dataloader
    data.predict_dataloader = data.val_dataloader
    module.eval()
    loss_sum = 0.0
    predictions = []
    for x, y in data.val_dataloader():
        with torch.no_grad():
            outputs = module(x)
        loss_sum += torch.nn.functional.cross_entropy(outputs, y, reduction="sum").item()
        predictions.append(outputs.argmax(1))
    expected_predictions = torch.cat(predictions)
    expected_loss = loss_sum / len(expected_predictions)

    quiet = {
        "logger": False,
        "enable_progress_bar": False,
        "enable_checkpointing": False,
        "accelerator": "cpu",
    }
    for trainer in (module.trainer, L.Trainer(**quiet, default_root_dir=tmp_path)):
        (validated,) = trainer.validate(module, data, verbose=False)
        assert validated["val_loss"] == pytest.approx(expected_loss)
        (tested,) = trainer.test(module, data, verbose=False)
        assert tested["test_loss"] == pytest.approx(expected_loss)
        predicted = torch.cat(trainer.predict(module, data))
        assert torch.equal(predicted, expected_predictions)

    assert loop.round_index == 2


# ---- what means something else in a federation than to a Trainer that trains one model


class Notes(Small):
    """Notes what the Trainer tells it in every batch, and how many there have been, in an attribute and in a buffer."""

    def __init__(self):
        super().__init__()
        self.steps = []
        self.count = 0
        self.register_buffer("sum", torch.tensor(0))

    def training_step(self, batch, batch_idx):
        trainer = self.trainer
        position = (trainer.current_epoch, batch_idx, trainer.is_last_batch)
        self.steps.append((*position, trainer.num_training_batches, self.global_step))
        self.count += 1
        self.sum += 1

        return super().training_step(batch, batch_idx)


def test_current_epoch_is_the_round_and_global_step_counts_the_clients_batches(tmp_path):
    """A client's global step counts all steps of earlier rounds and its own; a counter is the first client's."""
    program = Program(Notes, make_images, clients=(2, 3))  # 18 and 26 samples
    module, _ = train_federated(program, tmp_path)

    rounds = 2
    batches_of_clients = (3, 4)  # of 8 samples
    expected_steps = []
    for epoch in range(rounds):
        for length in batches_of_clients:
            for index in range(length):
                is_last = index == length - 1
                step = epoch * sum(batches_of_clients) + index
                expected_steps.append((epoch, index, is_last, length, step))

    assert module.steps == expected_steps
    # Averages of counters mean nothing: the global model has those of the cohort's first client.
    batches_of_first_client = rounds * batches_of_clients[0]
    assert module.count == batches_of_first_client
    assert int(module.sum) == batches_of_first_client
