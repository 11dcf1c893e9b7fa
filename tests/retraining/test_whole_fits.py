"""ShadowShapley on ordinary kinds of modules: every coalition against a plain loop that trains it alone, by hand."""

import copy
import os
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor

from flsv import FederatedLoop, Reporting
from flsv.functional import few_coalitions_shapley
from flsv.metrics import ShadowShapley
from flsv.metrics.coalitions.design import coalition_masks, design_within, fits_of
from flsv.retraining.fit_order import FitOrder
from flsv.retraining.forked_fits import ForkedFits
from flsv.retraining.train_fits import CoalitionTraining
from flsv.retraining.utility_store import UtilityStore
from flsv.utilities.errors import ConfigurationError
from flsv.utilities.supervisor import ChildFailed
from helpers import slow_except
from helpers.coalition_kinds import KINDS, Kind, Manual
from helpers.coalitions_by_hand import FIT_ROUNDS, SEED, forbid_forks, make_three_clients
from helpers.fits import state_vector, trainer_for
from helpers.recorded import Recorded

QUIET = Reporting(table=False)


def fit_kind(kind: Kind, folder: Path, metrics: dict[str, Any]) -> tuple[FederatedLoop, Any]:
    loop = FederatedLoop(metrics=metrics, seed=SEED, reporting=QUIET, **kind.loop)
    module = kind.module()
    callbacks = []
    if kind.callback is not None:
        callbacks.append(kind.callback())

    trainer = trainer_for(loop, folder, FIT_ROUNDS, callbacks=callbacks)
    trainer.fit(module, make_three_clients())
    return loop, module


#: One of each reason.
FAST = ("a plain MLP", "manual optimization", "`ReduceLROnPlateau`")


@pytest.mark.parametrize("name", slow_except(FAST, KINDS))
def test_every_coalitions_fit_equals_a_plain_loop(tmp_path: Path, name: str) -> None:
    kind = KINDS[name]
    metric = Recorded(coalitions="all", performance="negative_loss")
    untrained = kind.module()

    loop, module = fit_kind(kind, tmp_path, {"shadow": metric})

    masks = coalition_masks("all", 3)
    by_hand = []
    for mask in masks:
        hand = kind.hand(copy.deepcopy(untrained.net), untrained.optimizer)
        by_hand.append(hand.utility(mask.nonzero()[:, 0].tolist()))

    expected = torch.tensor(by_hand, dtype=torch.float64)
    metric_of_run = loop.metrics["shadow"]

    assert isinstance(metric_of_run, Recorded)

    utilities = metric_of_run.game.flatten()
    torch.testing.assert_close(utilities, expected, rtol=0, atol=1e-5)

    values = few_coalitions_shapley(masks, expected).values
    shadow = loop.contributions["shadow"].double()

    torch.testing.assert_close(shadow, values, rtol=0, atol=1e-5)

    _, without = fit_kind(kind, tmp_path, {})
    assert torch.equal(state_vector(module), state_vector(without))


@pytest.mark.slow
def test_kill_during_coalitions_keeps_finished_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kind = KINDS["manual optimization"]
    keep = UtilityStore.add
    train = ForkedFits.train
    stored_members = list[Any]()
    trained = list[Any]()

    def counted(store: UtilityStore, seed: int, members: Any, *results: Any) -> None:
        if len(stored_members) == 3:
            raise KeyboardInterrupt
        stored_members.append(members)
        keep(store, seed, members, *results)

    def loop() -> FederatedLoop:
        return FederatedLoop(
            metrics={"shadow": ShadowShapley(coalitions="both", performance="negative_loss")},
            seed=SEED,
            reporting=QUIET,
        )

    def fit(federation: FederatedLoop, folder: Path, path: Path | None = None) -> list[float]:
        saves = ModelCheckpoint(folder / "checkpoints", save_last=True)
        trainer = trainer_for(
            federation, folder, FIT_ROUNDS, callbacks=[saves], enable_checkpointing=True
        )
        trainer.fit(kind.module(), make_three_clients(), ckpt_path=path)

        return (
            federation.history()
            .query("metric == 'shadow'")
            .sort_values(["round", "client"])
            .value.tolist()
        )

    whole = fit(loop(), tmp_path / "whole")
    monkeypatch.setattr(UtilityStore, "add", counted)
    stopped = loop()

    with pytest.warns(UserWarning, match=r"3 of 6 coalitions are trained, and kept in"):
        fit(stopped, tmp_path / "killed")
    assert stopped.contributions["shadow"].isnan().all()
    assert "values stand after training" in repr(stopped.contributions["shadow"])

    monkeypatch.setattr(UtilityStore, "add", keep)
    monkeypatch.setattr(
        ForkedFits, "train", lambda forks, orders: trained.extend(orders) or train(forks, orders)
    )
    resumed = loop()

    assert (
        fit(resumed, tmp_path / "killed", tmp_path / "killed" / "checkpoints" / "last.ckpt")
        == whole
    )
    assert len(whole) == 3 * FIT_ROUNDS

    again_trained = [order.members for order in trained]
    assert again_trained[0] == (0, 1, 2)  # the proof
    assert sorted([*stored_members, *again_trained[1:]]) == [
        (0,),
        (0, 1),
        (0, 2),
        (1,),
        (1, 2),
        (2,),
    ]


@pytest.mark.parametrize(
    ("max_fits", "clients", "costs"),
    [(10, 4, 7.0), (10, 5, 9.0), (15, 5, 15.0), (10, 6, 6.0), (10, 12, 1.0)],
)
def test_design_within_max_fits_has_the_expected_cost(
    max_fits: float, clients: int, costs: float
) -> None:
    assert fits_of(coalition_masks(design_within(max_fits, clients), clients)) == costs


