"""What Lightning's features and the reader see of a federation: schedules, validation, what is logged and printed."""

import warnings
from functools import partial
from pathlib import Path

import pytest
from lightning.pytorch.callbacks import Callback, EarlyStopping, ModelCheckpoint

from flsv import ClientEvaluation, Reporting
from flsv.core.artifacts import keep_table
from flsv.federation import FederatedLoop
from flsv.metrics import ClassSpecificShapley, CumulativeShapley, ShadowShapley
from flsv.training.algorithms import ClientAlgorithm
from helpers import refused
from helpers.data import toy_data
from helpers.fits import (
    Cohorts,
    fit,
    make_loop_of_three_clients,
    make_shapfed_loop,
    plain_trainer,
    trainer_for,
)
from helpers.models import Plain


def test_fast_dev_run_is_one_round_of_one_batch_per_client(tmp_path):
    loop = make_shapfed_loop(evaluation=ClientEvaluation(every=1))
    trainer = trainer_for(loop, tmp_path, fast_dev_run=True)
    data = toy_data()

    trainer.fit(Plain(), data)

    assert loop.round_index == 1
    assert trainer.global_step == data.num_clients
    assert loop.contributions["cssv"].isfinite().all()
    assert not list(tmp_path.rglob("*.csv"))


def test_trainer_is_restored_after_the_fit(tmp_path):
    loop = FederatedLoop(seed=1)
    trainer = trainer_for(
        loop, tmp_path, rounds=1, limit_train_batches=0.5, accumulate_grad_batches=2
    )
    data = toy_data()
    module = Plain()
    trainer.fit(module, data)

    assert trainer.limit_train_batches == 0.5
    assert trainer.reload_dataloaders_every_n_epochs == 0
    assert "train_dataloader" not in vars(data)
    loops_before = plain_trainer(tmp_path).fit_loop
    assert type(trainer.fit_loop) is type(loops_before)
    assert type(trainer.fit_loop.epoch_loop) is type(loops_before.epoch_loop)
    assert vars(trainer.fit_loop).keys() == vars(loops_before).keys()
    assert vars(trainer.fit_loop.epoch_loop).keys() == vars(loops_before.epoch_loop).keys()
    progress = trainer.fit_loop.epoch_loop.batch_progress
    assert type(progress) is type(loops_before.epoch_loop.batch_progress)
    assert progress.is_last_batch

    (result,) = trainer.validate(module, data, verbose=False)
    assert 0 <= result["val_acc"] <= 1
    assert "test_acc" in trainer.test(module, data, verbose=False)[0]


# ---- What callbacks may monitor: values of clients, weights, accuracies and the training loss


def test_fit_shows_no_deprecation_of_what_lightning_calls(tmp_path):
    data = toy_data()

    with warnings.catch_warnings():
        # While it makes a loader, Lightning calls what torch is to remove.
        warnings.filterwarnings("error", message=r".*isinstance\(treespec, LeafSpec\)")
        fit(make_loop_of_three_clients(), tmp_path, data=data, rounds=2)


class RecordsLoggedValues(Callback):
    def __init__(self):
        self.logged_values = []

    def on_train_epoch_end(self, trainer, module):
        prefixes = ("cssv/", "weight/", "client_accuracy/")
        values_of_round = {}
        for name, value in trainer.callback_metrics.items():
            if name.startswith(prefixes):
                values_of_round[name] = value.item()
        self.logged_values.append(values_of_round)


def names_with(prefix, values):
    return {name for name in values if name.startswith(prefix)}


COHORTS = [[0, 1], [1, 2], [1, 2], [0, 2]]


def log_with_cohorts(folder, rounds, callbacks=(), **options):
    """Return what is logged in each round of a fit whose accuracies are measured in every second one."""
    recording = RecordsLoggedValues()
    loop = FederatedLoop(
        metrics={"cssv": ClassSpecificShapley()},
        sampler=Cohorts(COHORTS),
        seed=1,
        evaluation=ClientEvaluation(every=2),
    )
    fit(loop, folder, rounds=rounds, callbacks=[recording, *callbacks], **options)
    return recording.logged_values


@pytest.fixture(scope="module")
def values_of_rounds(tmp_path_factory):
    return log_with_cohorts(tmp_path_factory.mktemp("whole"), rounds=4)


