"""Modules that are no classifiers of images, valued by what they log in validation."""

from __future__ import annotations

import inspect
import random
import sys
import types
from argparse import Namespace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning as L
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, TensorDataset

from projects import Samples, absent, characters, colours, images, project, script, series, table, validated

pair = partial(colours, samples=96, form=lambda x, y: ((x, x.flip(-1) + 0.1), y))


@project("alpercanberk/pytorch-lightning-vae", "032236e", images, by="val_loss")
def vae() -> Any:
    absent("pl_bolts", "pl_bolts.models", "pl_bolts.models.autoencoders", "pl_bolts.models.autoencoders.components")
    from models.vae import VAE

    return VAE(16, 28, 28, 1, lr=1e-3, batch_size=16)


@project("lucidrains/byol-pytorch", "2993126", partial(colours, form=lambda x, y: x), by="val_loss",
         note=", of one convolution")  # fmt: skip
def byol() -> Any:
    kind = script("examples/lightning/train.py").SelfSupervisedLearner
    net = nn.Sequential(nn.Conv2d(3, 8, 3, 2), nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(32, 16))
    return validated(kind)(net, image_size=32, hidden_layer=-1, projection_size=16, projection_hidden_size=32)


@project("ethanhe42/pytorch-lightning-GPT", "6369f11", partial(characters, "README.md"), by="val_loss",
         note=", of two layers, on karpathy/nanoGPT, 3adf61e")  # fmt: skip
def nano_gpt() -> Any:
    absent("nanogpt", "lightning_gpt")
    sys.modules["nanogpt.model"] = sys.modules["nanogpt"].model = script("../karpathy+nanoGPT/model.py")
    sys.modules["lightning_gpt"].__path__ = ["lightning_gpt"]  # its __init__ imports parts that Lightning has no more
    from lightning_gpt.models import NanoGPT

    kind = validated(NanoGPT)
    size = {"n_layer": 2, "n_head": 2, "n_embd": 32}
    return kind(vocab_size=128, block_size=32, model_type=None, **size, learning_rate=3e-3)


