"""A run that is stopped after two of four rounds and resumed, beside one that is not."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import torch
from resume_run import checkpoints
from torchmetrics import Metric
from toys import CLASSES, FEATURES, Plain, fit, toy_data, trainer_for, vector

from flsv import ClassifierClient, Reporting
from flsv.data import FederatedDataModule
from flsv.loop import FederatedLoop


def assert_resumes(
    make: Callable[[], FederatedLoop],
    folder: Path,
    module: Callable[[], L.LightningModule] = Plain,
    data: Callable[[], FederatedDataModule] = toy_data,
) -> FederatedLoop:
    """The two end alike to the bit. Gives the first.

    That is the global model, start points, what clients keep, their trained models, buffers and strategies' states.
    """
    whole, half, rest = make(), make(), make()
    uninterrupted = fit(whole, folder / "whole", module(), data(), rounds=4)
    saving: dict[str, Any] = {"enable_checkpointing": True, "callbacks": [checkpoints(folder)]}
    fit(half, folder, module(), data(), rounds=2, **saving)
    path = folder / "checkpoints/last.ckpt"
    torch.load(path, weights_only=True)
    saving["callbacks"] = [checkpoints(folder / "resumed")]
    resumed = fit(rest, folder, module(), data(), rounds=4, ckpt_path=path, **saving)
    assert torch.equal(vector(resumed), vector(uninterrupted))
    mine, theirs = rest.state_dict(), whole.state_dict()
    for name in ("starts", "clients", "trained", "buffers", "strategies", "client_accuracy"):
        assert _same(mine[name], theirs[name]), name
    return whole


def assert_metric_resumes(metric: Callable[[], Metric], folder: Path) -> None:
    """A metric that plays on the server's samples, in a run that is stopped after two of three rounds: its values and
    states end alike to the bit."""

    def loop() -> FederatedLoop:
        return FederatedLoop(metrics={"mine": metric()}, seed=1, reporting=Reporting(table=False))

    def parts() -> tuple[L.LightningModule, FederatedDataModule]:
        torch.manual_seed(0)
        module = ClassifierClient("softmax", num_classes=CLASSES, input_shape=(FEATURES,))
        return module, toy_data((4, 1, 2), server_val=0.3)

    whole, resumed = loop(), loop()
    fit(whole, folder / "whole", *parts(), rounds=3)
    begun = trainer_for(loop(), folder / "begun", 2)
    begun.fit(*parts())
    begun.save_checkpoint(folder / "two.ckpt")
    fit(resumed, folder / "resumed", *parts(), rounds=3, ckpt_path=folder / "two.ckpt")
    assert torch.equal(resumed.contributions["mine"], whole.contributions["mine"])
    for name, state in whole.metrics["mine"].metric_state.items():
        assert torch.equal(resumed.metrics["mine"].metric_state[name], state), name


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor):
        return torch.equal(a.nan_to_num(9), b.nan_to_num(9))
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(_same(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(_same, a, b))
    return a == b
