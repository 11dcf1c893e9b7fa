"""What is seen after training is told beside the values: in a warning, in run.json and in the verdict."""

from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch

from flsv import FederatedLoop, Reporting
from flsv.metrics import ShadowShapley
from flsv.report import open_run
from flsv.results.round_result import UNLIKE_RUN
from flsv.results.verdict import doubt_inputs
from flsv.utilities.errors import ConfigurationError
from helpers.fits import trainer_for
from helpers.hidden_state import SEED, Base, Global, make_data


class Notes(L.Callback):
    """Writes a file of its own into a fixed folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def on_train_start(self, *_: Any) -> None:
        earlier_notes = list(self.folder.glob("note_*"))
        note = self.folder / f"note_{len(earlier_notes)}.txt"
        note.touch()


def fit_with_values(
    folder: Path,
    module: Any,
    *callbacks: Any,
    rounds: int = 2,
    **options: Any,
) -> FederatedLoop:
    metric = ShadowShapley(coalitions="singles", **options)
    metrics = {"shadow": metric}
    loop = FederatedLoop(
        metrics=metrics,
        seed=SEED,
        reporting=Reporting(table=False),
    )
    trainer = trainer_for(loop, folder, rounds=rounds, callbacks=list(callbacks))
    trainer.fit(module, make_data())
    return loop


def test_training_by_a_global_has_values_and_the_verdict_says_why_to_doubt_them(
    tmp_path: Path,
) -> None:
    with pytest.warns(UserWarning, match="came to another model than the run"):
        loop = fit_with_values(tmp_path, Global())

    assert loop.contributions["shadow"].isfinite().all()
    run = open_run(tmp_path)
    (event,) = run.record["events"]
    assert event.what == UNLIKE_RUN
    assert "the coalition of all clients" in event.text
    inputs = doubt_inputs(run.record["events"], ["0", "1", "2"])
    assert inputs["unlike_run"] == event.text


def test_training_that_its_state_determines_is_not_doubted(tmp_path: Path) -> None:
    fit_with_values(tmp_path, Base())

    assert open_run(tmp_path).record["events"] == []


def test_file_that_comes_with_a_coalition_is_told_unless_its_callback_is_left_out(
    tmp_path: Path, recwarn: pytest.WarningsRecorder
) -> None:
    folder = tmp_path / "taking part"
    folder.mkdir()
    with pytest.warns(UserWarning, match=r"note_1.txt.* came into being"):
        fit_with_values(folder, Base(), Notes(folder))

    folder_without = tmp_path / "left out"
    folder_without.mkdir()
    recwarn.clear()
    notes = Notes(folder_without)
    fit_with_values(folder_without, Base(), notes, leave_out=["Notes"])

    messages = [str(warning.message) for warning in recwarn]
    assert not any("came into being" in message for message in messages)
    assert len(list(folder_without.glob("note_*"))) == 1


class Saves(L.Callback):
    """Saves a checkpoint by a path of its own after each round."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        trainer.save_checkpoint(self.path)


def test_checkpoint_that_a_callback_saves_stays_the_runs(tmp_path: Path) -> None:
    path = tmp_path / "mine.ckpt"
    module = Base()

    # The last fit, of two rounds, is that of all clients.
    fit_with_values(tmp_path, module, Saves(path), rounds=3)

    weights = torch.load(path, weights_only=True)["state_dict"]
    for name, value in module.state_dict().items():
        assert torch.equal(weights[name], value)


def test_callback_that_is_not_there_cannot_be_left_out(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="the Trainer has no callback 'Note'"):
        fit_with_values(tmp_path, Base(), leave_out=["Note"])


def test_tensor_of_one_entry_with_any_stride_does_not_end_the_run(tmp_path: Path) -> None:
    module = Base()
    module.register_buffer("threshold", torch.zeros(3, 4)[:1, ::4])

    loop = fit_with_values(tmp_path, module)

    assert loop.contributions["shadow"].isfinite().all()
