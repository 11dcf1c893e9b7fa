"""How each public project's module is made, and what its samples look like; ``public_projects.py`` trains them.

``classifiers`` are valued by their accuracy, ``others`` and ``packages`` by a value that they log.
``pytorch_lightning`` is here another name of ``lightning.pytorch``, of which a federation's modules are. A module
without a ``validation_step`` is given one (``validated``), which a star in its name says.

Their packages: asteroid-filterbanks, byol-pytorch, einops, gluonts, hydra-core, kornia, lightly, loguru, matplotlib,
monai, pytorch-forecasting, pytorch-tabular, seaborn, segmentation-models-pytorch, tensorboard, timm, torch-geometric,
torch-optimizer, torchgeo, torchvision, by ``pip install --no-deps`` and what an import then asks for.
"""

from __future__ import annotations

import ast
import importlib
import sys
import types
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, TensorDataset

from flsv.data import load_image_data


@dataclass(frozen=True)
class Project:
    """A project's module.

    Args:
        repository: owner and name of the repository, or the name of the package.
        version: the first digits of the commit, or the version of the package.
        make: makes the module; called in the repository's folder.
        data: makes the data set.
        by: ``"accuracy"``, or the name of a value that the module logs in validation.
        mode: whether less or more of it is better.
        path: the folder of the repository from which the project imports.
        package: the installed package that is the project; empty: its repository.
        note: what is not the project's own, after the module's name.
        precision: the Trainer's.
    """

    repository: str
    version: str
    make: Callable[[], L.LightningModule]
    data: Callable[[], Any]
    by: str = "accuracy"
    mode: str = "min"
    path: str = "."
    package: str = ""
    note: str = ""
    precision: Any = "32-true"


PROJECTS: list[Project] = []


def project(repository: str, version: str, data: Callable[[], Any], **options: Any) -> Callable[[Any], Any]:
    """Register the decorated function as what makes a project's module."""

    def register(make: Callable[[], L.LightningModule]) -> Callable[[], L.LightningModule]:
        PROJECTS.append(Project(repository, version, make, data, **options))
        return make

    return register


def script(path: str) -> Any:
    """Import a script's classes, functions and constants without running the rest of it."""
    tree = ast.parse(Path(path).read_text())
    kept = (ast.Import, ast.ImportFrom, ast.ClassDef, ast.FunctionDef)

    def constant(node: ast.stmt) -> bool:
        named = isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name)
        return named and isinstance(node.value, ast.Constant)

    tree.body = [node for node in tree.body if isinstance(node, kept) or constant(node)]
    module = types.ModuleType(Path(path).stem)
    module.__file__ = path
    sys.modules[module.__name__] = module
    exec(compile(tree, path, "exec"), module.__dict__)
    return module


def absent(*names: str) -> None:
    """Stand in for packages that a file imports and the module does not use."""
    for name in names:
        module: Any = types.ModuleType(name)
        module.__getattr__ = lambda attribute: type(attribute, (), {})
        module.__path__ = []
        sys.modules.setdefault(name, module)


def validated(kind: type[Any], loss: Callable[[Any, Any], Tensor] | None = None) -> type[Any]:
    """Return a class whose ``validation_step`` logs ``val_loss``: by default the training step's loss."""

    def validation_step(self: Any, batch: Any, batch_idx: int) -> None:
        value = kind.training_step(self, batch, batch_idx) if loss is None else loss(self, batch)
        self.log("val_loss", value["loss"] if isinstance(value, dict) else value)

    return type(f"{kind.__name__}*", (kind,), {"validation_step": validation_step, "__module__": kind.__module__})


class Samples(Dataset):
    """Samples of any form, each made of a row of some tensors."""

    def __init__(self, form: Callable[..., Any], *tensors: Tensor) -> None:
        self.form, self.tensors = form, tensors

    def __len__(self) -> int:
        return len(self.tensors[0])

    def __getitem__(self, index: int) -> Any:
        return self.form(*(tensor[index] for tensor in self.tensors))


def images(
    name: str = "mnist", size: int = 28, channels: int = 1, samples: int = 224, form: Callable[..., Any] | None = None
) -> Dataset:
    """Return images ``[channels, size, size]`` and labels of a data set that is known by name, or ``form(x, y)``."""
    whole = load_image_data(name).train
    x, y = (torch.stack([torch.as_tensor(whole[index][part]) for index in range(samples)]) for part in (0, 1))
    x = (x if x.shape[-1] == size else nn.functional.interpolate(x, size)).expand(-1, channels, -1, -1).contiguous()
    return TensorDataset(x, y) if form is None else Samples(form, x, y)


colours = partial(images, "fashion_mnist", size=32, channels=3)


def characters(path: str, length: int = 32, samples: int = 128) -> Dataset:
    """Return windows of a file's bytes below 128, and the bytes that follow them."""
    text = torch.tensor([min(byte, 127) for byte in Path(path).read_bytes()])
    starts = torch.arange(samples) * ((len(text) - length - 1) // samples)
    windows = torch.stack([text[start : start + length + 1] for start in starts.tolist()])
    return TensorDataset(windows[:, :-1], windows[:, 1:])


def series(length: int = 400) -> Tensor:
    """Return ``[length]`` hourly values with a daily and a weekly period, a trend and noise, always the same."""
    hours = torch.arange(length, dtype=torch.float)
    noise = torch.randn(length, generator=torch.Generator().manual_seed(1))
    return (hours / 24 * 2 * torch.pi).sin() + 0.5 * (hours / 168 * 2 * torch.pi).cos() + hours / 400 + 0.2 * noise


def table() -> tuple[Tensor, Tensor]:
    """Return scikit-learn's wines: 13 standardized numbers ``[178, 13]`` and three classes."""
    from sklearn.datasets import load_wine

    x, y = load_wine(return_X_y=True)
    x = torch.as_tensor(x, dtype=torch.float)
    return (x - x.mean(0)) / x.std(0), torch.as_tensor(y)


for _part in ("callbacks", "loggers", "utilities", "strategies", "cli"):
    importlib.import_module(f"lightning.pytorch.{_part}")
for _name in [name for name in sys.modules if name.startswith("lightning.pytorch")]:
    sys.modules[_name.replace("lightning.pytorch", "pytorch_lightning", 1)] = sys.modules[_name]

from projects import classifiers, others, packages  # noqa: E402, F401 - they register their projects
