"""The last round is an event of a run, however the run ends; and a run that goes on counts nothing twice."""

from pathlib import Path

import pandas
import pytest
import torch
from lightning.pytorch.callbacks import Callback, EarlyStopping, ModelCheckpoint, Timer

from flsv import ClientEvaluation, FederatedLoop
from flsv.metrics import ShadowShapley
from flsv.sampling import UniformSampler
from helpers import warns
from helpers.data import toy_data
from helpers.fits import trainer_for
from helpers.models import LogsLoss, network

PLANNED = 12
RARE = ClientEvaluation(every=5)
#: Rounds that are complete when the runs of these tests end.
DONE = 2

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*bar is not installed"),
    pytest.mark.filterwarnings("ignore:.*holds rounds of an earlier run"),
]


class StopsInTheRound(Callback):
    """Stops in the middle of a round, which is then discarded."""

    def on_train_batch_end(self, trainer, *_):
        if trainer.current_epoch == DONE:
            trainer.should_stop = True


class StopsAfterTheRound(Callback):
    def on_train_epoch_end(self, trainer, *_):
        if trainer.current_epoch == DONE - 1:
            trainer.should_stop = True


class ClockJumps(Callback):
    """Sets the clock of a timer forward when the rounds are done."""

    def __init__(self, timer):
        self.timer = timer

    def on_train_epoch_start(self, trainer, *_):
        if trainer.current_epoch == DONE:
            self.timer._offset = 7200


def make_early_stopping():
    return EarlyStopping("val_loss", patience=1, min_delta=100.0)


def make_timer():
    one_hour = Timer(duration={"hours": 1})
    return [ClockJumps(one_hour), one_hour]


ENDS = {
    "early stopping": lambda: [make_early_stopping()],
    "max_time": make_timer,
    "in a round": lambda: [StopsInTheRound()],
    "after a round": lambda: [StopsAfterTheRound()],
}


def fit_run(
    folder,
    rounds,
    callbacks=(),
    every=1,
    ckpt_path=None,
    **options,
):
    metric = ShadowShapley(coalitions="singles", performance="negative_loss", every=every)
    loop = FederatedLoop(seed=2, metrics={"sv": metric}, **options)
    saves = any(isinstance(callback, ModelCheckpoint) for callback in callbacks)
    trainer = trainer_for(
        loop,
        folder,
        rounds,
        callbacks=[*callbacks],
        enable_checkpointing=saves,
    )
    module = LogsLoss(network(batch_norm=False))
    data = toy_data((3, 2, 2), server_val=0.3, client_test=0.2)
    trainer.fit(module, data, ckpt_path=ckpt_path)

    return loop, trainer


def read_values(loop, metric="sv"):
    rows = loop.history().query("metric == @metric")
    return rows.pivot(index="round", columns="client", values="value")


@pytest.fixture(scope="module")
def planned_run(tmp_path_factory):
    """A run of as many rounds as the others have at their ends."""
    evaluation = ClientEvaluation(every=1)
    loop, _ = fit_run(tmp_path_factory.mktemp("planned"), DONE, evaluation=evaluation)
    return loop


@pytest.mark.by_turn
@pytest.mark.slow
@pytest.mark.parametrize("end", ENDS)
def test_values_and_scores_of_a_run_that_is_stopped_are_of_its_last_round(
    tmp_path, planned_run, end
):
    callbacks = ENDS[end]()
    loop, _ = fit_run(tmp_path, PLANNED, callbacks, every=PLANNED, evaluation=RARE)

    assert loop.round_index == DONE
    assert torch.equal(loop.contributions["sv"], planned_run.contributions["sv"])
    assert read_values(loop).index.tolist() == [DONE - 1]

    assert "accuracy" in loop.client_scores
    assert torch.equal(loop.client_scores["accuracy"], planned_run.client_scores["accuracy"])

    scores = read_values(loop, "accuracy")
    assert scores.index.tolist() == [DONE - 1]

    expected = read_values(planned_run, "accuracy")
    pandas.testing.assert_frame_equal(scores, expected.loc[[DONE - 1]])


class InterruptsAfterRounds(Callback):
    def on_train_batch_start(self, trainer, *_):
        if trainer.current_epoch == DONE:
            raise KeyboardInterrupt


@pytest.mark.slow
def test_interrupted_run_names_values_and_scores_of_an_earlier_round(tmp_path):
    message = "scores of clients' own models: the run was stopped after round 2"
    with pytest.raises(SystemExit), warns(message):
        fit_run(tmp_path, PLANNED, [InterruptsAfterRounds()], evaluation=RARE)


# ---- runs that go on


@pytest.mark.by_turn
@pytest.mark.slow
@pytest.mark.parametrize(
    ("planned", "every", "is_saved_in_fit", "compared"),
    [
        (DONE, 1, False, "round >= 0"),
        # Early stopping ends the run after a round that has values only since it is the last one.
        (PLANNED, 3, True, f"round >= {DONE}"),
        (PLANNED, 3, False, f"round >= {DONE}"),
    ],
)
def test_resumed_run_counts_no_round_twice(tmp_path, planned, every, is_saved_in_fit, compared):
    options = {"every": every, "sampler": UniformSampler(2)}
    saving = ModelCheckpoint(tmp_path, "last", save_last=True)
    _, trainer = fit_run(tmp_path, planned, [make_early_stopping(), saving], **options)
    checkpoint = Path(saving.last_model_path)
    if not is_saved_in_fit:
        checkpoint = tmp_path / "end.ckpt"
        trainer.save_checkpoint(checkpoint)

    resumed, _ = fit_run(tmp_path, 4, ckpt_path=checkpoint, **options)
    unbroken, _ = fit_run(tmp_path / "all", 4, **options)

    rows = resumed.history().query(compared).reset_index(drop=True)
    expected_rows = unbroken.history().query(compared).reset_index(drop=True)
    pandas.testing.assert_frame_equal(rows, expected_rows)
