"""A run that is stopped, by default after two of four rounds, and resumed, beside one that is not."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import torch
from resume_run import checkpoints
from toys import Plain, fit, toy_data, vector

from flsv.data import FederatedDataModule
from flsv.federation import FederatedLoop


def assert_resumes(
    make: Callable[[], FederatedLoop],
    folder: Path,
    module: Callable[[], L.LightningModule] = Plain,
    data: Callable[[], FederatedDataModule] = toy_data,
    rounds: tuple[int, int] = (2, 4),
    **options: Any,
) -> FederatedLoop:
    """The two end alike to the bit. Gives the first.

    That is the global model, start points, what clients keep, their trained models, buffers and strategies' states.
    """
    whole, half, rest = make(), make(), make()
    uninterrupted = fit(whole, folder / "whole", module(), data(), rounds=rounds[1], **options)
    saving: dict[str, Any] = {**options, "enable_checkpointing": True, "callbacks": [checkpoints(folder)]}
    fit(half, folder, module(), data(), rounds=rounds[0], **saving)
    path = folder / "checkpoints/last.ckpt"
    torch.load(path, weights_only=True)
    saving["callbacks"] = [checkpoints(folder / "resumed")]
    resumed = fit(rest, folder, module(), data(), rounds=rounds[1], ckpt_path=path, **saving)
    assert torch.equal(vector(resumed), vector(uninterrupted))
    mine, theirs = rest.state_dict(), whole.state_dict()
    for name in ("starts", "clients", "trained", "buffers", "strategies", "client_scores"):
        assert _same(mine[name], theirs[name]), name
    return whole


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor):
        return torch.equal(a.nan_to_num(9), b.nan_to_num(9))
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(_same(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(_same, a, b))
    return a == b
