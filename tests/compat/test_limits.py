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


def told(tmp_path: Path) -> Notes:
    module, _ = run(Kind(Notes, images, clients=(2, 3)), tmp_path)
    assert isinstance(module, Notes)
    return module


def test_epochs_are_rounds_and_batches_are_the_clients(tmp_path: Path) -> None:
    own = [(epoch, i, i == n - 1) for epoch in range(2) for n in BATCHES for i in range(n)]
    assert [(epoch, batch_idx, last) for epoch, _, _, batch_idx, last in told(tmp_path).told] == own


def test_the_global_step_and_the_epochs_length_count_all_clients(tmp_path: Path) -> None:
    counted = [(step, length) for _, step, length, _, _ in told(tmp_path).told]
    assert counted == [(step, sum(BATCHES)) for step in range(2 * sum(BATCHES))]


def test_attributes_that_are_no_tensors_pass_from_client_to_client(tmp_path: Path) -> None:
    assert told(tmp_path).count == 2 * sum(BATCHES)


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
