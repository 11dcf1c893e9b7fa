"""Learning-rate schedules: a client's is that of the same module trained alone on the client's data."""

import math
import warnings
from collections import defaultdict
from types import SimpleNamespace

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint, OnExceptionCheckpoint
from torch.optim import lr_scheduler

from flsv.federation import FederatedLoop
from flsv.sampling import FixedCohort
from flsv.utilities.seeding import generator_for
from helpers import refused, warns
from helpers.data import toy_data
from helpers.fits import ListLoader, StopInRound, fit, plain_trainer, state_vector
from helpers.models import Plain, network

SEED, ROUNDS, CLIENTS = 4, 3, 3


def make_linear(optimizer, steps):
    return lr_scheduler.LambdaLR(optimizer, lambda step: max(0.0, 1 - step / steps))


def make_one_cycle(optimizer, steps):
    return lr_scheduler.OneCycleLR(optimizer, max_lr=0.2, total_steps=steps)


def make_warmup_and_cosine(optimizer, steps):
    warm = lr_scheduler.LinearLR(optimizer, 0.1, total_iters=2)
    cosine = lr_scheduler.CosineAnnealingLR(optimizer, steps - 2)
    return lr_scheduler.SequentialLR(optimizer, [warm, cosine], milestones=[2])


def make_stairs(optimizer, steps):
    return lr_scheduler.StepLR(optimizer, 2, gamma=0.5)


class Scheduled(Plain):
    """Its schedule is as long as the fit, and its learning rates are written down, by whose they are."""

    def __init__(self, make, manual=""):
        super().__init__(network(batch_norm=False))
        self.make = make
        self.manual = manual
        self.automatic_optimization = not manual
        self.shared = SimpleNamespace(rates=defaultdict(list))

    @property
    def rates(self):
        return self.shared.rates

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)
        scheduler = self.make(optimizer, self.trainer.estimated_stepping_batches)
        config = {"scheduler": scheduler, "interval": "step"}
        return [optimizer], [scheduler if self.manual == "epoch" else config]

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        if self.manual:
            optimizer = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()
            if self.manual == "batch" or (
                self.manual == "last batch" and self.trainer.is_last_batch
            ):
                self.lr_schedulers().step()

        return loss

    def on_before_optimizer_step(self, optimizer):
        (group,) = optimizer.param_groups
        client = -1
        for callback in self.trainer.callbacks:
            if isinstance(callback, FederatedLoop):
                client = callback.current_client

        self.rates[client].append((group["lr"], group["momentum"]))

    def on_train_epoch_end(self):
        if self.manual == "epoch":
            self.lr_schedulers().step()


class OneClient(L.LightningDataModule):
    def __init__(self, client):
        super().__init__()
        self.data = toy_data()
        self.client = client

    def setup(self, stage):
        self.data.setup("fit")

    def train_dataloader(self):
        stream = generator_for(SEED, "shuffle", self.trainer.current_epoch, self.client, 0)
        return ListLoader(list(self.data.client_loader(self.client, "train", generator=stream)))


def rates_of_client_alone(module, client, folder, **kwargs):
    """Fit the module on one client's data without a federation, and return its rates."""
    trainer = plain_trainer(folder, ROUNDS, reload_dataloaders_every_n_epochs=1, **kwargs)
    trainer.fit(module, OneClient(client))
    return module.rates[-1]


KINDS = {
    "linear": (lambda: Scheduled(make_linear), {}),
    "warm, then cosine": (lambda: Scheduled(make_warmup_and_cosine), {}),
    "accumulation": (lambda: Scheduled(make_linear), {"accumulate_grad_batches": 2}),
    "limited": (lambda: Scheduled(make_one_cycle), {"limit_train_batches": 0.5}),
    "by hand": (lambda: Scheduled(make_linear, manual="batch"), {}),
    "by hand, at an epoch's last batch": (lambda: Scheduled(make_stairs, manual="last batch"), {}),
    "by hand, after an epoch": (lambda: Scheduled(make_stairs, manual="epoch"), {}),
    "by hand, of no interval": (lambda: OfRounds(make_one_cycle, manual="batch"), {}),
}


@pytest.mark.fast_rows
@pytest.mark.parametrize("kind", KINDS)
def test_every_clients_schedule_is_that_of_training_alone(tmp_path, kind):
    make_module, options = KINDS[kind]
    module = make_module()
    with warnings.catch_warnings():
        # Of torch, where a schedule takes a step before the optimizer does.
        warnings.filterwarnings("error", message=".*lr_scheduler.step\\(\\)")
        fit(FederatedLoop(seed=SEED), tmp_path, module, rounds=ROUNDS, **options)

    num_steps = {len(module.rates[client]) for client in range(CLIENTS)}
    assert len(num_steps) == CLIENTS  # each client has another number of steps
    for client in range(CLIENTS):
        expected = rates_of_client_alone(make_module(), client, tmp_path, **options)
        assert module.rates[client] == expected


class Opinionated(FixedCohort):
    """Goes by what rounds were: whom it draws in later ones is not known."""

    def end_round(self, round):
        self.last_round = round


def test_schedule_length_under_an_unpredictable_sampler_counts_all_rounds(tmp_path):
    loop = FederatedLoop(sampler=Opinionated([0]), seed=SEED)
    module = fit(loop, tmp_path, Scheduled(make_one_cycle), rounds=2)

    assert list(module.rates) == [0]

    rates = module.rates[0]
    assert module.trainer.estimated_stepping_batches != 2 * len(rates)  # ours again, after the fit

    of_all_clients = fit(FederatedLoop(seed=SEED), tmp_path, Scheduled(make_one_cycle), rounds=2)
    assert of_all_clients.rates[0] == rates


