"""Modules of installed packages, and of repositories whose data and batches are their own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import lightning as L
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from projects import Samples, colours, project, series


class Loaders(L.LightningDataModule):
    """The training and the validation loader that functions make."""

    def __init__(self, train: Callable[[], Any], val: Callable[[], Any]) -> None:
        super().__init__()
        self.train, self.val = train, val

    def train_dataloader(self) -> Any:
        return self.train()

    def val_dataloader(self) -> Any:
        return self.val()


def forecasts() -> Dataset:
    """Return 24 values of a series, which of them are known, and the 8 values that follow."""

    def form(window: Tensor) -> dict[str, Tensor]:
        past, future = window.split([24, 8])
        parts = {"past": past, "future": future}
        known = {f"{name}_observed_values": torch.ones_like(part) for name, part in parts.items()}
        return {f"{name}_target": part for name, part in parts.items()} | known

    return Samples(form, series().unfold(0, 32, 1)[::2] + 3)


@project("awslabs/gluonts", "0.17.0", forecasts, by="val_loss", package="gluonts")
def gluonts() -> Any:
    from gluonts.torch.model.d_linear.lightning_module import DLinearLightningModule

    return DLinearLightningModule({"prediction_length": 8, "context_length": 24, "hidden_dimension": 8}, lr=1e-2)


def grouped() -> Any:
    """Return the package's data set of four series."""
    import pandas as pd
    from pytorch_forecasting import TimeSeriesDataSet

    values = series(60)
    parts = [{"time": range(60), "group": str(index), "value": values * (1 + index)} for index in range(4)]
    frame = pd.concat([pd.DataFrame(part) for part in parts], ignore_index=True)
    lengths = {"max_encoder_length": 16, "max_prediction_length": 4}
    reals = {"time_varying_unknown_reals": ["value"], "time_varying_known_reals": ["time"]}
    return TimeSeriesDataSet(frame, "time", "value", ["group"], **lengths, **reals)


def series_loaders() -> L.LightningDataModule:
    made = grouped()
    return Loaders(
        lambda: made.to_dataloader(train=True, batch_size=16), lambda: made.to_dataloader(train=False, batch_size=64)
    )


@project("sktime/pytorch-forecasting", "1.8.0", series_loaders, by="val_loss", package="pytorch_forecasting")
def fusion_transformer() -> Any:
    from pytorch_forecasting import TemporalFusionTransformer

    size = {"hidden_size": 8, "attention_head_size": 1, "hidden_continuous_size": 4}
    return TemporalFusionTransformer.from_dataset(grouped(), **size, learning_rate=1e-2)


def tabular_model() -> tuple[Any, Any]:
    """Return the package's model of a table, and its data module."""
    from pytorch_tabular import TabularModel
    from pytorch_tabular.config import DataConfig, OptimizerConfig, TrainerConfig
    from pytorch_tabular.models import CategoryEmbeddingModelConfig
    from sklearn.datasets import load_wine

    frame = load_wine(as_frame=True).frame.rename(columns=lambda name: name.replace("/", "_"))
    columns = [name for name in frame.columns if name != "target"]
    model = TabularModel(
        data_config=DataConfig(target=["target"], continuous_cols=columns),
        model_config=CategoryEmbeddingModelConfig(task="classification", layers="32-16", learning_rate=1e-2),
        optimizer_config=OptimizerConfig(),
        trainer_config=TrainerConfig(batch_size=16, max_epochs=2, accelerator="cpu"),
        verbose=False,
    )
    return model, model.prepare_dataloader(train=frame.iloc[::2], validation=frame.iloc[1::2], seed=1)


def tabular_loaders() -> L.LightningDataModule:
    _, data = tabular_model()
    return Loaders(data.train_dataloader, data.val_dataloader)


@project("pytorch-tabular/pytorch_tabular", "1.2.0", tabular_loaders, by="valid_loss", package="pytorch_tabular")
def category_embedding() -> Any:
    model, data = tabular_model()
    return model.prepare_model(data)


def scenes() -> Dataset:
    return colours(samples=96, form=lambda x, y: {"image": x, "label": y})


@project("torchgeo", "0.8.1", scenes, by="val_loss", package="torchgeo")
def torchgeo() -> Any:
    from torchgeo.trainers import ClassificationTask

    return ClassificationTask(model="resnet18", num_classes=10)


def crops() -> L.LightningDataModule:
    """Return two views of each image to train on, and one to validate on."""
    views = colours(size=16, samples=48, form=lambda x, y: (int(y), [x, x.flip(-1) + 0.1], y))
    plain = colours(size=16, samples=48)
    return Loaders(lambda: DataLoader(views, batch_size=16, shuffle=True), lambda: DataLoader(plain, batch_size=30))


@project("vturrisi/solo-learn", "9187ea3", crops, by="val_acc1", mode="max")
def solo() -> Any:
    from omegaconf import OmegaConf
    from solo.methods.simclr import SimCLR

    given = OmegaConf.load("scripts/pretrain/cifar/simclr.yaml")
    data = {"data": {"num_classes": 10, "num_large_crops": 2, "num_small_crops": 0}, "max_epochs": 2}
    small = {"method_kwargs": {"proj_hidden_dim": 32, "proj_output_dim": 16}}
    return SimCLR(OmegaConf.merge(given, data, small))


def mixtures() -> Dataset:
    """Return sums of two tones, and the tones."""
    random = torch.Generator().manual_seed(1)
    pitch = 20 + 60 * torch.rand(80, 2, 1, generator=random)
    tones = (pitch * torch.linspace(0, 1, 400) * 2 * torch.pi).sin()
    return Samples(lambda both: (both.sum(0), both), tones)


@project("asteroid-team/asteroid", "92c8d83", mixtures, by="val_loss")
def asteroid() -> Any:
    from asteroid.engine.system import System
    from asteroid.losses import PITLossWrapper, pairwise_neg_sisdr
    from asteroid.models import ConvTasNet

    size = {"n_filters": 16, "kernel_size": 16, "stride": 8, "n_blocks": 2, "n_repeats": 1}
    net = ConvTasNet(2, **size, bn_chan=8, hid_chan=16, skip_chan=8)
    adam = torch.optim.Adam(net.parameters(), lr=1e-3)
    loss = PITLossWrapper(pairwise_neg_sisdr, pit_from="pw_mtx")
    return System(net, adam, loss, None, scheduler=torch.optim.lr_scheduler.ReduceLROnPlateau(adam))
