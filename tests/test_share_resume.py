"""A federation that shares a part of its model goes on where it stopped, or says what is another."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from by_hand import assert_kept, unequal_data
from partly_shared import NORM, frozen, loop
from resuming import assert_resumes
from toys import Plain, fit, network, vector

from flsv import ClientEvaluation
from flsv.attacks import SignFlip
from flsv.errors import ConfigurationError
from flsv.loop import FederatedLoop
from flsv.metrics import ClassSpecificShapley, CosineGradientShapley
from flsv.privacy import GaussianPrivacy
from flsv.uploads import TopK


def everything(**changes: Any) -> FederatedLoop:
    options: dict[str, Any] = {
        "share": ["!norm"],
        "metrics": {"cssv": ClassSpecificShapley(), "cos": CosineGradientShapley()},
        "uploads": [SignFlip(clients=[1]), GaussianPrivacy(clip=1.0, noise_multiplier=0.01), TopK(share=0.5)],
        "optimizer_state": "persist",
        "evaluation": ClientEvaluation(every=2, models="trained"),
    }
    return loop(**{**options, **changes})


def test_resumes(tmp_path: Path) -> None:
    federated = assert_resumes(everything, tmp_path, data=unequal_data)
    assert all(f"module.net.{name}" in state for state in federated.state_dict()["clients"].values() for name in NORM)


class Saves(L.Callback):
    """A checkpoint in the middle of a round, while a client is in the module."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def on_train_batch_end(self, trainer: L.Trainer, module: L.LightningModule, *args: Any) -> None:
        if trainer.current_epoch == 2 and trainer.fit_loop.epoch_loop.batch_idx == 7:
            trainer.save_checkpoint(self.path)


def test_a_checkpoint_in_the_middle_of_a_round_is_that_rounds_start(tmp_path: Path) -> None:
    path = tmp_path / "middle.ckpt"
    whole, again = loop(share=["!norm"]), loop(share=["!norm"])
    expected = fit(
        whole, tmp_path / "a", data=unequal_data(), rounds=4, callbacks=[Saves(path)], enable_checkpointing=True
    )
    saved = torch.load(path, weights_only=True)["state_dict"]
    assert torch.equal(saved["net.1.running_mean"], torch.zeros(8))
    resumed = fit(again, tmp_path / "b", data=unequal_data(), rounds=4, ckpt_path=path, enable_checkpointing=True)
    assert torch.equal(vector(expected), vector(resumed))
    assert_kept(again, {c: {n[11:]: v for n, v in s.items()} for c, s in whole.state_dict()["clients"].items()})


@pytest.mark.parametrize("share", ["all", ["!head"], ["!net.1.*"]])
def test_another_share_is_refused_on_resume(tmp_path: Path, share: Any) -> None:
    path = tmp_path / "saved.ckpt"
    fit(loop(share=["!norm"]), tmp_path, data=unequal_data(), rounds=1, callbacks=[SavesAtEnd(path)])
    said = f"federation.share is {share!r} and was ['!norm']"
    with pytest.raises(ConfigurationError, match=re.escape(said)):
        fit(loop(share=share), tmp_path, data=unequal_data(), ckpt_path=path)


class SavesAtEnd(L.Callback):
    def __init__(self, path: Path) -> None:
        self.path = path

    def on_train_end(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        trainer.save_checkpoint(self.path)


def test_other_frozen_layers_are_refused_on_resume(tmp_path: Path) -> None:
    path = tmp_path / "saved.ckpt"
    optimizer = lambda ps: torch.optim.SGD(list(ps), lr=0.1)  # noqa: E731
    saving = [SavesAtEnd(path)]
    fit(loop(share="trainable"), tmp_path, Plain(frozen(), optimizer), unequal_data(), rounds=1, callbacks=saving)
    with pytest.raises(
        ConfigurationError, match=r"another part of the module shared \(shared 7 tensors .*was 4 tensors"
    ):
        fit(loop(share="trainable"), tmp_path, Plain(network(), optimizer), unequal_data(), ckpt_path=path)