@pytest.mark.slow
def test_accuracy_is_logged_as_soon_as_it_is_known(values_of_rounds):
    has_accuracy = ["client_accuracy/mean" in values for values in values_of_rounds]
    assert has_accuracy == [False, True, True, True]


@pytest.mark.slow
def test_absent_client_keeps_its_value_but_has_no_weight_in_the_round(values_of_rounds):
    seen_clients = set()
    for values, cohort in zip(values_of_rounds, COHORTS, strict=True):
        seen_clients |= set(cohort)
        assert names_with("weight/", values) == {f"weight/client_{client}" for client in cohort}
        assert names_with("cssv/", values) == {f"cssv/client_{client}" for client in seen_clients}


@pytest.mark.slow
def test_values_of_absent_clients_are_logged_after_a_resume(tmp_path, values_of_rounds):
    saving = ModelCheckpoint(tmp_path, "last")
    first_values = log_with_cohorts(tmp_path, 2, callbacks=[saving], enable_checkpointing=True)
    next_values = log_with_cohorts(tmp_path, 4, ckpt_path=tmp_path / "last.ckpt")

    assert [*first_values, *next_values] == values_of_rounds


@pytest.mark.fast_rows("client_accuracy/mean-False")
@pytest.mark.parametrize(
    ("name", "validation"),
    [
        ("cssv/client_1", True),
        ("client_accuracy/mean", False),
    ],
)
def test_early_stopping_and_checkpoints_can_monitor_a_contribution(tmp_path, name, validation):
    record = RecordsLoggedValues()
    best = ModelCheckpoint(tmp_path / "best", "{epoch}", monitor=name, mode="max")
    patience = 2
    # No accuracy rises by 5, so that only the first round's counts as a gain.
    stop = EarlyStopping(name, mode="max", min_delta=5.0, patience=patience)
    loop = FederatedLoop(
        metrics={"cssv": ClassSpecificShapley()},
        seed=1,
        evaluation=ClientEvaluation(every=1),
    )
    options = {"enable_checkpointing": True, "limit_val_batches": 1.0 if validation else 0}

    fit(loop, tmp_path, rounds=8, callbacks=[stop, best, record], **options)
    assert loop.round_index == 1 + patience

    values = [monitored[name] for monitored in record.logged_values]
    best_value = max(values)
    best_round = values.index(best_value)
    assert best.best_model_score.item() == pytest.approx(best_value)
    assert Path(best.best_model_path).stem == f"epoch={best_round}"


@pytest.mark.fast_rows("make_callback1")
@pytest.mark.parametrize("make_callback", [EarlyStopping, partial(ModelCheckpoint, None, None)])
def test_monitor_of_values_that_come_after_the_run_is_refused_before_it(tmp_path, make_callback):
    callback = make_callback(monitor="value/client_0")
    loop = FederatedLoop(metrics={"value": ShadowShapley()}, seed=1)

    with refused("such as CumulativeShapley"):
        fit(
            loop,
            tmp_path,
            rounds=2,
            data=toy_data(server_val=0.3),
            callbacks=[callback],
            enable_checkpointing=True,
        )

    assert loop.round_index == 0


@pytest.mark.slow
def test_metric_that_the_message_names_can_be_monitored_beside_late_values(tmp_path):
    stop = EarlyStopping("sv/client_0", patience=5)
    loop = FederatedLoop(metrics={"sv": CumulativeShapley(), "other": ShadowShapley()}, seed=1)

    fit(loop, tmp_path, rounds=2, data=toy_data(server_val=0.3), callbacks=[stop])

    assert loop.round_index == 2


# ---- What people who fit from Python see: how a run ended, no warnings every round, and objects as small tables


class KeepsTableAtClient1(ClientAlgorithm):
    def begin_client(self, context):
        if context.instruction.client_id == 1:
            keep_table(context.local, "note", lambda: "kept")


@pytest.mark.parametrize("files", [True, False])
def test_table_kept_by_a_client_is_written_into_the_clients_folder(tmp_path, files):
    loop = FederatedLoop(client_algorithm=KeepsTableAtClient1(), reporting=Reporting(files=files))

    fit(loop, tmp_path, rounds=1)

    expected = [tmp_path / "clients/1/note.csv"] if files else []
    assert list(tmp_path.glob("clients/*/*")) == expected
