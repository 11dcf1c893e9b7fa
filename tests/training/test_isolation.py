"""A client's round depends on the round and on the client, not on who trained before it."""

from typing import Any

import lightning as L
import torch
from torch import Tensor, nn

from flsv.data import FederatedDataModule, SizePartitioner, Splits
from flsv.federation import FederatedLoop
from flsv.sampling import FixedCohort
from helpers.data import toy_sets
from helpers.fits import KeepUpdates, fit
from helpers.models import Plain, loop_of
from helpers.tasks import Items


class Remembers(Plain):
    """Remembers batches in state of several kinds, each of which changes the loss.

    No checkpoint holds it. Besides, the module draws noise from the global random state after the transfer, as Kornia's
    users do.
    """

    def __init__(self) -> None:
        super().__init__()
        # Replaced: a buffer, as MoCo's.
        self.register_buffer("bank", torch.zeros(6), persistent=False)
        # None at first, and longer with each batch: a buffer.
        self.register_buffer("grown", None, persistent=False)
        # Changed in place: a plain attribute.
        self.mean = torch.zeros(6)
        self.constant = torch.ones(6)

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        x, y = batch
        return (x + torch.randn_like(x), y) if self.trainer.training else batch

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        if not hasattr(self, "first_sample"):
            # Made by the first batch: an attribute, and a buffer of at most five samples.
            self.first_sample = x[0]
            self.register_buffer("queue", x[:2], persistent=False)

        features = x + self.bank + self.mean + self.first_sample + self.queue.mean(0)
        loss = nn.functional.cross_entropy(self(features), y)
        self.bank = 0.9 * self.bank + 0.1 * x.mean(0)
        self.mean += 0.1 * x.mean(0)
        self.grown = x[:1] if self.grown is None else torch.cat([self.grown, x[:1]])
        self.queue = torch.cat([self.queue[-4:], x[:1]])

        return loss + 0.01 * self.grown.sum()


def make_augmented_data() -> FederatedDataModule:
    """Noise from the global random state, drawn sample by sample in this process."""
    train, test = toy_sets()
    x, y = train.tensors

    def add_noise(index: int) -> tuple[Tensor, Tensor]:
        return x[index] + torch.randn(6), y[index]

    augmented = Items(add_noise, range(len(y)))
    augmented.targets = y
    return FederatedDataModule(
        (augmented, test),
        SizePartitioner([4, 1, 2]),
        batch_size=8,
        splits=Splits(client_test=0.2),
    )


def test_client_trains_the_same_alone_and_after_others(tmp_path):
    models = []
    for cohort in ([2], [0, 2], [0, 1, 2]):
        recorder = KeepUpdates()
        loop = FederatedLoop(
            recorder,
            sampler=FixedCohort(cohort),
            local_epochs=2,
            seed=4,
        )
        fit(
            loop,
            tmp_path / str(len(cohort)),
            Remembers(),
            make_augmented_data(),
            rounds=1,
        )
        models.append(recorder.rounds[0][2])

    assert torch.equal(models[0], models[1])
    assert torch.equal(models[0], models[2])


def test_checkpoint_between_two_clients_holds_the_global_models_buffers(tmp_path):
    banks = []

    class Watch(L.Callback):
        def on_train_batch_start(
            self, trainer: L.Trainer, module: L.LightningModule, *_: Any
        ) -> None:
            # Before the loop's own hook: between clients.
            buffers = loop_of(module).state_dict()["buffers"]["buffers"]
            banks.append(buffers["bank"].clone())

    loop = FederatedLoop(seed=1)
    fit(
        loop,
        tmp_path,
        Remembers(),
        rounds=1,
        callbacks=[Watch()],
    )

    assert len(banks) > 5
    for bank in banks:
        assert torch.equal(bank, torch.zeros(6))
