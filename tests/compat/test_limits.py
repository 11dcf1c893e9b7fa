"""What means something else in a federation than to a Trainer that trains one model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from compat.kinds.base import Kind, images
from compat.kinds.small import Small
from compat.runs import run
from torch import Tensor

#: 18 and 26 samples in batches of 8.
BATCHES = (3, 4)


class Notes(Small):
    """Notes what the Trainer tells it in every batch, and how many there have been, in an attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.told: list[tuple[int, int, int, int, bool]] = []
        self.count = 0

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        trainer = self.trainer
        told = (trainer.current_epoch, self.global_step, trainer.num_training_batches, batch_idx, trainer.is_last_batch)
        self.told.append(told)
        self.count += 1
        return super().training_step(batch, batch_idx)


def test_epochs_are_rounds_and_batches_are_the_clients(tmp_path: Path) -> None:
    """The global step and the epoch's length count all clients; attributes that are no tensors pass between them."""
    module: Any = run(Kind(Notes, images, clients=(2, 3)), tmp_path)[0]
    own = [(epoch, i, i == n - 1) for epoch in range(2) for n in BATCHES for i in range(n)]
    assert [(epoch, batch_idx, last) for epoch, _, _, batch_idx, last in module.told] == own
    assert [(step, length) for _, step, length, _, _ in module.told] == [(i, sum(BATCHES)) for i in range(len(own))]
    assert module.count == len(own)


class Sums(Small):
    """The same with a buffer, which is the client's."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.tensor(0))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.count += 1
        return super().training_step(batch, batch_idx)


def test_buffers_are_the_clients(tmp_path: Path) -> None:
    """Averages of counters mean nothing: the global model has those of the cohort's first client."""
    module, _ = run(Kind(Sums, images, clients=(2, 3)), tmp_path)
    assert int(module.count) == 2 * BATCHES[0]