class OfRounds(Scheduled):
    """Says nothing of its scheduler's interval, as in Lightning's examples of manual optimization."""

    def configure_optimizers(self):
        optimizers, (config,) = super().configure_optimizers()
        return optimizers, [config["scheduler"]]


class StepsTwice(OfRounds):
    """Steps its scheduler in training and between rounds."""

    def on_train_epoch_end(self):
        self.lr_schedulers().step()


class Hidden(Scheduled):
    def configure_optimizers(self):
        (optimizer,), (config,) = super().configure_optimizers()
        self.scheduler = config["scheduler"]
        return optimizer


class Foreign(Plain):
    def configure_optimizers(self):
        self.temperature = torch.ones(2, requires_grad=True)
        return torch.optim.SGD([*self.parameters(), self.temperature], lr=0.1)


@pytest.mark.parametrize(
    ("module", "message"),
    [
        (
            lambda: StepsTwice(make_stairs, manual="batch"),
            "StepLR is stepped both while a client trains and between rounds",
        ),
        (
            lambda: Hidden(make_stairs, manual="batch"),
            "configure_optimizers does not return the learning-rate scheduler",
        ),
        (Foreign, r"trains tensors of shape \[\[2\]\] that are not parameters"),
    ],
)
def test_scheduler_or_optimizer_that_mixes_clients_is_refused(tmp_path, module, message):
    names = (
        "is_last_batch",
        "estimated_stepping_batches",
        "num_training_batches",
        "train_dataloader",
    )
    attributes = [getattr(L.Trainer, name) for name in names]

    with refused(message):
        fit(FederatedLoop(seed=SEED), tmp_path, module(), rounds=3)

    assert [getattr(L.Trainer, name) for name in names] == attributes


#: Of ``toy_data``.
BATCH_SIZE = 8
WAYS = [
    lambda trainer: trainer.estimated_stepping_batches / trainer.max_epochs,
    lambda trainer: trainer.num_training_batches,
    lambda trainer: len(trainer.train_dataloader),
    lambda trainer: len(trainer.datamodule.train_dataloader()),
    lambda trainer: math.ceil(len(trainer.train_dataloader.dataset) / BATCH_SIZE),
]


class Asking(Scheduled):
    """Its schedule follows from the batches of a round, however it learns of them."""

    def __init__(self, ways):
        super().__init__(
            lambda optimizer, _: make_linear(optimizer, self.length() * self.trainer.max_epochs)
        )
        self.ways = ways

    def length(self):
        (length,) = {read(self.trainer) for read in self.ways}
        return length


@pytest.mark.fast_rows
@pytest.mark.parametrize("ways", [*([read] for read in WAYS), WAYS[::-1]])
def test_schedule_lengths_read_in_training_are_the_clients_own(tmp_path, ways):
    """They fall to 0 within each client's steps."""
    module = fit(FederatedLoop(seed=SEED), tmp_path, Asking(ways), rounds=2)

    for rates in module.rates.values():
        expected = [0.1 * (1 - step / len(rates)) for step in range(len(rates))]
        assert [rate for rate, _ in rates] == pytest.approx(expected)
    assert len({len(rates) for rates in module.rates.values()}) > 1


def test_schedule_length_read_in_setup_is_the_largest_clients_with_a_warning(tmp_path):
    class AsksInSetup(Asking):
        def setup(self, stage):
            self.length_in_setup = self.length()

    with warns("setup, before any client trains."):
        module = fit(FederatedLoop(seed=SEED), tmp_path, AsksInSetup(WAYS[:-1]), rounds=2)

    longest = max(len(rates) for rates in module.rates.values())
    assert 2 * module.length_in_setup == longest


@pytest.mark.fast_rows
@pytest.mark.parametrize(
    ("kind", "make_saver"),
    [
        # At the end of a round, and within the third one.
        ("limited", lambda folder: ModelCheckpoint(folder, "on_exception")),
        ("by hand, of no interval", OnExceptionCheckpoint),
    ],
)
def test_clients_schedules_resume_bitwise(tmp_path, kind, make_saver):
    make_module, _ = KINDS[kind]
    uninterrupted = make_module()
    fit(FederatedLoop(seed=SEED), tmp_path / "whole", uninterrupted, rounds=4)

    callbacks = [StopInRound(round_index=2, batch=9, error=RuntimeError), make_saver(tmp_path)]
    with pytest.raises(RuntimeError, match="stopped by the test"):
        fit(
            FederatedLoop(seed=SEED),
            tmp_path / "half",
            make_module(),
            rounds=4,
            callbacks=callbacks,
            enable_checkpointing=True,
        )

    resumed = make_module()
    fit(
        FederatedLoop(seed=SEED),
        tmp_path / "half",
        resumed,
        rounds=4,
        ckpt_path=tmp_path / "on_exception.ckpt",
    )

    assert torch.equal(state_vector(resumed), state_vector(uninterrupted))
    for client, rates in resumed.rates.items():
        rates_of_whole = uninterrupted.rates[client]
        rates_of_last_two_rounds = rates_of_whole[len(rates_of_whole) // 2 :]
        assert rates == rates_of_last_two_rounds
