"""What the README shows, works."""

from __future__ import annotations

import importlib
import inspect
import re
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from torch.utils.data import DataLoader
from toys import Plain, fit, network, toy_sets

import flsv
from flsv.loop import FederatedLoop

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)


class MyData(L.LightningDataModule):
    """A user's data module, which knows nothing of flsv."""

    def setup(self, stage: str) -> None:
        self.train, self.test = toy_sets(400)

    def train_dataloader(self) -> DataLoader:
        return DataLoader(self.train, batch_size=16, shuffle=True)

    def val_dataloader(self) -> DataLoader:
        return DataLoader(self.test, batch_size=16)


def test_the_snippet_federates_an_existing_module_and_data_module(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    code = BLOCKS[0].replace("max_epochs=50,", "max_epochs=2,").replace("num_classes=10", "num_classes=3")
    scope: dict[str, Any] = {"my_module": Plain(network(batch_norm=False)), "my_datamodule": MyData()}
    exec(code, scope)
    loop = next(c for c in scope["trainer"].callbacks if isinstance(c, FederatedLoop))
    assert loop.round_index == 2
    assert loop.metrics["cssv"].compute().shape == (5, 3)
    assert "val_acc" in scope["trainer"].callback_metrics


def test_the_metric_of_your_own(tmp_path: Path) -> None:
    scope: dict[str, Any] = {"torch": torch}
    exec(BLOCKS[1], scope)
    loop = FederatedLoop(metrics={"norm": scope["UpdateNorm"]()}, seed=1)
    fit(loop, tmp_path)
    assert (loop.contributions["norm"] > 0).all()


def test_every_path_named_is_there() -> None:
    named = re.findall(r"(?:configs|tools|docs)/[\w/.*-]+\w", README)
    assert named
    for path in named:
        if "NAME" not in path:
            assert list(ROOT.glob(path)), path


def test_public_names() -> None:
    assert {"FederatedLoop", "Round", "ParameterSpace"} <= set(flsv.__all__)
    packages = ("aggregation", "attacks", "clients.algorithms", "data", "functional", "games", "metrics", "models")
    for package in (*packages, "participants", "personalization", "privacy", "round", "sampling", "server", "uploads"):
        module = importlib.import_module(f"flsv.{package}")
        assert module.__all__
        for name in module.__all__:
            value = getattr(module, name)
            assert value.__doc__ or not (inspect.isclass(value) or inspect.isfunction(value)), name
