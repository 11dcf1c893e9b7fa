"""A run that is killed and resumed is, to the bit, the run that was not."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import BaseFinetuning, Callback
from resume_run import Stop, checkpoints, run
from toys import Plain, fit, sgd, toy_data, trainer_for, vector

from flsv import ConfigurationError, Reporting
from flsv.loop import FederatedLoop


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, FederatedLoop, L.LightningModule]:
    folder = tmp_path_factory.mktemp("whole")
    return folder, *run(folder)


def assert_same_run(folder: Path, loop: FederatedLoop, module: L.LightningModule, whole: Any) -> None:
    whole_folder, whole_loop, whole_module = whole
    assert torch.equal(vector(module), vector(whole_module))
    for mine, theirs in zip(loop.contributions.values(), whole_loop.contributions.values()):
        assert torch.equal(mine.nan_to_num(9), theirs.nan_to_num(9))
    assert torch.equal(loop.weights.nan_to_num(9), whole_loop.weights.nan_to_num(9))
    torch.testing.assert_close(loop.client_scores, whole_loop.client_scores, rtol=0, atol=0)
    assert loop.state.starts.keys() == whole_loop.state.starts.keys()
    assert all(torch.equal(model, whole_loop.state.starts[i]) for i, model in loop.state.starts.items())
    metrics, whole_metrics = module.trainer.callback_metrics, whole_module.trainer.callback_metrics
    assert {k: v.item() for k, v in metrics.items()} == {k: v.item() for k, v in whole_metrics.items()}
    csv = "log/contributions.csv"
    assert (folder / csv).read_text() == (whole_folder / csv).read_text()


@pytest.mark.slow
def test_kill_9_in_the_middle_of_a_round(tmp_path: Path, whole: Any) -> None:
    die, here = (3, 4), Path(__file__).parent
    command = [sys.executable, "resume_run.py", str(tmp_path), "--die", *map(str, die)]
    killed = subprocess.run(command, cwd=here, capture_output=True, text=True, env=_environment(here))
    assert killed.returncode == -9, killed.stderr
    rounds = [line.split(",")[0] for line in (tmp_path / "log/contributions.csv").read_text().splitlines()[1:]]
    assert set(rounds) == {str(r) for r in range(die[0])}
    assert_same_run(tmp_path, *run(tmp_path, ckpt_path=tmp_path / "checkpoints/last.ckpt"), whole)


def _environment(here: Path) -> dict[str, str]:
    import os

    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(here), str(here.parent), os.environ.get("PYTHONPATH", "")]),
    }


class SaveAt(Callback):
    """Saves a checkpoint wherever Lightning lets anybody save one."""

    def __init__(self, hook: str, path: Path, round_index: int, batch: int = 0) -> None:
        self.path, self.round_index, self.batch = path, round_index, batch
        setattr(self, hook, self.save)

    def save(self, trainer: L.Trainer, module: L.LightningModule, *args: Any, **kwargs: Any) -> None:
        if trainer.current_epoch == self.round_index and trainer.training | trainer.validating:
            place = trainer.fit_loop.epoch_loop.batch_idx if trainer.training else args[-1:]
            if len(args) >= 2 and place not in (self.batch, (self.batch,)):
                return
            if not self.path.exists():
                trainer.save_checkpoint(self.path)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("hook", "batch"),
    [
        ("on_train_epoch_start", 0),
        ("on_train_batch_start", 0),
        ("on_train_batch_end", 5),
        ("on_train_batch_end", -1),
        ("on_validation_start", 0),
        ("on_train_epoch_end", 0),
    ],
)
def test_from_wherever_a_checkpoint_was_saved(tmp_path: Path, whole: Any, hook: str, batch: int) -> None:
    path = tmp_path / "middle.ckpt"
    if batch == -1:  # the last of the round
        batch = sum(visit.batches for visit in _visits_of_round(whole[1], 2)) - 1
    first = tmp_path / "first"
    run(first, callbacks=[SaveAt(hook, path, 2, batch)])
    assert path.exists()
    resumed = tmp_path / "second"
    loop, module = run(resumed, ckpt_path=path)
    assert loop.round_index == 5
    assert_same_run(resumed, loop, module, whole)


def _visits_of_round(loop: FederatedLoop, round_index: int) -> Any:
    from flsv.clients.cohort import CohortLoader
    from flsv.seeding import generator_for

    cohort = loop.sampler.sample(5, {}, generator_for(11, "cohort", round_index)).tolist()
    return CohortLoader(loop._fit.data, cohort, seed=11, round_index=round_index, local_epochs=2).visits


def test_a_checkpoint_saved_within_a_round_holds_the_global_model(tmp_path: Path) -> None:
    states = {}

    class Remember(Callback):
        def on_train_epoch_start(self, trainer: L.Trainer, module: L.LightningModule) -> None:
            states[trainer.current_epoch] = {k: v.clone() for k, v in module.state_dict().items()}

    run(tmp_path, callbacks=[Remember(), SaveAt("on_train_batch_end", tmp_path / "m.ckpt", 2, 5)])
    checkpoint = torch.load(tmp_path / "m.ckpt", weights_only=False)
    assert all(torch.equal(value, states[2][name]) for name, value in checkpoint["state_dict"].items())
    assert checkpoint["epoch"] == 2 - 1 or checkpoint["epoch"] == 2


def test_an_exception_discards_the_round_and_leaves_the_global_model(tmp_path: Path, whole: Any) -> None:
    """Also what Ctrl-C does; a checkpoint saved on the exception resumes from the round's start."""

    class SaveOnException(Callback):
        def on_exception(self, trainer: L.Trainer, module: L.LightningModule, exception: BaseException) -> None:
            trainer.save_checkpoint(tmp_path / "exception.ckpt")

    with pytest.warns(UserWarning, match="round 4 is discarded"), pytest.raises(ArithmeticError):
        run(tmp_path, callbacks=[Stop(3, 4, ArithmeticError), SaveOnException()])
    assert_same_run(tmp_path, *run(tmp_path, ckpt_path=tmp_path / "exception.ckpt"), whole)


