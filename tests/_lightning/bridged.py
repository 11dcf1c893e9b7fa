"""Modules of libraries that import ``pytorch_lightning``, in a federation and by hand.

``python bridged.py NAME FOLDER``, in a process of its own, because a package is imported once.
"""

# ruff: noqa: E402 - what is imported after the bridge finds it

from __future__ import annotations

import sys
import warnings
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import flsv

flsv.bridge_pytorch_lightning()

import lightning as L
import numpy as np
import pandas as pd
import pytorch_lightning as pl
import torch
from compat.kinds.base import Kind, Sets, table
from compat.runs import both
from torch import nn


class Own(pl.LightningModule):
    """As the tutorials of the University of Amsterdam write a module."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Linear(5, 3)
        self.save_hyperparameters()

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = nn.functional.cross_entropy(self.net(x), y)
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch, batch_idx):
        x, y = batch
        self.log("val_loss", nn.functional.cross_entropy(self.net(x), y))

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def own() -> Kind:
    return Kind(Own, lambda: table(lambda x: (x[:, 0] > 0).long()))


def neuralforecast() -> Kind:
    """NHITS, whose training draws windows of the series."""
    from neuralforecast.models import NHITS
    from neuralforecast.tsdataset import TimeSeriesDataModule, TimeSeriesDataset

    draw, time = np.random.default_rng(0), np.arange(96)
    rows = [
        pd.DataFrame({"unique_id": i, "ds": time, "y": np.sin(time / (4 + i % 3)) + 0.1 * draw.normal(size=len(time))})
        for i in range(9)
    ]
    dataset, *_ = TimeSeriesDataset.from_df(pd.concat(rows))
    return Kind(
        lambda: NHITS(h=4, input_size=12, max_steps=5, windows_batch_size=8, mlp_units=3 * [[8, 8]], random_seed=1),
        lambda: TimeSeriesDataModule(dataset, batch_size=3),
    )


def pytorch_tabular() -> Kind:
    from pytorch_tabular import TabularModel
    from pytorch_tabular.config import DataConfig, OptimizerConfig, TrainerConfig
    from pytorch_tabular.models import CategoryEmbeddingModelConfig

    draw = np.random.default_rng(0)
    frame = pd.DataFrame({"age": draw.normal(size=60), "ward": draw.choice(list("abc"), 60), "ill": 0})
    frame["ill"] = (frame["age"] + draw.normal(size=60) > 0).astype(int)
    model = TabularModel(
        data_config=DataConfig(target=["ill"], continuous_cols=["age"], categorical_cols=["ward"]),
        model_config=CategoryEmbeddingModelConfig(task="classification", layers="8-4"),
        optimizer_config=OptimizerConfig(),
        trainer_config=TrainerConfig(batch_size=8, accelerator="cpu"),
        verbose=False,
    )
    prepared = model.prepare_dataloader(train=frame[:44], validation=frame[44:], seed=1)

    def module() -> L.LightningModule:
        torch.manual_seed(0)
        return model.prepare_model(prepared)

    return Kind(module, lambda: Sets(prepared.train_dataset, prepared.validation_dataset))


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    name, folder = sys.argv[1:]
    assert pl is L.pytorch
    kind = {"own": own, "neuralforecast": neuralforecast, "pytorch_tabular": pytorch_tabular}[name]()
    assert isinstance(kind.module(), L.LightningModule)
    both(kind, Path(folder)).check()
    print("equal to the loop by hand")
