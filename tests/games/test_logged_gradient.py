"""The gradient of what a step logs, against Lightning's own validation."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from played import federated
from task_kinds import Autoencoder, LanguageModel, SeveralLoaders
from toys import fit

from flsv import Reporting
from flsv._lightning.validation import keep_batches
from flsv.errors import ConfigurationError
from flsv.games import ValidatedModels
from flsv.loop import FederatedLoop
from flsv.metrics import GradientShapley
from flsv.parameters import ParameterSpace


def within(folder: Path, module: L.LightningModule, data: L.LightningDataModule, act: Callable[..., None]) -> None:
    """``act(make)`` in the middle of a fit; ``make(**options)`` makes an evaluator of it."""

    class Probe(L.Callback):
        def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
            space = ParameterSpace(pl_module)
            kept = keep_batches(trainer, data.val_dataloader())
            act(lambda **options: ValidatedModels(trainer, space, kept, **options), space, pl_module)

    loop = FederatedLoop(seed=3, reporting=Reporting(table=False))
    fit(loop, folder, module, data, rounds=1, callbacks=[Probe()])


@pytest.mark.parametrize("kind", [Autoencoder, LanguageModel, SeveralLoaders])
def test_the_gradient_of_what_is_logged(tmp_path: Path, kind: Any) -> None:
    """Against differences in double precision."""

    def act(make: Any, space: ParameterSpace, module: L.LightningModule) -> None:
        evaluate = make(names=["val_loss"], derived=["val_loss"])
        evaluate.attempt()
        start = space.read(module)
        found = evaluate.gradient(start, "val_loss")
        assert found.shape == (space.num_parameters,)
        assert found.dtype == torch.float64
        # Along the gradient and along another way.
        for direction in (found, torch.randn(len(found), generator=torch.Generator().manual_seed(1)).double()):
            way = torch.zeros_like(start)
            way[: len(found)] = (direction / direction.norm()).to(way)
            step = 1e-2
            low, high = evaluate(torch.stack([start - step * way, start + step * way])).value("val_loss")
            slope = float(found @ way[: len(found)].double())
            assert float(high - low) / (2 * step) == pytest.approx(slope, rel=2e-2, abs=2e-4)

    within(tmp_path, kind(), federated(kind.data()), act)


class Detached(LanguageModel):
    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch).item())


class Twice(LanguageModel):
    """A hook has its part in what is logged."""

    factor = 1.0

    def on_validation_epoch_start(self) -> None:
        self.factor = 2.0

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.factor * self.loss(batch))


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        (Detached, "is logged without its graph"),
        (Twice, "hooks around the step have a part in it"),
    ],
)
def test_a_gradient_that_cannot_be_had_is_refused_before_training(tmp_path: Path, kind: Any, words: str) -> None:
    loop = FederatedLoop(metrics={"g": GradientShapley(loss="val_loss")}, seed=3, reporting=Reporting(table=False))
    with pytest.raises(ConfigurationError, match=words) as caught:
        fit(loop, tmp_path, kind(), federated(kind.data()), rounds=1)
    assert "metric 'g'" in str(caught.value)