def test_max_time_in_the_middle_of_a_round(tmp_path: Path, whole: Any) -> None:
    class TimeIsUp(Callback):
        def on_train_batch_end(self, trainer: L.Trainer, module: L.LightningModule, *args: Any) -> None:
            if trainer.current_epoch == 2 and trainer.fit_loop.epoch_loop.batch_idx == 3:
                trainer.should_stop = True

    with pytest.warns(UserWarning, match="round 3 is discarded: the epoch ended"):
        loop, module = run(tmp_path, callbacks=[TimeIsUp()])
    assert loop.round_index == 2
    assert vector(module).isfinite().all()
    assert_same_run(tmp_path, *run(tmp_path, ckpt_path=tmp_path / "checkpoints/last.ckpt"), whole)


def test_more_rounds_than_the_first_run_asked_for(tmp_path: Path, whole: Any) -> None:
    run(tmp_path, rounds=4)
    assert_same_run(tmp_path, *run(tmp_path, ckpt_path=tmp_path / "checkpoints/last.ckpt"), whole)


class StopsInValidation(L.Callback):
    """An error in the validation after the second round."""

    def on_validation_batch_start(self, trainer: L.Trainer, *_: Any) -> None:
        if trainer.current_epoch == 1:
            raise ArithmeticError


def test_a_trainer_whose_fit_ended_in_validation_is_refused(tmp_path: Path) -> None:
    loop = FederatedLoop(seed=1, reporting=Reporting(table=False))
    trainer = trainer_for(loop, tmp_path, 4, callbacks=[StopsInValidation()])
    with pytest.raises(ArithmeticError):
        trainer.fit(Plain(), toy_data())
    assert (trainer.current_epoch, loop.round_index) == (1, 2)  # callbacks save by the epoch that was
    with pytest.raises(ConfigurationError, match="ended in a validation: make a new Trainer"):
        trainer.fit(Plain(), toy_data())


class Thaws(BaseFinetuning):
    """The first layer and its BatchNorm train from the second round on."""

    def freeze_before_training(self, module: Any) -> None:
        self.freeze(module.net[:2], train_bn=False)

    def finetune_function(self, module: Any, epoch: int, optimizer: Any) -> None:
        if epoch == 1:
            self.unfreeze_and_add_param_group(module.net[:2], optimizer)


def test_finetuning_goes_on_where_it_was(tmp_path: Path) -> None:
    def run_for(rounds: int, folder: Path, **kwargs: Any) -> torch.Tensor:
        module = Plain(optimizer=lambda parameters: sgd([p for p in parameters if p.requires_grad]))
        saving: dict[str, Any] = {"enable_checkpointing": True, "callbacks": [Thaws(), checkpoints(folder)]}
        return vector(fit(FederatedLoop(seed=1), folder, module, rounds=rounds, **saving, **kwargs))

    whole = run_for(4, tmp_path / "whole")
    run_for(2, tmp_path / "half")
    assert torch.equal(run_for(4, tmp_path / "rest", ckpt_path=tmp_path / "half/checkpoints/last.ckpt"), whole)
