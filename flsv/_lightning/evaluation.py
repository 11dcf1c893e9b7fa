"""Evaluation of a model within a fit; and how far two ways to compute the same may differ, by precision."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import lightning as L
import torch
from lightning.pytorch.trainer.states import RunningStage
from lightning.pytorch.utilities import CombinedLoader
from torch import Tensor, nn
from torchmetrics import Metric

from flsv.utilities.errors import ConfigurationError

#: Tolerances by precision, relative to numbers above 1 and absolute below.
TOLERANCES = {"32-true": 1e-5, "64-true": 1e-5, "bf16-mixed": 1e-2, "bf16-true": 5e-2}
#: TensorFloat32 has 10 bits of a product's factors, bfloat16 has 7.
TF32 = 5e-3


def on_device(trainer: L.Trainer, batches: Iterable[Any], dataloader_idx: int = 0) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the batches ``(x, y)`` as the trainer's module would get them in validation: converted, transferred and
    passed through all hooks."""
    for batch in batches:
        with validating(trainer):
            batch = as_given(trainer, batch, dataloader_idx)
        if not isinstance(batch, (tuple, list)) or len(batch) != 2:
            what = f"{len(batch)} parts" if isinstance(batch, (tuple, list)) else type(batch).__name__
            raise ConfigurationError(f"models are evaluated on batches (x, y), and a batch is {what}.")
        x, y = batch
        yield x, y


def as_given(trainer: L.Trainer, batch: Any, dataloader_idx: int = 0) -> Any:
    """Return a batch as the trainer's module gets it: converted, passed through all hooks, on the module's device."""
    batch = trainer.strategy.precision_plugin.convert_input(batch)
    batch = trainer.lightning_module._on_before_batch_transfer(batch, dataloader_idx)
    return trainer.strategy.batch_to_device(batch, dataloader_idx=dataloader_idx)


def all_on_device(trainer: L.Trainer, loaders: Any) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the batches of one or several loaders, one loader after the other; see :func:`on_device`."""
    for index, loader in enumerate(each_loader(loaders)):
        yield from on_device(trainer, loader, index)


def each_loader(loaders: Any) -> Sequence[Any]:
    """Return the single loaders of one or several, in Lightning's order."""
    if isinstance(loaders, CombinedLoader) and loaders._mode != "sequential":
        return [[batch for batch, _, _ in loaders]]  # batches of all of them at once
    combined = loaders if isinstance(loaders, CombinedLoader) else CombinedLoader(loaders, "sequential")
    return combined.flattened


@contextmanager
def validating(trainer: L.Trainer) -> Iterator[None]:
    """Let the trainer report that it validates, which hooks of modules and data modules ask before they augment."""
    before = trainer.state.stage
    trainer.state.stage = RunningStage.VALIDATING
    try:
        yield
    finally:
        trainer.state.stage = before


@contextmanager
def evaluating(module: nn.Module) -> Iterator[None]:
    """Put ``module`` into evaluation mode within the context; afterwards every layer has its former mode again."""
    training = [layer for layer in module.modules() if layer.training]
    module.eval()
    try:
        yield
    finally:
        for layer in training:
            layer.training = True


@torch.no_grad()
def count_answers(trainer: L.Trainer, batches: Iterable[Any], counts: Metric) -> None:
    """Give a metric the outputs of the trainer's module, in evaluation mode, and the labels.

    Device, precision and the batch-transfer hooks are those of the fit. Nothing waits for the device.

    Args:
        trainer: its module's ``forward`` gives logits ``[B, M]``.
        batches: pairs ``(x, y)``.
        counts: its ``update`` takes logits and labels; it is moved to the module's device.
    """
    module = trainer.lightning_module
    counts.to(module.device)
    with evaluating(module), trainer.strategy.precision_plugin.forward_context():
        for x, y in on_device(trainer, batches):
            counts.update(module(x), y)


def free_cached(device: torch.device) -> None:
    """Give back the blocks that torch holds on a device and does not use, after an allocation failed."""
    backend: Any = getattr(torch, device.type, None)
    if hasattr(backend, "empty_cache"):
        backend.empty_cache()


def tolerance(trainer: L.Trainer) -> float:
    """Return how far two ways to compute the same may differ in this trainer's precision; if unknown, the widest."""
    precision: Any = trainer.precision
    rounding = TOLERANCES.get(precision, max(TOLERANCES.values()))
    return max(rounding, TF32) if precision == "32-true" and uses_tf32(trainer.strategy.root_device) else rounding


def share_of_way(trainer: L.Trainer) -> float:
    """Return the share of a model's distance from its start that may be rounding; 0 where no step rounds."""
    precision: Any = trainer.precision
    if precision == "bf16-mixed":
        return 0.1
    return 0.02 if precision == "32-true" and uses_tf32(trainer.strategy.root_device) else 0.0


def uses_tf32(device: torch.device) -> bool:
    """Return whether products or convolutions of float32 may be rounded to TensorFloat32: on CUDA convolutions are,
    unless ``torch.backends.cudnn.allow_tf32 = False``, and products where
    ``torch.set_float32_matmul_precision("high")`` or ``"medium"`` allows it.

    Example:
        >>> uses_tf32(torch.device("cpu"))
        False
    """
    return device.type == "cuda" and bool(tf32_of())


def tf32_of() -> list[str]:
    """List what torch's settings allow to be rounded to TensorFloat32: ``"convolutions"``, ``"products"``."""
    # torch 2.9 has names of its own for it, and refuses the earlier ones once these are set.
    backends: dict[str, Any] = {"convolutions": torch.backends.cudnn, "products": torch.backends.cuda.matmul}
    found = []
    for what, backend in backends.items():
        layer = getattr(backend, "conv", backend)
        said = getattr(layer, "fp32_precision", None)
        if said is None:
            said = "tf32" if backend.allow_tf32 else "ieee"
        if said == "none":
            said = getattr(torch.backends, "fp32_precision", "ieee")
        if said in ("tf32", "bf16"):
            found.append(what)
    return found
