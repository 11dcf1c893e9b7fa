"""Files that a program writes in its hooks: after a fit with values they are those of the fit without a metric."""

import json
from contextlib import chdir
from pathlib import Path

import joblib
import lightning as L
import pytest
import torch

from flsv import FederatedLoop
from flsv.metrics import ShadowShapley
from helpers import warns
from helpers.fits import fit, state_vector
from zoo.program import SEED, Base, fit_valued, make_data

NAMES = ("history.csv", "final.pt")


class Saves(Base):
    """Saves its weights, and a row a round, in a folder."""

    def __init__(self, folder):
        super().__init__()
        self.folder = Path(folder)

    def on_train_epoch_end(self):
        with open(self.folder / "history.csv", "a") as file:
            file.write(f"{self.current_epoch}\n")

    def on_train_end(self):
        torch.save(self.state_dict(), self.folder / "final.pt")


def fit_in(folder, module, metric=None):
    """Fit in a folder, with a history of an earlier fit."""
    folder.mkdir(exist_ok=True)
    with chdir(folder):
        if metric is None:
            fit(FederatedLoop(seed=SEED), folder / "run", module, make_data(), rounds=2)
            return None
        return fit_valued(folder / "run", module, metric=metric)


@pytest.fixture
def folders(tmp_path):
    for name in ("plain", "valued"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "history.csv").write_text("earlier\n")
    return tmp_path / "plain", tmp_path / "valued"


def assert_same_files(plain, valued, names=NAMES):
    for name in names:
        assert (valued / name).read_bytes() == (plain / name).read_bytes()


@pytest.mark.fast_rows
@pytest.mark.parametrize("is_absolute", [True, False], ids=["absolute", "relative"])
def test_files_are_those_without_the_metric(folders, tmp_path, is_absolute):
    plain, valued = folders
    elsewhere = tmp_path / "working"
    for folder in folders:
        path = folder if is_absolute else "."
        loop = fit_in(
            elsewhere if is_absolute else folder,
            Saves(path),
            metric=ShadowShapley(coalitions="singles") if folder == valued else None,
        )

    assert loop.contributions["shadow"].isfinite().all()
    assert_same_files(plain, valued)


@pytest.mark.slow
def test_files_are_those_without_the_metric_if_workers_train_coalitions(folders, tmp_path):
    plain, valued = folders
    fit_in(tmp_path / "working", Saves(plain))

    with joblib.parallel_config(n_jobs=2):
        fit_in(tmp_path / "working", Saves(valued), ShadowShapley(coalitions="all"))

    assert_same_files(plain, valued)


class ReadsWhatItSaves(Saves):
    """Ends with the weights of its first round, which it has saved."""

    def on_train_epoch_end(self):
        if self.current_epoch == 0:
            torch.save(self.state_dict(), self.folder / "best.pt")

    def on_train_end(self):
        self.load_state_dict(torch.load(self.folder / "best.pt"))


@pytest.mark.slow
def test_no_two_coalitions_train_at_a_time_that_read_what_they_have_written(folders, tmp_path):
    values = []
    for num_jobs, folder in zip((1, 2), folders):
        with joblib.parallel_config(n_jobs=num_jobs):
            module = ReadsWhatItSaves(folder)
            metric = ShadowShapley(coalitions="all", performance="negative_loss")
            loop = fit_in(tmp_path / "working", module, metric)
        values.append(loop.contributions["shadow"].tolist())

    assert values[0] == values[1]
    assert_same_files(*folders, names=["best.pt"])


class ValidationHistory(Base):
    """Keeps a history of its validations in a file, by which it trains."""

    def on_train_epoch_start(self):
        lines = Path("history.csv").read_text().splitlines()
        self.weight = 1 / len(lines)

    def on_validation_epoch_end(self):
        with open("history.csv", "a") as file:
            file.write("validated\n")


@pytest.mark.slow
@pytest.mark.parametrize("performance", ["val_loss", "negative_loss"])
def test_scoring_by_validation_hooks_writes_nothing(folders, performance):
    plain, valued = folders
    plain_module, module = ValidationHistory(), ValidationHistory()
    mode = "min" if performance == "val_loss" else None
    metric = ShadowShapley(coalitions="singles", performance=performance, mode=mode)
    fit_in(plain, plain_module)

    loop = fit_in(valued, module, metric)

    assert loop.contributions["shadow"].isfinite().all()
    assert_same_files(plain, valued, names=["history.csv"])
    assert torch.equal(state_vector(module), state_vector(plain_module))


class TrainsByAFile(Base):
    """Trains by a number in a file, in the place of which it leaves another at its end."""

    def on_train_start(self):
        self.weight = json.loads(Path("weight.json").read_text())

    def on_train_end(self):
        Path("weight.json").write_text("7.0")
        Path("done").mkdir()


@pytest.mark.slow
def test_coalitions_see_files_as_they_were_before_the_run(tmp_path, recwarn):
    (tmp_path / "weight.json").write_text("0.5")

    loop = fit_in(tmp_path, TrainsByAFile(), ShadowShapley(coalitions="singles"))

    assert loop.contributions["shadow"].isfinite().all()
    assert not [warning for warning in recwarn if "another model" in str(warning.message)]
    assert (tmp_path / "weight.json").read_text() == "7.0"


class MakesFolder(L.Callback):
    """Makes a folder that must be new, outside of the working folder."""

    def __init__(self, folder, hook):
        self.folder = folder
        setattr(self, hook, self.make)

    def make(self, *_, **__):
        self.folder.mkdir()


@pytest.mark.fast_rows
@pytest.mark.parametrize("hook", ["setup", "on_train_start"])
def test_folder_that_no_coalition_can_make_a_second_time_ends_no_run(tmp_path, hook):
    callback = MakesFolder(tmp_path / "new", hook)

    with warns("File exists.*exist_ok=True.*exclude"):
        loop = fit_valued(tmp_path / "run", Base(), callbacks=[callback])

    assert loop.contributions["shadow"].isnan().all()
    assert loop.round_index == 2
    assert (tmp_path / "new").is_dir()


class FailsInCopies(L.Callback):
    """Finds a file otherwise in each fit but the first."""

    def __init__(self, path):
        self.path = path
        self.first_id = id(self)

    def on_train_start(self, *_):
        if id(self) != self.first_id:
            raise FileNotFoundError(f"no {self.path}")


@pytest.mark.slow
def test_trial_that_finds_files_otherwise_than_the_run_ends_no_run(tmp_path):
    with warns("there will be no values.*no model.bin.*exist_ok=True.*exclude"):
        loop = fit_valued(tmp_path, Base(), callbacks=[FailsInCopies("model.bin")])

    assert loop.contributions["shadow"].isnan().all()
    assert loop.round_index == 2
