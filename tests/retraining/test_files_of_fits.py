"""Files that a program writes in its hooks: after a fit with values they are those of the fit without a metric."""

import json
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


def append_row(path, row):
    with open(path, "a") as file:
        file.write(f"{row}\n")


class ModuleThatSavesItsHistoryAndWeights(Base):
    def __init__(self, folder):
        super().__init__()
        self.folder = folder

    def on_train_epoch_end(self):
        append_row(self.folder / "history.csv", self.current_epoch)

    def on_train_end(self):
        torch.save(self.state_dict(), self.folder / "final.pt")


def make_folder_with_history(folder):
    folder.mkdir(exist_ok=True)
    (folder / "history.csv").write_text("earlier\n")
    return folder


def fit_without_metric(folder, module):
    fit(FederatedLoop(seed=SEED), folder, module, make_data(), rounds=2)


def saved_files(folder):
    return (folder / "history.csv").read_bytes(), (folder / "final.pt").read_bytes()


@pytest.fixture(scope="module")
def files_without_metric(tmp_path_factory):
    folder = make_folder_with_history(tmp_path_factory.mktemp("plain"))
    fit_without_metric(folder, ModuleThatSavesItsHistoryAndWeights(folder))
    return saved_files(folder)


@pytest.mark.slow
def test_files_by_absolute_paths_are_those_without_the_metric(files_without_metric, tmp_path):
    folder = make_folder_with_history(tmp_path / "project")

    loop = fit_valued(tmp_path / "run", ModuleThatSavesItsHistoryAndWeights(folder))

    assert loop.contributions["shadow"].isfinite().all()
    assert saved_files(folder) == files_without_metric


@pytest.mark.slow
@pytest.mark.long
def test_files_are_those_without_the_metric_if_workers_train_coalitions(
    files_without_metric, tmp_path
):
    folder = make_folder_with_history(tmp_path / "project")

    with joblib.parallel_config(n_jobs=2):
        fit_valued(tmp_path / "run", ModuleThatSavesItsHistoryAndWeights(folder))

    assert saved_files(folder) == files_without_metric


class ModuleThatEndsWithItsSavedWeights(Base):
    """Saves its weights in round 0, and ends with what it reads from this file."""

    def __init__(self, path):
        super().__init__()
        self.path = path

    def on_train_epoch_end(self):
        if self.current_epoch == 0:
            torch.save(self.state_dict(), self.path)

    def on_train_end(self):
        self.load_state_dict(torch.load(self.path))


def fit_with_workers(num_workers, folder):
    """Return the values, and what the module has saved."""
    path = folder / "best.pt"
    path.unlink(missing_ok=True)
    module = ModuleThatEndsWithItsSavedWeights(path)
    metric = ShadowShapley(coalitions="all", performance="negative_loss")
    with joblib.parallel_config(n_jobs=num_workers):
        loop = fit_valued(folder / "run", module, metric=metric)
    return loop.contributions["shadow"].tolist(), path.read_bytes()


@pytest.mark.slow
def test_coalitions_that_read_what_they_write_train_one_after_the_other(tmp_path):
    values_by_workers, weights_by_workers = fit_with_workers(2, tmp_path)
    values_by_one, weights_by_one = fit_with_workers(1, tmp_path)

    assert values_by_workers == values_by_one
    assert weights_by_workers == weights_by_one


class ModuleThatTrainsByItsValidationHistory(Base):
    """Writes a row at each validation, and divides its loss by the number of rows."""

    def on_train_epoch_start(self):
        rows = Path("history.csv").read_text().splitlines()
        self.weight = 1 / len(rows)

    def on_validation_epoch_end(self):
        append_row("history.csv", "validated")


@pytest.mark.slow
@pytest.mark.parametrize(("performance", "mode"), [("val_loss", "min"), ("negative_loss", None)])
def test_scoring_by_validation_hooks_writes_nothing(tmp_path, performance, mode, monkeypatch):
    plain_folder = make_folder_with_history(tmp_path / "plain")
    plain_module = ModuleThatTrainsByItsValidationHistory()
    monkeypatch.chdir(plain_folder)
    fit_without_metric(plain_folder / "run", plain_module)

    valued_folder = make_folder_with_history(tmp_path / "valued")
    valued_module = ModuleThatTrainsByItsValidationHistory()
    metric = ShadowShapley(coalitions="singles", performance=performance, mode=mode)
    monkeypatch.chdir(valued_folder)
    loop = fit_valued(valued_folder / "run", valued_module, metric=metric)

    assert loop.contributions["shadow"].isfinite().all()
    history = (valued_folder / "history.csv").read_text()
    history_without_metric = (plain_folder / "history.csv").read_text()
    assert history == history_without_metric
    assert torch.equal(state_vector(valued_module), state_vector(plain_module))


class ModuleThatReplacesTheFileItTrainsBy(Base):
    """Reads the weight of its loss from a file, in which it leaves another at its end."""

    def on_train_start(self):
        self.weight = json.loads(Path("weight.json").read_text())

    def on_train_end(self):
        Path("weight.json").write_text("7.0")
        Path("done").mkdir()


@pytest.mark.slow
def test_coalitions_read_files_as_they_were_before_the_run(tmp_path, monkeypatch, recwarn):
    monkeypatch.chdir(tmp_path)
    Path("weight.json").write_text("0.5")

    loop = fit_valued(tmp_path / "run", ModuleThatReplacesTheFileItTrainsBy())

    assert loop.contributions["shadow"].isfinite().all()
    warnings = [str(warning.message) for warning in recwarn]
    assert not any("came to another model" in warning for warning in warnings)
    assert Path("weight.json").read_text() == "7.0"


class CallbackThatMakesANewFolder(L.Callback):
    """Makes its folder in a hook, which fails if the folder exists. It is outside of the working folder."""

    def __init__(self, folder, hook):
        self.folder = folder
        setattr(self, hook, self.make_folder)

    def make_folder(self, *_, **__):
        self.folder.mkdir()


@pytest.mark.fast_rows
@pytest.mark.parametrize("hook", ["setup", "on_train_start"])
def test_run_ends_without_values_if_coalitions_cannot_make_a_folder_again(tmp_path, hook):
    callback = CallbackThatMakesANewFolder(tmp_path / "new", hook)

    with warns("File exists.*exist_ok=True.*exclude"):
        loop = fit_valued(tmp_path / "run", Base(), callbacks=[callback])

    assert loop.contributions["shadow"].isnan().all()
    assert loop.round_index == 2
    assert (tmp_path / "new").is_dir()


class CallbackThatFailsInCopies(L.Callback):
    def __init__(self):
        self.id_of_original = id(self)

    def on_train_start(self, *_):
        is_copy = id(self) != self.id_of_original
        if is_copy:
            raise FileNotFoundError("no model.bin")


@pytest.mark.slow
def test_run_ends_without_values_if_the_dry_run_finds_other_files(tmp_path):
    with warns("there will be no values.*no model.bin.*exist_ok=True.*exclude"):
        loop = fit_valued(tmp_path, Base(), callbacks=[CallbackThatFailsInCopies()])

    assert loop.contributions["shadow"].isnan().all()
    assert loop.round_index == 2
