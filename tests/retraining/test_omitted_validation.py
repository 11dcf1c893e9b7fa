"""Coalitions leave out validations that nothing sees, and run those that training depends on, however late."""

from pathlib import Path
from typing import Any

import pytest
import torch

from flsv.sampling import FixedCohort
from helpers import slow_except
from helpers.hidden_state import (
    RATE,
    Base,
    Kind,
    fit_kind,
    make_weight_averaging,
    utility_of_module,
)
from helpers.recorded import Recorded


class HookChangesWeight(Base):
    """From the third round on."""

    def on_validation_epoch_end(self) -> None:
        if self.current_epoch >= 1:
            self.weight *= 0.5


class Plateau(Base):
    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), RATE)
        scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(
            optimizer, factor=0.1, patience=0, threshold=10.0
        )

        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": scheduler, "monitor": "val_loss"},
        }


class ReadsLoggedValue(Base):
    """From the third round on."""

    def on_train_epoch_start(self) -> None:
        if self.current_epoch >= 2:
            self.weight = float(self.trainer.callback_metrics.get("val_loss", 5.0))


class KeepsLosses(Base):
    """Its steps of validation keep losses, which training reads from the third round on."""

    def __init__(self) -> None:
        super().__init__()
        self.losses: list[float] = []

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        super().validation_step(batch, batch_idx)
        self.losses.append(float(self.loss(batch)))

    def on_train_epoch_start(self) -> None:
        if self.current_epoch >= 2:
            self.weight = sum(self.losses)


KINDS: dict[str, Kind] = {
    "a hook that changes the module": Kind(HookChangesWeight),
    "ReduceLROnPlateau": Kind(Plateau),
    "EMA that validates": Kind(callback=make_weight_averaging),
    "a reader of logged values": Kind(ReadsLoggedValue),
    "a step that keeps losses": Kind(KeepsLosses),
}


#: What the log names as the cause of validations in coalitions.
CAUSES = {
    "a hook that changes the module": "HookChangesWeight.on_validation_epoch_end",
    "ReduceLROnPlateau": "ReduceLROnPlateau",
    "EMA that validates": "EMAWeightAveraging.on_validation_epoch_end",
    "a step that keeps losses": "module.losses",
}


@pytest.mark.parametrize(
    "name", slow_except(("a reader of logged values", "a step that keeps losses"), KINDS)
)
def test_training_that_depends_on_validations_has_the_values_of_plain_fits(
    name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    kind = KINDS[name]
    metric = Recorded(coalitions="singles", performance="negative_loss")
    caplog.set_level("INFO", "lightning.pytorch")
    loop, _ = fit_kind(kind, tmp_path, metrics={"shadow": metric})

    if name in CAUSES:
        assert f"since training may depend on {CAUSES[name]}" in caplog.text

    caplog.set_level("WARNING", "lightning.pytorch")
    recorded: Any = loop.metrics["shadow"]
    game = dict(zip(recorded.members, recorded.game.flatten().tolist()))
    for client in range(3):
        _, module = fit_kind(kind, tmp_path, sampler=FixedCohort([client]))
        assert game[client,] == pytest.approx(utility_of_module(module), abs=1e-6)


class FailsInValidation(Base):
    """Where one client trains."""

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        loop: Any = next(
            callback
            for callback in self.trainer.callbacks  # type: ignore[attr-defined]
            if hasattr(callback, "sampler")
        )
        if len(loop.state.cohort) == 1:
            raise ZeroDivisionError("it is validated")

        super().validation_step(batch, batch_idx)


def test_validations_that_nothing_sees_are_left_out(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    metric = Recorded(coalitions="singles")
    caplog.set_level("INFO", "lightning.pytorch")
    # Their methods are replaced during the run.
    usual_callbacks = {"enable_progress_bar": True, "enable_checkpointing": True}
    kind = Kind(FailsInValidation, trainer=usual_callbacks)
    loop, _ = fit_kind(kind, tmp_path, metrics={"shadow": metric})

    assert not loop.contributions["shadow"].isnan().any()
    assert "coalitions are trained now" in caplog.text
    assert "They validate" not in caplog.text
