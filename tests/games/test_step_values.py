"""What a step logs, as a function to derive and of many models at once, against Lightning's own validation."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from played import federated
from task_kinds import Autoencoder, Careless, Glue, LanguageModel, Regression, SeveralLoaders
from toys import fit

from flsv import Reporting
from flsv._lightning.validation import keep_batches
from flsv.errors import ConfigurationError
from flsv.games import LoggedValues
from flsv.loop import FederatedLoop
from flsv.metrics import GradientShapley
from flsv.parameters import ParameterSpace

ALIKE = [
    (Autoencoder, "val_loss"),
    (Regression, "val_loss"),
    (SeveralLoaders, "val_loss/dataloader_idx_1"),
    (SeveralLoaders, "val_loss"),
]


def within(folder: Path, module: L.LightningModule, data: L.LightningDataModule, act: Callable[..., None]) -> None:
    """``act(make)`` in the middle of a fit; ``make(**options)`` makes an evaluator of it."""

    class Probe(L.Callback):
        def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
            space = ParameterSpace(pl_module)
            kept = keep_batches(trainer, data.val_dataloader())
            act(lambda **options: LoggedValues(trainer, space, kept, **options), space, pl_module)

    loop = FederatedLoop(seed=3, reporting=Reporting(table=False))
    fit(loop, folder, module, data, rounds=1, callbacks=[Probe()])


def near(space: ParameterSpace, module: L.LightningModule, count: int = 5) -> torch.Tensor:
    draw = torch.Generator().manual_seed(0)
    start = space.read(module)
    vectors = start + 0.05 * torch.randn(count, space.size, generator=draw)
    vectors[:, space.num_parameters :] = start[space.num_parameters :]
    return vectors


@pytest.mark.parametrize(("kind", "name"), ALIKE, ids=[f"{kind.__name__}-{name}" for kind, name in ALIKE])
def test_many_models_at_once_are_those_one_by_one(tmp_path: Path, kind: Any, name: str) -> None:
    data = federated(kind.data())

    def act(make: Any, space: ParameterSpace, module: L.LightningModule) -> None:
        many, one = make(names=[name], backend="vmap"), make(names=[name])
        assert one.backend == "serial"
        many._chunk = 2
        vectors = near(space, module)
        found, expected = many(vectors).value(name), one(vectors).value(name)
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
        assert len(set(expected.tolist())) == 5
        assert many.backend == "vmap"

    within(tmp_path, kind(), data, act)


def test_what_cannot_run_at_once_runs_one_by_one(tmp_path: Path) -> None:
    """Metrics that are kept, and values that are logged in a hook."""

    def act(make: Any, space: ParameterSpace, module: L.LightningModule) -> None:
        many, one = (make(names=["loss_all"], backend=backend) for backend in ("vmap", "serial"))
        vectors = near(space, module)
        assert torch.equal(many(vectors).value("loss_all"), one(vectors).value("loss_all"))
        assert many.backend == "serial"

    within(tmp_path, Glue(), federated(Glue.data()), act)


def test_models_that_do_not_fit_are_halved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def act(make: Any, space: ParameterSpace, module: L.LightningModule) -> None:
        many, one = (make(names=["val_loss"], backend=backend) for backend in ("vmap", "serial"))
        original, tried = many._at_once, []

        def full(build: Any, rows: range) -> Any:
            tried.append(len(rows))
            if len(rows) > 2:
                raise torch.cuda.OutOfMemoryError("CUDA out of memory.")
            return original(build, rows)

        monkeypatch.setattr(many, "_at_once", full)
        vectors = near(space, module)
        torch.testing.assert_close(many(vectors).value("val_loss"), one(vectors).value("val_loss"))
        assert tried == [2, 5, 2, 2, 1]

    within(tmp_path, Autoencoder(), federated(Autoencoder.data()), act)


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


class Late(LanguageModel):
    def on_validation_epoch_start(self) -> None:
        self.kept: list[torch.Tensor] = []

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.kept.append(self.loss(batch))

    def on_validation_epoch_end(self) -> None:
        self.log("val_loss", torch.stack(self.kept).mean())


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
        (Detached, "is logged as float, and one floating-point tensor"),
        (Late, "validation_step"),
        (Twice, "hooks around the step have a part in it"),
    ],
)
def test_a_gradient_that_cannot_be_had_is_refused_before_training(tmp_path: Path, kind: Any, words: str) -> None:
    loop = FederatedLoop(metrics={"g": GradientShapley(loss="val_loss")}, seed=3, reporting=Reporting(table=False))
    with pytest.raises(ConfigurationError, match=words) as caught:
        fit(loop, tmp_path, kind(), federated(kind.data()), rounds=1)
    assert "metric 'g'" in str(caught.value)


def test_what_validation_keeps_does_not_matter(tmp_path: Path) -> None:
    """A module that collects outputs is evaluated in a fresh copy for each chunk."""

    def act(make: Any, space: ParameterSpace, module: L.LightningModule) -> None:
        vectors = near(space, module)
        values = [
            make(names=["val_loss"], backend=backend)(vectors).value("val_loss") for backend in ("vmap", "serial")
        ]
        torch.testing.assert_close(*values)

    within(tmp_path, Careless(), federated(Careless.data()), act)