def windows() -> Dataset:
    """Return windows of three series, with the month, day, weekday and hour of each value."""
    whole = torch.stack([series(), series().roll(3), series().square()], 1)
    hour = torch.arange(len(whole))
    marks = torch.stack([hour // 672, hour // 24 % 28, hour // 24 % 7, hour % 24], 1).float()
    past, future = (
        [each.unfold(0, 60, 1).transpose(1, 2)[::3, part].contiguous() for each in (whole, marks)]
        for part in (slice(0, 48), slice(36, 60))
    )
    return TensorDataset(past[0], future[0], past[1], future[1])


@project("martinwhl/Informer-PyTorch-Lightning", "90be95a", windows, by="Val_Loss",
         note=", of contiguous outputs for its metrics")  # fmt: skip
def informer() -> Any:
    from models.informer.model import Informer
    from tasks import forecast

    class InformerForecastTask(forecast.InformerForecastTask):  # type: ignore[misc]
        def shared_step(self, batch: Any, batch_idx: int) -> list[Tensor]:
            return [each.contiguous() for each in super().shared_step(batch, batch_idx)]

    size = {"enc_in": 3, "dec_in": 3, "c_out": 3, "out_len": 12, "d_model": 16, "n_heads": 2, "d_ff": 32}
    return InformerForecastTask(Informer(**size), 48, 12, 12, "m", learning_rate=1e-3)


def passengers() -> Dataset:
    x, y = table()
    return TensorDataset(x, (y == 1).float())


@project("masatoomori/example-pytorch-lightning", "9b55810", passengers, by="test_loss", path="Titanic/modeling")
def titanic() -> Any:
    profile = {"target": {"num_classes": 1, "name": "survived"}, "explanatory": {"dims": [13]}}
    data = SimpleNamespace(data_profile=profile, ds_train=None, ds_val=None, ds_test=None, x_cols=[], target="survived")
    return script("Titanic/modeling/main.py").MyLitModule(dataset=data)


@project("adap/flower", "fdef7af", partial(images, form=lambda x, y: {"image": x}), by="val_loss",
         path="examples/quickstart-pytorch-lightning")  # fmt: skip
def flower() -> Any:
    absent("flwr_datasets", "flwr_datasets.partitioner")
    from pytorchlightning_example.task import LitAutoEncoder

    return LitAutoEncoder()


@project("Lightning-AI/pytorch-lightning", "7f0c343", images, by="val_loss")
def lit_autoencoder() -> Any:
    return script("examples/pytorch/basics/autoencoder.py").LitAutoEncoder()


@project("Lightning-AI/pytorch-lightning", "7f0c343", images, by="val_loss")
def gan() -> Any:
    def loss(self: Any, batch: Any) -> Tensor:
        made = self(torch.randn(len(batch[0]), self.hparams.latent_dim))
        return self.adversarial_loss(self.discriminator(made), torch.ones(len(made), 1))

    from torchvision.utils import make_grid

    example = script("examples/pytorch/domain_templates/generative_adversarial_net.py")
    example.torchvision = SimpleNamespace(utils=SimpleNamespace(make_grid=make_grid))
    return validated(example.GAN, loss)()


@project("Lightning-AI/pytorch-lightning", "7f0c343",
         partial(characters, "examples/pytorch/basics/autoencoder.py", samples=96), by="val_loss")  # fmt: skip
def language_model() -> Any:
    return script("examples/pytorch/basics/transformer.py").LanguageModel(vocab_size=128)


@project("Lightning-AI/tutorials", "1581765", partial(colours, samples=96), by="val_loss")
def autoencoder() -> Any:
    absent("matplotlib_inline", "matplotlib_inline.backend_inline", "seaborn")
    return script("course_UvA-DL/08-deep-autoencoders/notebook.py").Autoencoder(8, 32)


@project("lightly-ai/lightly", "e8d317f", pair, by="val_loss", note=", with an unused buffer of torch.empty set to 0")
def lightly_simclr() -> Any:
    module = validated(script("examples/pytorch_lightning/simclr.py").SimCLR)()
    module.criterion.memory_bank.bank_ptr.zero_()  # made by torch.empty and never used: it is what memory held
    return module


@project("lightly-ai/lightly", "e8d317f", pair, by="val_loss")
def lightly_byol() -> Any:
    return validated(script("examples/pytorch_lightning/byol.py").BYOL)()


def graphs() -> L.LightningDataModule:
    """Return random graphs of three classes, in PyTorch Geometric's loaders."""
    from torch_geometric.datasets import FakeDataset
    from torch_geometric.loader import DataLoader

    random.seed(0)
    torch.manual_seed(0)
    made = FakeDataset(num_graphs=160, avg_num_nodes=12, avg_degree=3, num_channels=16, num_classes=3, task="graph")

    class Graphs(L.LightningDataModule):
        def train_dataloader(self) -> Any:
            return DataLoader(made[:112], batch_size=16, shuffle=True)

        def val_dataloader(self) -> Any:
            return DataLoader(made[112:], batch_size=16)

    return Graphs()


@project("pyg-team/pytorch_geometric", "5c6461b", graphs, by="val_acc", mode="max")
def gin() -> Any:
    return script("examples/pytorch_lightning/gin.py").Model(16, 3)


@project("DenisDiachkov/pytorch-lightning-template", "81b3529",
         partial(images, form=lambda x, y: {"input": x.flatten(), "target": y}), by="val_loss", path="src")  # fmt: skip
def base_module() -> Any:
    package = sys.modules["pytorch_lightning_template"] = types.ModuleType("pytorch_lightning_template")
    package.__path__ = ["src/pytorch_lightning_template"]  # its __init__ asks for its installed version
    absent("ruamel", "ruamel.yaml")
    from pytorch_lightning_template.module import BaseModule

    layer = ("torch.nn.Linear", {"in_features": 784, "out_features": 10})
    schedule = ("torch.optim.lr_scheduler.StepLR", {"step_size": 1})
    return BaseModule(*layer, "torch.optim.Adam", {"lr": 1e-3}, *schedule, "torch.nn.CrossEntropyLoss")


@project("tugot17/Pytorch-Lightning-Templates", "36ec7ac",
         partial(colours, samples=96, form=lambda x, y: (x, (torch.arange(3) < y % 4).float())), by="val/loss",
         note=", with a ResNet-18 without weights for its ResNet-50")  # fmt: skip
def multilabel() -> Any:
    templates = script("multilabel_image_classification/lightning_module.py")
    templates.models = SimpleNamespace(resnet50=lambda pretrained: resnet())
    return templates.MultiLabelImageClassifier(3)


def resnet() -> nn.Module:
    from torchvision.models import resnet18

    return resnet18()


def rows_of_a_table() -> Dataset:
    x, y = table()
    form = lambda x, y: {"continuous": x[:10], "categorical": (x[10:] > 0).long(), "target": y[None]}  # noqa: E731
    return Samples(form, x, y)


@project("tiefenthaler/pytorch-lightning-tabular-classification", "922bc8e", rows_of_a_table,
         by="val_F1_macro_weighted", mode="max")  # fmt: skip
def tabular() -> Any:
    absent("imblearn", "imblearn.over_sampling")
    from src.tabular_lightning import MulticlassTabularLightningModule
    from src.tabular_lightning.tabular_models import MulticlassTabularMLP
    from torchmetrics import F1Score

    scores = [F1Score("multiclass", num_classes=3, average="weighted") for _ in range(3)]
    return MulticlassTabularLightningModule(MulticlassTabularMLP(13, 3, 32, 1, dropout=0.1), 3e-3, *scores)


@project("Bonelab/bonelab-pytorch-lightning", "179eaf7",
         partial(images, size=16, samples=96, form=lambda x, y: (x, (x[0] > 0.5).long())), by="val_loss")  # fmt: skip
def segmentation() -> Any:
    from blpytorchlightning.models.UNet import UNet
    from blpytorchlightning.tasks.SegmentationTask import SegmentationTask

    return SegmentationTask(UNet(1, 2, [8, 16], 4, 0.1), nn.CrossEntropyLoss(), 1e-3)


@project("hppRC/template-pytorch-lightning-hydra-mlflow-poetry", "9d12264",
         partial(images, form=lambda x, y: x.sigmoid()), by="val_loss")  # fmt: skip
def experiment() -> Any:
    from omegaconf import OmegaConf
    from src.experiment import Experiment

    adam, step = {"_target_": "torch.optim.Adam", "lr": 1e-3}, {"_target_": "torch.optim.lr_scheduler.StepLR"}
    trainer = {"_target_": "lightning.pytorch.Trainer", "accelerator": "cpu"}
    logger = {"_target_": "lightning.pytorch.loggers.CSVLogger", "save_dir": "logs"}
    rest = {"latent_dim": 20, "batch_size": 16, "optimizer": adam, "scheduler": step | {"step_size": 3}}
    return Experiment(OmegaConf.create({"trainer": trainer, "logger": logger, **rest}))


@project("vspavl99/FastOrgansLocalizationOnCT", "1ad1553",
         partial(images, size=32, samples=96, form=lambda x, y: (x, (x > 0.5).float())), by="val_loss",
         note=", with a small U-Net of segmentation_models_pytorch")  # fmt: skip
def segmentation_of_ct() -> Any:
    import segmentation_models_pytorch as smp
    from src.models.model import ModelSegmentationCT

    net = smp.Unet("mobilenet_v2", encoder_weights=None, encoder_depth=3, decoder_channels=(16, 8, 8), in_channels=1)
    return ModelSegmentationCT(net, nn.BCEWithLogitsLoss())


def points() -> Dataset:
    """Return clouds of 64 points, stretched along one of three axes."""
    y = torch.arange(96) % 3
    x = torch.randn(96, 64, 3, generator=torch.Generator().manual_seed(1)) * (1 + torch.eye(3)[y][:, None])
    return TensorDataset(x, y)


@project("sutiankang/pytorch-lightning-pointnet", "a31b87c", points, by="val_loss", note=", without its own data")
def pointnet() -> Any:
    from models.engine import ClassifierEngine
    from omegaconf import OmegaConf

    files = (
        "configs/default.yaml",
        "configs/models/pointnet_cls.yaml",
        "configs/datasets/modelnet40_normal_resampled.yaml",
    )
    small = {"num_points": 64, "use_normals": False, "classes": ["x", "y", "z"], "work_dir": "work"}
    given = OmegaConf.to_container(OmegaConf.merge(*map(OmegaConf.load, files), small))
    Path("work").mkdir(exist_ok=True)
    paths = dict(zip(("default_config", "model_config", "dataset_config"), files))
    module = ClassifierEngine(Namespace(**given, **paths))
    module.setup = lambda stage=None: None  # it reads ModelNet40, of which its steps know the number of batches
    module.training_dataloader = module.validation_dataloader = range(3)
    return module


@project("Lightning-AI/deep-learning-project-template", "faef5bb", images, by="val_loss")
def project_autoencoder() -> Any:
    return validated(script("project/lit_autoencoder.py").LitAutoEncoder)()


named = partial(colours, form=lambda x, y: (x, nn.functional.one_hot(y, 10).float(), f"{int(y)}.png"))


@project("miracleyoo/pytorch-lightning-template", "0c44375", named, by="val_acc", mode="max", path="classification",
         note=", of fewer channels, with today's name of getfullargspec")  # fmt: skip
def template_of_triples() -> Any:
    inspect.getargspec = inspect.getfullargspec  # type: ignore[attr-defined]
    from model.model_interface import MInterface

    return MInterface("simple_net", "bce", 1e-3, lr_scheduler="step", lr_decay_steps=2, hid=8,
                      layer_num=2, lr_decay_rate=0.5)  # fmt: skip
