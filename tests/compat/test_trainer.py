"""A Trainer's options in a federation: each means to a client what it means to a Trainer that trains it alone."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from compat.kinds.base import Kind, images
from compat.kinds.small import ManualSchedule, Small
from compat.runs import both, run
from lightning.pytorch import callbacks as cb
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from lightning.pytorch.plugins import DoublePrecision
from lightning.pytorch.profilers import PyTorchProfiler
from lightning.pytorch.strategies import SingleDeviceStrategy
from torch import Tensor
from torch.optim import lr_scheduler

from flsv.errors import ConfigurationError

DOUBLE = {"precision": "64-true"}  # so that nothing but the option can differ


def small(module: Callable[[], L.LightningModule] = Small, **trainer: Any) -> Kind:
    """3 and 4 batches: a window or a schedule that counts the cohort ends elsewhere."""
    kind = {"clients": (2, 3)} if trainer.pop("uneven", True) else {}
    return Kind(module, images, trainer={**DOUBLE, **trainer}, tolerance=1e-12, **kind)


def rounded(precision: str, tolerance: float) -> Kind:
    return Kind(Small, images, trainer={"precision": precision}, tolerance=tolerance)


def scheduled(make: Any, interval: str = "step", frequency: int = 1, **trainer: Any) -> Kind:
    return small(partial(Small, make, interval, frequency), **trainer)


def steps(trainer: L.Trainer) -> int:
    return int(trainer.estimated_stepping_batches)


def batches_by_the_steps(trainer: L.Trainer) -> int:
    """As chemprop asks."""
    if trainer.train_dataloader is None:
        assert trainer.estimated_stepping_batches
    return int(trainer.num_training_batches)


def batches_of_a_loader_that_is_set_up(trainer: L.Trainer) -> int:
    trainer.fit_loop.setup_data()
    loader: Any = trainer.train_dataloader
    assert len(loader) == trainer.num_training_batches
    return len(loader)


def by_batches(batches: Callable[[L.Trainer], int]) -> Kind:
    return scheduled(lambda o, t: lr_scheduler.PolynomialLR(o, batches(t) * t.max_epochs))


AS_BY_HAND: dict[str, Kind] = {
    # Averages are rounded to what the module's entries are: half a unit in their last place is to be expected.
    "precision-64-true": small(),
    "precision-32-true": rounded("32-true", 1e-6),
    "precision-bf16-mixed": rounded("bf16-mixed", 1e-6),
    "precision-16-mixed-on-a-cpu": rounded("16-mixed", 1e-6),
    "precision-bf16-true": rounded("bf16-true", 1e-2),
    "precision-16-true": rounded("16-true", 1e-3),
    "precision-plugin": Kind(Small, images, trainer={"plugins": DoublePrecision()}, tolerance=1e-12),
    "clipping-by-value": small(gradient_clip_val=0.01, gradient_clip_algorithm="value"),
    "limit-share": small(limit_train_batches=0.5),
    "step-schedule": scheduled(lambda o, t: lr_scheduler.ExponentialLR(o, 0.9)),
    "epoch-schedule": scheduled(lambda o, t: lr_scheduler.ExponentialLR(o, 0.5), "epoch"),
    "every-second-epoch": scheduled(lambda o, t: lr_scheduler.ExponentialLR(o, 0.5), "epoch", 2),
    "one-cycle": scheduled(lambda o, t: lr_scheduler.OneCycleLR(o, 0.2, total_steps=steps(t))),
    "linear-while-accumulating": scheduled(
        lambda o, t: lr_scheduler.LinearLR(o, 1.0, 0.0, steps(t)), accumulate_grad_batches=2
    ),
    "length-of-the-train-loader": scheduled(
        lambda o, t: lr_scheduler.PolynomialLR(o, len(t.datamodule.train_dataloader()) * t.max_epochs)
    ),
    "batches-by-the-steps": by_batches(batches_by_the_steps),
    "batches-of-a-loader-that-is-set-up": by_batches(batches_of_a_loader_that_is_set_up),
    "schedules-in-sequence": scheduled(
        lambda o, t: lr_scheduler.SequentialLR(
            o, [lr_scheduler.LinearLR(o, 0.1, 1.0, 3), lr_scheduler.ExponentialLR(o, 0.9)], [3]
        )
    ),
    "schedule-by-hand": small(partial(ManualSchedule, lambda o, t: lr_scheduler.ExponentialLR(o, 0.9))),
    "lbfgs": small(partial(Small, optimizer=partial(torch.optim.LBFGS, lr=1e-2, max_iter=3))),
    "fused-optimizer": small(partial(Small, optimizer=partial(torch.optim.AdamW, lr=1e-2, fused=True))),
    "together": small(gradient_clip_val=0.1, accumulate_grad_batches=3),
}


@pytest.mark.parametrize("option", AS_BY_HAND)
def test_means_the_same_as_by_hand(tmp_path: Path, option: str) -> None:
    both(AS_BY_HAND[option], tmp_path).check()


def test_accumulation_by_a_callback_means_the_same_as_by_hand(tmp_path: Path) -> None:
    kind = Kind(Small, images, lambda: [cb.GradientAccumulationScheduler({0: 2, 1: 1})], DOUBLE, tolerance=1e-12)
    both(kind, tmp_path).check()


# ---- what only looks, or only matters elsewhere


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Tensor]:
    return run(Kind(Small, images), tmp_path_factory.mktemp("plain"))[0].state_dict()


def _barebones(folder: Path) -> dict[str, Any]:
    # It refuses the very arguments that would say the same.
    switched = ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary", "num_sanity_val_steps")
    return {"barebones": True, **dict.fromkeys(switched)}


CHANGES_NOTHING: dict[str, Callable[[Path], dict[str, Any]]] = {
    "several-loggers": lambda f: {"logger": [CSVLogger(f), TensorBoardLogger(f)]},
    "default-logger": lambda f: {"logger": True},
    "log-every-step": lambda f: {"logger": CSVLogger(f), "log_every_n_steps": 1},
    "progress-bar": lambda f: {"enable_progress_bar": True},
    "model-summary": lambda f: {"enable_model_summary": True},
    "checkpoints": lambda f: {"enable_checkpointing": True},
    "simple-profiler": lambda f: {"profiler": "simple"},
    "pytorch-profiler": lambda f: {"profiler": PyTorchProfiler(f, schedule=None)},
    "benchmark": lambda f: {"benchmark": True},
    "deterministic": lambda f: {"deterministic": True},
    "detect-anomaly": lambda f: {"detect_anomaly": True},
    "sanity-check": lambda f: {"num_sanity_val_steps": 2},
    "validation-every-second-round": lambda f: {"check_val_every_n_epoch": 2},
    "no-validation": lambda f: {"limit_val_batches": 0},
    "inference-mode-off": lambda f: {"inference_mode": False},
    "max-time": lambda f: {"max_time": "00:01:00:00"},
    "barebones": _barebones,
    "no-distributed-sampler": lambda f: {"use_distributed_sampler": False},
    "sync-batchnorm": lambda f: {"sync_batchnorm": True},
    "strategy-object": lambda f: {"strategy": SingleDeviceStrategy("cpu"), "accelerator": "auto"},
}


@pytest.mark.parametrize("option", CHANGES_NOTHING)
def test_the_same_bits_with(tmp_path: Path, plain: dict[str, Tensor], option: str) -> None:
    module, loop = run(Kind(Small, images, trainer=CHANGES_NOTHING[option](tmp_path)), tmp_path)
    assert loop.round_index == 2
    assert_bits(module, plain)


CALLBACKS: dict[str, Callable[[Path], tuple[L.Callback, dict[str, Any]]]] = {
    "early-stopping": lambda f: (cb.EarlyStopping("val_loss", patience=9), {}),
    "top-k-checkpoints": lambda f: (cb.ModelCheckpoint(f, monitor="val_loss", save_top_k=2, save_last=True), {}),
    "checkpoints-every-two-steps": lambda f: (cb.ModelCheckpoint(f, every_n_train_steps=2, save_top_k=-1), {}),
    "checkpoint-on-exception": lambda f: (cb.OnExceptionCheckpoint(f), {}),
    "timer": lambda f: (cb.Timer(duration="00:01:00:00"), {}),
    "rich-summary": lambda f: (cb.RichModelSummary(), {"enable_model_summary": True}),
}


@pytest.mark.parametrize("after", [True, False], ids=["after-the-loop", "before-the-loop"])
@pytest.mark.parametrize("callback", CALLBACKS)
def test_the_same_bits_with_callback(tmp_path: Path, plain: dict[str, Tensor], callback: str, after: bool) -> None:
    own, options = CALLBACKS[callback](tmp_path)
    options["enable_checkpointing"] = isinstance(own, cb.Checkpoint)
    kind = Kind(Small, images, lambda: [own], options)
    module, loop = run(kind, tmp_path, first=after)
    assert loop.round_index == 2
    assert_bits(module, plain)


def assert_bits(module: L.LightningModule, expected: dict[str, Tensor]) -> None:
    state = module.state_dict()
    assert state.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(state[name], value), name


def test_nobody_training_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="limit_train_batches=0: nobody would train"):
        run(small(limit_train_batches=0), tmp_path)


# ---- beside training


def test_validate_test_and_predict_see_the_global_model(tmp_path: Path) -> None:
    """Of the trainer that has trained it, and of one that knows nothing of a federation."""
    module, loop = run(Kind(Small, images), tmp_path)
    data = images()
    data.test_dataloader = data.predict_dataloader = data.val_dataloader
    module.eval()
    with torch.no_grad():
        batches = [(module(x), y) for x, y in data.val_dataloader()]
    loss = sum(torch.nn.functional.cross_entropy(out, y, reduction="sum").item() for out, y in batches) / 12
    quiet = {"logger": False, "enable_progress_bar": False, "enable_checkpointing": False, "accelerator": "cpu"}
    for trainer in (module.trainer, L.Trainer(**quiet, default_root_dir=tmp_path)):
        assert trainer.validate(module, data, verbose=False)[0]["val_loss"] == pytest.approx(loss)
        assert trainer.test(module, data, verbose=False)[0]["test_loss"] == pytest.approx(loss)
        predicted = torch.cat(trainer.predict(module, data))
        assert torch.equal(predicted, torch.cat([out.argmax(1) for out, _ in batches]))
    assert loop.round_index == 2
