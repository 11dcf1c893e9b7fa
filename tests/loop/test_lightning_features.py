"""What Lightning's own features see of a federation: schedulers, validation, checkpoints, limits, precision."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import EarlyStopping, LambdaCallback, ModelCheckpoint
from small_loops import KeepUpdates, shapfed
from torch import Tensor
from toys import Plain, fit, flat, sgd, toy_data, trainer_for, vector

from flsv import ClientEvaluation
from flsv.loop import FederatedLoop


def test_plateau_scheduler_watches_the_global_model(tmp_path: Path) -> None:
    class Plateau(Plain):
        def configure_optimizers(self) -> Any:
            optimizer = sgd(self.parameters())
            scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(
                optimizer, factor=0.1, patience=0, mode="max", threshold=1
            )
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "monitor": "val_acc"}}

    module = Plateau()
    fit(FederatedLoop(seed=1), tmp_path, module, rounds=3)
    assert module.trainer.optimizers[0].param_groups[0]["lr"] == pytest.approx(0.1 * 0.1**2)


def test_validation_checkpoints_and_early_stopping_see_the_global_model(tmp_path: Path) -> None:
    seen: list[Tensor] = []
    watch = LambdaCallback(on_validation_start=lambda trainer, module: seen.append(vector(module)))
    keep = KeepUpdates()
    checkpoint = ModelCheckpoint(tmp_path / "c", monitor="val_acc", mode="max", save_top_k=-1, filename="{epoch}")
    stop = EarlyStopping("val_acc", mode="max", min_delta=2.0, patience=2)
    loop = FederatedLoop(keep, seed=1)
    module = fit(loop, tmp_path, rounds=10, enable_checkpointing=True, callbacks=[watch, checkpoint, stop])
    assert loop.round_index == 3  # 1 + patience
    data = toy_data()
    data.setup("fit")
    weights = data.num_samples.double() / data.num_samples.sum()
    for r, global_model in enumerate(seen):
        stacked = torch.stack([keep.rounds[r][i] for i in range(3)]).double()
        torch.testing.assert_close(global_model, weights @ stacked, rtol=1e-5, atol=1e-6)
        saved = torch.load(tmp_path / "c" / f"epoch={r}.ckpt", weights_only=False)["state_dict"]
        assert torch.equal(flat(saved, [name for name, _ in module.named_parameters()]), global_model)
    assert torch.equal(vector(module), seen[-1])


def test_fast_dev_run_is_one_round_of_one_batch_per_client(tmp_path: Path) -> None:
    loop = shapfed(evaluation=ClientEvaluation(every=1))
    trainer = trainer_for(loop, tmp_path, fast_dev_run=True)
    trainer.fit(Plain(), toy_data())
    assert loop.round_index == 1
    assert trainer.num_training_batches == 3
    assert loop.contributions["cssv"].isfinite().all()
    assert not list(tmp_path.rglob("*.csv"))


def test_the_trainer_is_given_back_as_it_was(tmp_path: Path) -> None:
    loop = FederatedLoop(seed=1)
    trainer = trainer_for(loop, tmp_path, rounds=1, limit_train_batches=0.5, accumulate_grad_batches=2)
    data, module = toy_data(), Plain()
    trainer.fit(module, data)
    assert trainer.limit_train_batches == 0.5
    assert trainer.reload_dataloaders_every_n_epochs == 0
    assert data.round_loader is None
    assert "optimizer_zero_grad" not in module.__dict__
    assert "_accumulated_batches_reached" not in trainer.fit_loop.epoch_loop.__dict__
    (result,) = trainer.validate(module, data, verbose=False)
    assert 0 <= result["val_acc"] <= 1
    assert "test_acc" in trainer.test(module, data, verbose=False)[0]


def test_sanity_check_and_a_second_fit(tmp_path: Path) -> None:
    loop = FederatedLoop(seed=1)
    first = vector(fit(loop, tmp_path, num_sanity_val_steps=2))
    again = vector(fit(loop, tmp_path))
    assert torch.equal(first, again)  # a new trainer starts anew
