"""A model's outputs on the validation set, for runs whose metrics evaluate no models, or not by classes."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Any

import lightning as L
import torch
from torch import Tensor

from flsv._lightning.evaluation import each_loader, on_device
from flsv.errors import ConfigurationError
from flsv.games.evaluation.batches import checked_pair
from flsv.games.evaluation.replica import Replica, checked_logits
from flsv.parameters import ParameterSpace
from flsv.seeding import isolated_rngs


@torch.inference_mode(False)
@torch.no_grad()
def answers_of(
    trainer: L.Trainer, space: ParameterSpace, vector: Tensor, loaders: Any, num_classes: int
) -> tuple[Tensor, Tensor]:
    """What a copy of the trainer's module with ``vector [P]`` in it gives for the validation samples, of as many
    batches as the trainer validates on. One batch at a time is in memory; nothing of the fit changes.

    Args:
        trainer: of the fit, with its module on its device.
        space: the map between the module and vectors.
        vector: the model.
        loaders: one or several validation loaders of pairs ``(x, y)``.
        num_classes: M.

    Returns:
        Logits ``[N, M]``, or of two classes what stands for class 1 ``[N]``, where ``forward`` gives one number per
        sample; and labels ``[N]``; on the CPU.

    Raises:
        ConfigurationError: batches that are no pairs, labels that are no classes, outputs that are no classes'.
    """
    module, outputs, labels = trainer.lightning_module, [], []
    with isolated_rngs(0, "answers"), torch.autocast(trainer.strategy.root_device.type, enabled=False):
        replica = Replica(module, space, context=trainer.strategy.precision_plugin.forward_context)
        replica.follow(module)
        replica.load(lambda _, out: _copy(vector, out), 0)
        for index, loader in enumerate(each_loader(loaders)):
            for batch in on_device(trainer, _limited(loader, trainer.limit_val_batches), index):
                x, y = checked_pair(batch, num_classes)
                with replica.context():
                    found = replica.module(x)
                one = isinstance(found, Tensor) and num_classes == 2 and found.shape in ((len(y),), (len(y), 1))
                found = found.reshape(-1) if one else checked_logits(found, y, num_classes)
                outputs.append(found.float().cpu())
                labels.append(y.cpu())
    if not labels:
        raise ConfigurationError("there are no validation samples.")
    return torch.cat(outputs), torch.cat(labels)


def _limited(loader: Iterable[Any], limit: int | float) -> Iterator[Any]:
    if isinstance(limit, float):
        return iter(loader) if limit == 1 else islice(loader, math.floor(limit * len(loader)))  # type: ignore[arg-type]
    return islice(loader, limit)


def _copy(vector: Tensor, out: Tensor) -> None:
    out.copy_(vector)
