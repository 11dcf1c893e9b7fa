"""A client's round depends on the round and on the client, not on who trained before it."""

from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from resuming import assert_resumes
from torch import Tensor, nn
from torch.utils.data import Dataset
from toys import Plain, fit, toy_data, toy_sets

from flsv.data import FederatedDataModule, SizePartitioner, Splits
from flsv.loop import FederatedLoop
from flsv.metrics import ContributionMetric
from flsv.sampling import FixedCohort


class MemoryBank(Plain):
    """Remembers the batches that it has seen in a buffer that no checkpoint holds, as MoCo does."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("bank", torch.zeros(6), persistent=False)
        self.register_buffer("grown", None, persistent=False)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        loss = nn.functional.cross_entropy(self(x + self.bank), y)
        self.bank = 0.9 * self.bank + 0.1 * x.mean(0)
        self.grown = x[:1] if self.grown is None else torch.cat([self.grown, x[:1]])
        return loss + 0.01 * self.grown.sum()


class Augmented(Dataset[Any]):
    """Noise from the global random state, drawn sample by sample in this process."""

    def __init__(self, base: Any) -> None:
        self.base = base

    def __len__(self) -> int:
        return len(self.base)

    def __getitem__(self, index: int) -> Any:
        x, y = self.base[index]
        return x + torch.randn(x.shape), y


def augmented() -> FederatedDataModule:
    train, test = toy_sets()
    return FederatedDataModule(
        (Augmented(train), test), SizePartitioner([4, 1, 2]), batch_size=8, splits=Splits(client_test=0.2)
    )


class Keep(ContributionMetric):
    """The models of the last round by client, ``[n, P]``."""

    def init_states(self, num_clients: int, num_classes: int | None) -> None:
        self.models: dict[int, Tensor] = {}

    def update(self, client_ids: Tensor, client_vectors: Tensor) -> None:
        self.models.update(zip(client_ids.tolist(), client_vectors.clone()))

    def compute(self) -> Tensor:
        assert self.num_clients is not None
        return torch.zeros(self.num_clients)


class AugmentsOnTheDevice(Plain):
    """Noise from the global random state, drawn batch by batch after the transfer, as Kornia's users do."""

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        x, y = batch
        return (x + torch.randn_like(x), y) if self.trainer.training else batch


class Attributes(Plain):
    """As MemoryBank, but in plain attributes; one of them, and one buffer, are made by the first batch."""

    def __init__(self) -> None:
        super().__init__()
        self.bank = torch.zeros(6)
        self.constant = torch.ones(6)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        if not hasattr(self, "first"):
            self.first = x[0]
            self.register_buffer("queue", x[:2], persistent=False)
        loss = nn.functional.cross_entropy(self(x + self.bank + self.first + self.queue.mean(0)), y)
        self.bank += 0.1 * x.mean(0)
        self.queue = torch.cat([self.queue[-4:], x[:1]])
        return loss


@pytest.mark.parametrize(
    ("module", "data"),
    [(MemoryBank, toy_data), (Plain, augmented), (AugmentsOnTheDevice, toy_data), (Attributes, toy_data)],
)
def test_the_same_alone_and_after_another(tmp_path: Path, module: Any, data: Any) -> None:
    models = []
    for cohort in ([2], [0, 2], [0, 1, 2]):
        keep = Keep()
        loop = FederatedLoop(metrics={"keep": keep}, sampler=FixedCohort(cohort), local_epochs=2, seed=4)
        fit(loop, tmp_path / str(len(cohort)), module(), data(), rounds=1)
        models.append(keep.models[2])
    assert torch.equal(models[0], models[1])
    assert torch.equal(models[0], models[2])


@pytest.mark.parametrize("module", [MemoryBank, Attributes, AugmentsOnTheDevice])
def test_what_no_checkpoint_of_a_module_holds_is_resumed(tmp_path: Path, module: Any) -> None:
    assert_resumes(lambda: FederatedLoop(seed=1), tmp_path, module=module)


def test_a_checkpoint_between_two_clients_holds_the_rounds_own(tmp_path: Path) -> None:
    seen = []

    class Watch(L.Callback):
        def on_train_batch_start(self, trainer: L.Trainer, *_: Any) -> None:
            loop = next(each for each in trainer.callbacks if isinstance(each, FederatedLoop))  # type: ignore[attr-defined]
            buffers = loop.state_dict()["buffers"]["buffers"]  # before the loop's own hook: between two clients
            seen.append(buffers["bank"].clone())

    fit(FederatedLoop(seed=1), tmp_path, MemoryBank(), rounds=1, callbacks=[Watch()])
    assert len(seen) > 5
    assert all(torch.equal(each, torch.zeros(6)) for each in seen)
