"""A run that is killed and resumed is, to the bit, the run that was not."""

import errno
import itertools
import signal
from functools import partial, wraps

import pytest
import torch
from lightning.pytorch.callbacks import EarlyStopping, LambdaCallback, OnExceptionCheckpoint
from lightning.pytorch.loggers import TensorBoardLogger
from torch.optim.lr_scheduler import ReduceLROnPlateau

from flsv import ClientEvaluation, FederatedLoop, Reporting
from flsv.aggregation import ShapFedWA
from flsv.metrics import ClassSpecificShapley
from flsv.personalization import Personalizer
from flsv.results.run_table import CSV
from flsv.sampling import UniformSampler
from helpers import refused, warns
from helpers.data import toy_data
from helpers.fits import (
    SavesInHooks,
    StopInRound,
    fit,
    make_checkpoint_callback,
    state_vector,
    trainer_for,
)
from helpers.forked import Forked
from helpers.models import Plain, adam, network
from helpers.runs import read_rows


class AveragesWithOwnModel(Personalizer):
    """Half the global model, half the client's own."""

    def personalize(self, round, contributions, models):
        mixtures = {}
        for client, model in zip(round.client_ids.tolist(), round.client_vectors):
            mixtures[client] = (model + round.server_vector) / 2
        return mixtures


class LogsNoise(Plain):
    def validation_step(self, batch, batch_idx):
        super().validation_step(batch, batch_idx)
        self.log("val_noise", torch.rand(()))

    def on_train_epoch_start(self):
        self.log("epoch_noise", torch.rand(()))


def fit_with_everything(folder, rounds=4, callbacks=(), ckpt_path=None):
    loop = FederatedLoop(
        ShapFedWA("cssv"),
        {"cssv": ClassSpecificShapley(momentum=0.7)},
        personalizer=AveragesWithOwnModel(),
        sampler=UniformSampler(3),
        optimizer_state="persist",
        evaluation=ClientEvaluation(every=2),
        reporting=Reporting(figures=4),
        local_epochs=2,
        seed=11,
    )
    scheduler = partial(torch.optim.lr_scheduler.StepLR, step_size=7, gamma=0.8)
    module = LogsNoise(network(dropout=0.3), adam, scheduler, interval="step")
    early_stopping = EarlyStopping("val_acc", mode="max", patience=100)

    fit(
        loop,
        folder,
        module,
        toy_data((4, 2, 3, 3, 2)),
        rounds,
        ckpt_path,
        logger=TensorBoardLogger(folder, name="", version="log"),
        enable_checkpointing=True,
        callbacks=[*callbacks, early_stopping, make_checkpoint_callback(folder)],
    )
    return loop, module


@pytest.fixture(scope="module")
def uninterrupted_run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole")
    return folder, *fit_with_everything(folder)


def assert_same_run(folder, loop, module, uninterrupted_run):
    whole_folder, whole_loop, whole_module = uninterrupted_run
    assert_same_bits = partial(torch.testing.assert_close, rtol=0, atol=0, equal_nan=True)

    assert torch.equal(state_vector(module), state_vector(whole_module))
    for name, values in whole_loop.contributions.items():
        assert_same_bits(loop.contributions[name], values)
    assert_same_bits(loop.weights, whole_loop.weights)
    assert_same_bits(loop.client_scores, whole_loop.client_scores)
    assert_same_bits(loop.state.starts, whole_loop.state.starts)
    assert_same_bits(module.trainer.callback_metrics, whole_module.trainer.callback_metrics)

    table = (folder / "log" / "contributions.csv").read_text()
    assert table == (whole_folder / "log" / "contributions.csv").read_text()


@pytest.mark.slow
def test_run_killed_within_a_round_resumes_bitwise(tmp_path, uninterrupted_run):
    killed_in_round = 2
    kill = StopInRound(killed_in_round, batch=4)
    fit_and_die = partial(fit_with_everything, callbacks=[kill])
    process = Forked(tmp_path, fit_and_die, tmp_path)
    status, output = process.wait()
    assert status == -signal.SIGKILL, output

    rows = read_rows(tmp_path / "log" / "contributions.csv")
    rounds = {int(row["round"]) for row in rows}
    assert rounds == set(range(killed_in_round))

    checkpoint = tmp_path / "checkpoints" / "last.ckpt"
    loop, module = fit_with_everything(tmp_path, ckpt_path=checkpoint)

    assert_same_run(tmp_path, loop, module, uninterrupted_run)


