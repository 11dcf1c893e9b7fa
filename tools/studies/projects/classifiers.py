"""Classifiers of images, valued by their accuracy."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import nn

from projects import absent, colours, images, project, script


@project("ashleve/lightning-hydra-template", "bddbc24", images)
def hydra_template() -> Any:
    from src.models.components.simple_dense_net import SimpleDenseNet
    from src.models.mnist_module import MNISTLitModule

    plateau = partial(torch.optim.lr_scheduler.ReduceLROnPlateau, mode="min", factor=0.1, patience=10)
    return MNISTLitModule(SimpleDenseNet(), partial(torch.optim.Adam, lr=0.001), plateau, compile=False)


@project("EEEEEEYu/PyTorch-Lightning-Template", "fe55350", colours, note=", of fewer channels")
def model_interface() -> Any:
    from model_interface import ModelInterface

    from configs import sections as of

    channels = {"block1": [8, 8], "block2": [16, 16], "block3": [16]}
    model = of.ModelConfig(blocks={name: {"hidden_channels": each} for name, each in channels.items()})
    optimizer = of.OptimizerConfig(arguments={"lr": 3e-3})
    return ModelInterface(model, optimizer, of.SchedulerConfig(), of.TrainingConfig(), of.DataConfig())


@project("optuna/optuna-examples", "2e0b10b", partial(images, "fashion_mnist"))
def optuna_example() -> Any:
    absent("optuna", "optuna.integration")
    return script("pytorch/pytorch_lightning_simple.py").LightningNet(0.2, [64, 32])


@project("archnnj/pytorch-lightning-metrics-template", "cd1682d",
         partial(images, form=lambda x, y: (x.flatten(), int(y))))  # fmt: skip
def metrics_template() -> Any:
    from experiments.MNISTExperiment import MNISTExperiment
    from models.FC import FC
    from torchmetrics import Accuracy, MetricCollection

    shape = {"in_dim": 784, "hidden_dims": [50, 20], "out_dim": 10}
    metrics = MetricCollection([Accuracy("multiclass", num_classes=10)])
    adam = {"optimizer_type": "Adam", "opt_kwargs": {"lr": 2e-3}}
    return MNISTExperiment(FC, shape, nn.CrossEntropyLoss, **adam, metrics_train=metrics)


@project("DavidZhang73/pytorch-lightning-template", "d5694cd", images, note=", with Adam of its command line")
def simple_net() -> Any:
    absent("wandb", "git")
    from src.modules.mnist_module import SimpleNetModule

    module = SimpleNetModule()
    module.configure_optimizers = lambda: torch.optim.Adam(module.parameters(), lr=1e-3)
    return module


@project("nielsenchristianole/mlops_oracle_mnist", "2b8141b", partial(colours, samples=96), path="src/oracle_mnist",
         note=", of mobilenetv3_small_050")  # fmt: skip
def oracle_mnist() -> Any:
    from modules.train_module import MNISTModule

    schedule = {"_target_": "scheduler.sarphiv_scheduler.get_schedular", "lr_half_period": 2000, "lr_mult_period": 2}
    rates = {"lr_min": 1e-4, "lr_warmup_max": 4e-2, "lr_warmup_period": 1000}
    kind = {"model_name": "mobilenetv3_small_050", "pretrained": False, "num_classes": 10}
    return MNISTModule(kind, {"_target_": "torch.optim.Adam", "lr": 1e-3}, schedule | rates, nn.CrossEntropyLoss())


@project("victor-yon/pytorch-lightning-boilerplate", "07cd9b2", images, path="src")
def boilerplate() -> Any:
    absent("wandb")
    from models.simple_classifier import SimpleClassifier

    return SimpleClassifier()


@project("allegroai/clearml", "39e206f", images)
def clearml() -> Any:
    absent("clearml")
    return script("examples/frameworks/pytorch-lightning/pytorch_lightning_example.py").LitClassifier()


@project("NVIDIA/NVFlare", "f3b7c1b", colours, path="examples/hello-world/hello-lightning")
def nvflare() -> Any:
    from model import LitNet

    return LitNet()


@project("Lightning-Universe/lightning-bolts", "34958a8", images)
def bolts() -> Any:
    absent("pl_bolts", "pl_bolts.utils")
    return script("src/pl_bolts/models/mnist_module.py").LitMNIST()


@project("Lightning-AI/pytorch-lightning", "7f0c343", images)
def lit_classifier() -> Any:
    return script("examples/pytorch/basics/backbone_image_classifier.py").LitClassifier(learning_rate=1e-3)


@project("Lightning-AI/tutorials", "1581765", partial(colours, samples=96))
def vision_transformer() -> Any:
    absent("matplotlib_inline", "matplotlib_inline.backend_inline", "seaborn")

    notebook = script("course_UvA-DL/11-vision-transformer/VT.py")
    notebook.train_loader = [(torch.zeros(2, 3, 32, 32),)]
    size = {"embed_dim": 32, "hidden_dim": 64, "num_heads": 4, "num_layers": 2, "patch_size": 4, "num_channels": 3}
    return notebook.ViT({**size, "num_patches": 64, "num_classes": 10, "dropout": 0.2}, lr=3e-3)


@project("matteobonotto/PyTorch-Lightning-template", "39a8e5d", images)
def lazy_layers() -> Any:
    from src.models.pl_model import BaseModel

    return BaseModel("conv2d_classif", "CrossEntropy")


@project("kayhanAlvandi/pytorch-lightning-mlops-template", "487ae59", colours)
def mlops_template() -> Any:
    from src.model import CNNClassifier

    adam = partial(torch.optim.AdamW, lr=3e-3)
    return CNNClassifier(3, 10, nn.CrossEntropyLoss(), adam, num_blocks=2, base_channels=8, hidden_dim=32)


@project("AtticusZeller/Pytorch-Lightning-uv", "4174ae4", images, path="src")
def uv() -> Any:
    absent("wandb")
    from expt.model import MLP

    return MLP()


@project("Lightning-AI/deep-learning-project-template", "faef5bb", images)
def project_template() -> Any:
    return script("project/lit_mnist.py").LitClassifier()
