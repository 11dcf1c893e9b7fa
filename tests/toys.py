"""Small modules and data for the tests. The modules are what a user might have: they know nothing of flsv."""

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import torch
from data_options import grouped
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from flsv.data import FederatedDataModule, SizePartitioner
from flsv.federation import FederatedLoop

FEATURES, CLASSES = 6, 3


def toy_sets(samples: int = 130, test: int = 30, seed: int = 0) -> tuple[TensorDataset, TensorDataset]:
    """Three Gaussian classes."""
    generator = torch.Generator().manual_seed(seed)
    centers = 2 * torch.randn(CLASSES, FEATURES, generator=generator)

    def draw(n: int) -> TensorDataset:
        y = torch.arange(n) % CLASSES
        return TensorDataset(centers[y] + torch.randn(n, FEATURES, generator=generator), y)

    return draw(samples), draw(test)


def toy_data(proportions: tuple[float, ...] = (4, 1, 2), batch_size: int = 8, **kwargs: Any) -> FederatedDataModule:
    kwargs.setdefault("client_test", 0.2)
    return FederatedDataModule(toy_sets(), SizePartitioner(list(proportions)), batch_size=batch_size, **grouped(kwargs))


def network(batch_norm: bool = True, dropout: float = 0.0) -> nn.Module:
    torch.manual_seed(3)
    norm = nn.BatchNorm1d(8) if batch_norm else nn.Identity()
    # A bias before BatchNorm has no gradient but rounding noise, which Adam would blow up to full steps.
    return nn.Sequential(
        nn.Linear(FEATURES, 8, bias=not batch_norm), norm, nn.ReLU(), nn.Dropout(dropout), nn.Linear(8, CLASSES)
    )


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def adam(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, lr=0.001)


class Plain(L.LightningModule):
    """An ordinary LightningModule."""

    def __init__(
        self,
        net: nn.Module | None = None,
        optimizer: Callable[[Any], torch.optim.Optimizer] = sgd,
        scheduler: Callable[[torch.optim.Optimizer], Any] | None = None,
        interval: str = "epoch",
    ) -> None:
        super().__init__()
        self.net = net or network()
        self.make_optimizer, self.make_scheduler, self.interval = optimizer, scheduler, interval

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        return nn.functional.cross_entropy(self(x), y)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        x, y = batch
        self.log("val_acc", (self(x).argmax(-1) == y).float().mean())

    def test_step(self, batch: Any, batch_idx: int) -> None:
        x, y = batch
        self.log("test_acc", (self(x).argmax(-1) == y).float().mean())

    def configure_optimizers(self) -> Any:
        optimizer = self.make_optimizer(self.parameters())
        if self.make_scheduler is None:
            return optimizer
        scheduler = {"scheduler": self.make_scheduler(optimizer), "interval": self.interval}
        return {"optimizer": optimizer, "lr_scheduler": scheduler}


class OfShape:
    """Shares what has so many dimensions."""

    def __init__(self, dimensions: int) -> None:
        self.dimensions = dimensions

    def __call__(self, name: str, tensor: Tensor) -> bool:
        return tensor.ndim == self.dimensions


def trainer_for(loop: FederatedLoop | None, folder: Path, rounds: int = 3, **kwargs: Any) -> L.Trainer:
    quiet: dict[str, Any] = {
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "accelerator": "cpu",
        "num_sanity_val_steps": 0,
        "log_every_n_steps": 1,
    }
    callbacks = [loop] if loop is not None else []
    callbacks += kwargs.pop("callbacks", [])
    return L.Trainer(max_epochs=rounds, default_root_dir=folder, callbacks=callbacks, **{**quiet, **kwargs})


def fit(
    loop: FederatedLoop,
    folder: Path,
    module: L.LightningModule | None = None,
    data: FederatedDataModule | None = None,
    rounds: int = 3,
    ckpt_path: Any = None,
    **kwargs: Any,
) -> L.LightningModule:
    module = Plain() if module is None else module
    trainer = trainer_for(loop, folder, rounds, **kwargs)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*in eval mode at the start of training.*")
        trainer.fit(module, toy_data() if data is None else data, ckpt_path=ckpt_path)
    return module


def validation_loss(module: L.LightningModule, space: Any, vector: Tensor, data: FederatedDataModule) -> float:
    """Of the model ``vector``, in evaluation mode, on the server's samples."""
    space.write(module, vector)
    module.eval()
    x, y = (torch.cat(parts) for parts in zip(*data.val_dataloader()))
    with torch.no_grad():
        return float(torch.nn.functional.cross_entropy(module(x), y))


def vector(module: L.LightningModule) -> Tensor:
    """All floating-point state, parameters before buffers, by state_dict and not by flsv."""
    return flat(module.state_dict(), [name for name, _ in module.named_parameters()])


def flat(state: dict[str, Tensor], parameters: list[str]) -> Tensor:
    names = [*parameters, *(n for n, v in state.items() if n not in parameters and v.is_floating_point())]
    return torch.cat([state[n].reshape(-1).double() for n in names])