class Diverges(Manual):
    """Of client 1 alone, in the second round, nothing finite comes."""

    def loss(self, batch: Any) -> Tensor:
        loop: Any = next(
            callback for callback in self.trainer.callbacks if isinstance(callback, FederatedLoop)
        )  # type: ignore[attr-defined]
        loss = super().loss(batch)
        if self.training and loop.round_index == 1:
            cohort = loop.sampler.sample(3, {}, torch.Generator()).tolist()
            if cohort == [1]:
                return loss * float("nan")

        return loss


def test_divergence_of_one_coalition_changes_no_other_coalitions_score(tmp_path: Path) -> None:
    kind = Kind(Diverges)
    games: list[Tensor] = []
    for module in (Diverges, Manual):
        kind.module = module
        loop, _ = fit_kind(
            kind,
            tmp_path,
            {"shadow": Recorded(coalitions="all", performance="negative_loss")},
        )
        metric: Any = loop.metrics["shadow"]
        games.append(metric.game)

    is_different = (games[0] != games[1]).tolist()
    client_1_alone = torch.tensor([False, True, False])

    assert is_different == (coalition_masks("all", 3) == client_1_alone).all(1).tolist()


class Lucky(Manual):
    """Its score is drawn."""

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("luck", torch.rand(()))


def test_all_coalitions_are_scored_with_the_same_random_numbers(tmp_path: Path) -> None:
    loop, _ = fit_kind(
        Kind(Lucky),
        tmp_path,
        {"shadow": Recorded(coalitions="all", performance="luck", mode="max")},
    )
    metric: Any = loop.metrics["shadow"]

    assert metric.game[1:].tolist() == [metric.game[1].item()] * 7  # the first one has not trained


class Locked(L.Callback):
    def __init__(self) -> None:
        self.lock = threading.Lock()


class Fails(L.Callback):
    """Where client 0 is not there."""

    def on_train_batch_end(self, trainer: L.Trainer, *args: Any) -> None:
        loop: Any = next(
            callback for callback in trainer.callbacks if isinstance(callback, FederatedLoop)
        )  # type: ignore[attr-defined]
        if loop.current_client == 1 and 0 not in loop.state.cohort:
            raise ZeroDivisionError("nobody there")


def test_trainer_with_a_lock_trains_coalitions_in_forks_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shadow: dict[str, Any] = {"shadow": ShadowShapley(coalitions="all")}
    loop, _ = fit_kind(Kind(KINDS["manual optimization"].module, callback=Locked), tmp_path, shadow)

    assert not loop.contributions["shadow"].isnan().any()  # a fork has the lock

    forbid_forks(monkeypatch)
    with pytest.raises(
        ConfigurationError, match="since it is a test. But the Trainer, .* cannot be pickled .*lock"
    ):
        fit_kind(Kind(KINDS["manual optimization"].module, callback=Locked), tmp_path, shadow)


@pytest.mark.parametrize(
    ("coalitions", "failed", "in_forks"),
    [
        ("all", "2 coalitions failed to train, client 1, clients 1 and 2", True),
        pytest.param(
            "singles", "1 coalition failed to train, client 1", False, marks=pytest.mark.slow
        ),
    ],
)
def test_failed_coalitions_end_no_run(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    coalitions: Any,
    failed: str,
    in_forks: bool,
) -> None:
    if not in_forks:
        forbid_forks(monkeypatch)
    metrics: dict[str, Any] = {"shadow": ShadowShapley(coalitions=coalitions)}

    with pytest.warns(UserWarning, match=f"no values. {failed}: ZeroDivisionError"):
        loop, _ = fit_kind(Kind(callback=Fails), tmp_path, metrics)

    assert loop.contributions["shadow"].isnan().all()
    assert loop.round_index == FIT_ROUNDS


class Unseeded(Manual):
    """Draws from what no seed sets."""

    def loss(self, batch: Any) -> Tensor:
        return super().loss(batch) * (1 + os.urandom(1)[0] / 100 if self.training else 1)


def test_no_values_if_the_full_coalition_differs_from_the_run(tmp_path: Path) -> None:
    message = (
        "no values. The coalition of all clients.*came to another model after round 2.*"
        "neither its seed nor the state of this process"
    )
    with pytest.warns(UserWarning, match=message):
        loop, _ = fit_kind(Kind(Unseeded), tmp_path, {"shadow": ShadowShapley()})

    assert loop.contributions["shadow"].isnan().all()


class StopsAlone(L.Callback):
    """Ends the training of a coalition after its first round, as an early stopping of one's own may."""

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        loop: Any = next(
            callback for callback in trainer.callbacks if isinstance(callback, FederatedLoop)
        )  # type: ignore[attr-defined]
        if len(loop.state.cohort) == 1:
            trainer.should_stop = True
            trainer.fit_loop.min_epochs = 0


def test_coalition_whose_training_ends_early_has_no_values(tmp_path: Path) -> None:
    kind = Kind(callback=StopsAlone)
    with pytest.warns(
        UserWarning, match=r"no values. 3 coalitions failed .*ended after 1 of 2 rounds: a callback"
    ):
        loop, _ = fit_kind(kind, tmp_path, {"shadow": ShadowShapley()})

    assert loop.contributions["shadow"].isnan().all()


def test_failed_first_coalition_fails_all_others() -> None:
    """As after a first round without a model, with which the coalition of all could be compared."""
    failure = ChildFailed("no data")
    trainer = SimpleNamespace(train=lambda orders: [(orders[0], failure)])
    training = CoalitionTraining(trainer, FitOrder((), 0), [1, 1])
    results = dict(training.fits([(0,), (1,)], 0))

    assert str(results[0,]) == "no data"
    assert str(results[1,]) == "the first coalition has failed"