@pytest.mark.slow
@pytest.mark.parametrize(("owner", "method_name"), [(ShapFedWA, "aggregate"), (CSV, "write_round")])
def test_round_that_fails_at_the_server_is_counted_once(
    tmp_path, uninterrupted_run, owner, method_name, monkeypatch
):
    """Metrics and aggregators have seen the round by then: what were saved on the exception would count it twice."""
    method = getattr(owner, method_name)
    rounds = itertools.count()

    @wraps(method)
    def fail_in_the_third_round(self, *arguments, **options):
        if next(rounds) == 2:
            raise OSError(errno.ENOSPC, "No space left on device")
        return method(self, *arguments, **options)

    monkeypatch.setattr(owner, method_name, fail_in_the_third_round)
    saving = OnExceptionCheckpoint(tmp_path, "exception")
    not_saved = "exception.ckpt is not saved: round"
    with warns(not_saved), pytest.raises(OSError, match="No space left"):
        fit_with_everything(tmp_path, callbacks=[saving])

    assert not (tmp_path / "exception.ckpt").exists()

    resumed = fit_with_everything(tmp_path, ckpt_path=tmp_path / "checkpoints/last.ckpt")
    assert_same_run(tmp_path, *resumed, uninterrupted_run)


def test_trainer_whose_fit_ended_in_validation_is_refused(tmp_path):
    def stop(trainer, *_):
        if trainer.current_epoch == 1:
            raise ArithmeticError

    loop = FederatedLoop(seed=1)
    stopping = LambdaCallback(on_validation_batch_start=stop)
    trainer = trainer_for(loop, tmp_path, rounds=4, callbacks=[stopping])

    with pytest.raises(ArithmeticError):
        trainer.fit(Plain(), toy_data())

    # The second round has ended, but the second epoch, whose validation failed, has not.
    assert loop.round_index == 2
    assert trainer.current_epoch == 1

    with refused("validation. Make a new Trainer"):
        trainer.fit(Plain(), toy_data())


class FollowsPlateau(Plain):
    """Its rate falls after each round but the first, since the accuracy never rises by 2."""

    def configure_optimizers(self):
        optimizer = self.make_optimizer(self.parameters())
        scheduler = ReduceLROnPlateau(
            optimizer,
            mode="max",
            factor=0.5,
            patience=0,
            threshold=2.0,
            threshold_mode="abs",
        )

        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": scheduler, "monitor": "val_acc"},
        }


@pytest.mark.slow
def test_schedule_that_follows_a_plateau_resumes_bitwise_from_any_checkpoint(tmp_path):
    """Lightning steps it after it has saved a round's checkpoint."""

    def fit_plateau(name, callbacks, ckpt_path=None):
        loop = FederatedLoop(seed=3)
        trainer = trainer_for(loop, tmp_path / name, 5, callbacks=callbacks)
        module = FollowsPlateau()
        trainer.fit(module, toy_data(server_val=0.2), ckpt_path=ckpt_path)
        return module

    def rate_of(module):
        return module.trainer.optimizers[0].param_groups[0]["lr"]

    hooks = ("on_train_epoch_start", "on_validation_end", "on_train_epoch_end")
    saving = SavesInHooks(tmp_path / "saved", *hooks)
    uninterrupted = fit_plateau("uninterrupted", [saving])
    initial_rate = Plain().configure_optimizers().param_groups[0]["lr"]
    assert rate_of(uninterrupted) == initial_rate * 0.5**4  # halved after each round but the last

    paths = list((tmp_path / "saved").iterdir())
    assert len(paths) == len(hooks)
    for path in paths:
        resumed = fit_plateau(path.stem, [], ckpt_path=path)
        assert rate_of(resumed) == rate_of(uninterrupted), path
        assert torch.equal(state_vector(resumed), state_vector(uninterrupted)), path
