"""Averages of models: against the average of the global models by hand, wherever the callback stands in the list."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint, StochasticWeightAveraging
from torch import Tensor
from toys import Plain, fit, network, sgd, toy_data, trainer_for, vector

from flsv import Reporting
from flsv.aggregation import FedAvg
from flsv.errors import ConfigurationError
from flsv.loop import FederatedLoop

averaging = pytest.importorskip("lightning.pytorch.callbacks.weight_averaging", reason="Lightning before 2.6")
WeightAveraging, EMAWeightAveraging = averaging.WeightAveraging, averaging.EMAWeightAveraging

ROUNDS, STEPS = 5, 13

pytestmark = [
    pytest.mark.filterwarnings(f"ignore:.*{what}")
    for what in ("holds rounds of an earlier run", "callbacks used to create the checkpoint", "is not empty")
]


class GlobalModels(FedAvg):
    """Remembers what it made: all that a federation without averaging and one with it have in common."""

    def __init__(self) -> None:
        super().__init__()
        self.made: list[Tensor] = []

    def aggregate(self, round: Any, contributions: Any) -> Any:
        vector, weights = super().aggregate(round, contributions)
        self.made.append(vector.clone())
        return vector, weights


def mean(models: list[Tensor]) -> Tensor:
    return torch.stack(models).double().mean(0)


def moving(models: list[Tensor], decay: float = 0.8) -> Tensor:
    average = models[0].double()
    for model in models[1:]:
        average = decay * average + (1 - decay) * model.double()
    return average


class FromRound3(averaging.WeightAveraging):
    def should_update(self, step_idx: int | None = None, epoch_idx: int | None = None) -> bool:
        return epoch_idx is not None and epoch_idx >= 3


def both_orders(callback: Callback, first: bool) -> tuple[FederatedLoop, list[Callback], GlobalModels]:
    models = GlobalModels()
    loop = FederatedLoop(models, seed=1, reporting=Reporting(table=False))
    return loop, [callback, loop] if first else [loop, callback], models


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> dict[bool, list[Tensor]]:
    """The global models of a federation without averaging, with BatchNorm and without."""
    found = {}
    for batch_norm in (True, False):
        models = GlobalModels()
        loop = FederatedLoop(models, seed=1, reporting=Reporting(table=False))
        fit(loop, tmp_path_factory.mktemp("plain"), Plain(network(batch_norm)), rounds=ROUNDS)
        found[batch_norm] = models.made
    return found


@pytest.mark.parametrize(("batch_norm", "first"), [(True, False), (False, True)])
@pytest.mark.parametrize(
    ("make", "by_hand"),
    [
        (WeightAveraging, mean),
        (lambda: EMAWeightAveraging(decay=0.8), moving),
        # Of the steps 0, 20, 40 and 60 none is in round 2, which has 26 to 38.
        (lambda: EMAWeightAveraging(decay=0.8, update_every_n_steps=20), lambda m: moving([m[0], m[1], m[3], m[4]])),
        (lambda: EMAWeightAveraging(decay=0.8, update_starting_at_step=27), lambda m: moving(m[2:])),
        (FromRound3, lambda m: mean(m[3:])),
    ],
)
def test_the_average_is_of_global_models(
    tmp_path: Path,
    plain: dict[bool, list[Tensor]],
    make: Callable[[], Any],
    by_hand: Callable[..., Tensor],
    batch_norm: bool,
    first: bool,
) -> None:
    callback = make()
    loop, callbacks, models = both_orders(callback, first)
    module, seen = Plain(network(batch_norm)), []

    class Watch(Callback):
        def on_validation_batch_start(self, trainer: L.Trainer, module: L.LightningModule, *args: Any) -> None:
            seen.append(vector(module))

    trainer = trainer_for(None, tmp_path, ROUNDS, callbacks=[*callbacks, Watch()])
    trainer.fit(module, toy_data())
    assert trainer.global_step == STEPS * ROUNDS
    assert len(models.made) == ROUNDS
    expected = by_hand(models.made)
    torch.testing.assert_close(vector(module), expected, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(seen[-1], expected, rtol=1e-5, atol=1e-6)  # validation sees it with this round in it
    # Training goes on from the global models, and not from their average.
    assert all(map(torch.equal, models.made, plain[batch_norm]))


def test_a_run_killed_anywhere_resumes_bit_for_bit(tmp_path: Path) -> None:
    def run(callbacks: list[Callback], **kwargs: Any) -> tuple[Plain, FederatedLoop]:
        loop, both, _ = both_orders(EMAWeightAveraging(decay=0.6), False)
        module = Plain(network())
        trainer = trainer_for(None, tmp_path, 4, callbacks=[*both, *callbacks], enable_checkpointing=bool(callbacks))
        trainer.fit(module, toy_data(), **kwargs)
        return module, loop

    within = ModelCheckpoint(tmp_path / "within", every_n_train_steps=10, save_top_k=-1, filename="{step}")
    # After validation, and before the epoch's end: the round is complete then, and so must the average be.
    after = ModelCheckpoint(tmp_path / "after", "{step}", save_top_k=-1, save_on_train_epoch_end=False)
    whole, loop = run([within, after])
    paths = sorted([*(tmp_path / "within").iterdir(), *(tmp_path / "after").iterdir()])
    assert [path.stem for path in paths] == [f"step={n}" for n in (13, 26, 39, 52, 10, 20, 30, 40, 50)]
    for path in paths:
        if path.stem == "step=52":
            continue  # where nothing is left to train, Lightning does not call on_train_end
        module, resumed = run([], ckpt_path=path)
        assert torch.equal(vector(module), vector(whole)), path
        assert torch.equal(resumed.state.model(), loop.state.model()), path


def test_a_checkpoint_after_the_end_goes_on_from_the_global_model(tmp_path: Path) -> None:
    for first in (True, False):
        loop, both, _ = both_orders(WeightAveraging(), first)
        trainer = trainer_for(None, tmp_path, 2, callbacks=both)
        module = Plain()
        trainer.fit(module, toy_data())
        trainer.save_checkpoint(tmp_path / f"{first}.ckpt")
        saved = torch.load(tmp_path / f"{first}.ckpt", weights_only=False)
        assert all(torch.equal(value, saved["state_dict"][name]) for name, value in module.state_dict().items())
        ends = []
        for path in (tmp_path / f"{first}.ckpt", None):
            loop, both, _ = both_orders(WeightAveraging(), first)
            resumed = Plain()
            trainer_for(None, tmp_path, 4, callbacks=both).fit(resumed, toy_data(), ckpt_path=path)
            ends.append(vector(resumed))
        assert torch.equal(*ends)


def test_an_exception_during_validation_leaves_the_global_model_in_the_module(tmp_path: Path) -> None:
    class Fails(Plain):
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            if self.trainer.current_epoch == 1 and self.fails:
                raise ArithmeticError
            super().validation_step(batch, batch_idx)

        fails = True

    for first in (True, False):
        loop, both, models = both_orders(WeightAveraging(), first)
        saving = ModelCheckpoint(tmp_path / str(first), "{epoch}", save_on_exception=True, save_top_k=0)
        module = Fails()
        trainer = trainer_for(None, tmp_path, 3, callbacks=[*both, saving], enable_checkpointing=True)
        with pytest.raises(ArithmeticError):
            trainer.fit(module, toy_data())
        torch.testing.assert_close(vector(module), models.made[1].double(), rtol=0, atol=0)
        ends = []
        for path in (tmp_path / str(first) / "epoch=1.ckpt", None):
            loop, both, _ = both_orders(WeightAveraging(), first)
            resumed = Fails()
            resumed.fails = False
            trainer_for(None, tmp_path, 3, callbacks=both).fit(resumed, toy_data(), ckpt_path=path)
            ends.append(vector(resumed))
        assert torch.equal(*ends)


def test_that_a_decay_counts_rounds_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO"):
        fit(FederatedLoop(seed=1), tmp_path, Plain(), rounds=1, callbacks=[EMAWeightAveraging(decay=0.5)])
    assert "EMAWeightAveraging averages global models: a decay of it counts rounds." in caplog.text


def stochastic() -> StochasticWeightAveraging:
    return StochasticWeightAveraging(swa_lrs=0.05, swa_epoch_start=2, annealing_epochs=2)


def decaying(optimizer: torch.optim.Optimizer) -> Any:
    return torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.8)


@pytest.mark.parametrize(("scheduler", "first"), [(None, True), (decaying, False)])
def test_stochastic_averaging_without_batch_norm(tmp_path: Path, scheduler: Any, first: bool) -> None:
    """Lightning's own takes in the models at the beginnings of its epochs, so not the last one's end."""
    loop, both, models = both_orders(stochastic(), first)
    rates: set[tuple[int, float]] = set()

    class Rates(Callback):
        def on_train_batch_start(self, trainer: L.Trainer, *args: Any) -> None:
            rates.add((trainer.current_epoch, round(trainer.optimizers[0].param_groups[0]["lr"], 6)))

    def run(both: list[Callback], **kwargs: Any) -> Plain:
        module = Plain(network(batch_norm=False), sgd, scheduler)
        trainer_for(None, tmp_path, ROUNDS, callbacks=both, **kwargs).fit(module, toy_data(), ckpt_path=path)
        return module

    path = None
    within = ModelCheckpoint(tmp_path / "c", every_n_train_steps=30, save_top_k=-1, filename="{step}")
    module = run([*both, Rates(), within], enable_checkpointing=True)
    assert loop.round_index == ROUNDS
    expected = [0.1, 0.1, 0.075, 0.05, 0.05] if scheduler is None else [0.1, 0.08, 0.065, 0.05, 0.05]
    assert sorted(rates) == list(enumerate(expected))
    torch.testing.assert_close(vector(module), mean(models.made[0:4]), rtol=1e-5, atol=1e-6)
    for path in sorted((tmp_path / "c").iterdir()):
        assert torch.equal(vector(run(both_orders(stochastic(), first)[1])), vector(module)), path


@pytest.mark.parametrize(
    ("module", "match"),
    [
        (lambda: Plain(network()), "a round in which nobody trains.* Use lightning.pytorch.callbacks.WeightAveraging"),
        (
            lambda: Plain(network(batch_norm=False), sgd, decaying, "step"),
            "in the place of one that steps per batch.* Use lightning.pytorch.callbacks.WeightAveraging",
        ),
    ],
)
def test_stochastic_averaging_is_refused_where_it_cannot_be_right(
    tmp_path: Path, module: Callable[[], Plain], match: str
) -> None:
    both = both_orders(stochastic(), True)[1]
    trainer = trainer_for(None, tmp_path, ROUNDS, callbacks=both)
    with pytest.raises(ConfigurationError, match=match):
        trainer.fit(module(), toy_data())
    assert trainer.max_epochs == ROUNDS


class PerBatch(averaging.WeightAveraging):
    def on_train_batch_end(self, *args: Any) -> None:
        super().on_train_batch_end(*args)


@pytest.mark.parametrize(
    ("callbacks", "match"),
    [
        ([PerBatch()], r"PerBatch has its own on_train_batch_end, .* Say in should_update"),
        ([WeightAveraging(), EMAWeightAveraging()], "WeightAveraging and EMAWeightAveraging: a checkpoint has room"),
    ],
)
def test_averages_that_cannot_be_right_are_refused(tmp_path: Path, callbacks: list[Callback], match: str) -> None:
    with pytest.raises(ConfigurationError, match=match):
        fit(FederatedLoop(seed=1), tmp_path, Plain(network(batch_norm=False)), callbacks=callbacks)
