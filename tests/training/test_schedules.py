"""Learning-rate schedules: a client's is that of the same module trained alone on the client's data."""

import math
import warnings
from collections import defaultdict
from functools import partial
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


class RecordsLearningRates(Plain):
    """Its schedule is as long as the fit. Keeps pairs of learning rate and momentum by client, those of a fit without
    a federation as None."""

    def __init__(self, make_scheduler):
        super().__init__(network(batch_norm=False))
        self.make_scheduler = make_scheduler
        # The clients share what is in a SimpleNamespace, so that it has all of them after the fit.
        self.shared = SimpleNamespace(rates=defaultdict(list))

    @property
    def rates(self):
        return self.shared.rates

    def schedule_length(self):
        return self.trainer.estimated_stepping_batches

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)
        scheduler = self.make_scheduler(optimizer, self.schedule_length())
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]

    def on_before_optimizer_step(self, optimizer):
        (group,) = optimizer.param_groups
        client = client_in_training(self.trainer)
        self.rates[client].append((group["lr"], group["momentum"]))


def client_in_training(trainer):
    for callback in trainer.callbacks:
        if isinstance(callback, FederatedLoop):
            return callback.current_client
    return None


class StepsOptimizerItself(RecordsLearningRates):
    """Leaves its schedule's steps to subclasses."""

    def __init__(self, make_scheduler):
        super().__init__(make_scheduler)
        self.automatic_optimization = False

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()


class StepsScheduleAfterEveryBatch(StepsOptimizerItself):
    def training_step(self, batch, batch_idx):
        super().training_step(batch, batch_idx)
        self.lr_schedulers().step()


class StepsScheduleAfterLastBatch(StepsOptimizerItself):
    def training_step(self, batch, batch_idx):
        super().training_step(batch, batch_idx)
        if self.trainer.is_last_batch:
            self.lr_schedulers().step()


class StepsScheduleAfterEpoch(StepsOptimizerItself):
    def configure_optimizers(self):
        optimizers, (config,) = super().configure_optimizers()
        return optimizers, [config["scheduler"]]

    def on_train_epoch_end(self):
        self.lr_schedulers().step()


class ReturnsSchedulerWithoutInterval(StepsScheduleAfterEveryBatch):
    """Says nothing of its scheduler's interval, as in Lightning's examples of manual optimization."""

    def configure_optimizers(self):
        optimizers, (config,) = super().configure_optimizers()
        return optimizers, [config["scheduler"]]


def fit_clients(folder, module, rounds=2, **options):
    return fit(FederatedLoop(seed=SEED), folder, module, rounds=rounds, **options)


class BatchesOfOneClient(L.LightningDataModule):
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
    trainer.fit(module, BatchesOfOneClient(client))
    return module.rates[None]


def assert_clients_have_different_numbers_of_steps(module):
    numbers_of_steps = {len(rates) for rates in module.rates.values()}
    assert len(numbers_of_steps) == CLIENTS


#: How a module is made, and options of its Trainer.
SCHEDULES = {
    "linear": (partial(RecordsLearningRates, make_linear), {}),
    "warm, then cosine": (partial(RecordsLearningRates, make_warmup_and_cosine), {}),
    "accumulation": (partial(RecordsLearningRates, make_linear), {"accumulate_grad_batches": 2}),
    "limited": (partial(RecordsLearningRates, make_one_cycle), {"limit_train_batches": 0.5}),
    "by hand": (partial(StepsScheduleAfterEveryBatch, make_linear), {}),
    "by hand, at an epoch's last batch": (partial(StepsScheduleAfterLastBatch, make_stairs), {}),
    "by hand, after an epoch": (partial(StepsScheduleAfterEpoch, make_stairs), {}),
    "by hand, of no interval": (partial(ReturnsSchedulerWithoutInterval, make_one_cycle), {}),
}


@pytest.mark.by_turn
@pytest.mark.fast_rows
@pytest.mark.parametrize("kind", SCHEDULES)
def test_every_clients_schedule_is_that_of_training_alone(tmp_path, kind):
    make_module, options = SCHEDULES[kind]
    module = make_module()
    with warnings.catch_warnings():
        # Of torch, where a schedule takes a step before the optimizer does.
        warnings.filterwarnings("error", message=".*lr_scheduler.step\\(\\)")
        fit_clients(tmp_path, module, rounds=ROUNDS, **options)

    assert_clients_have_different_numbers_of_steps(module)
    for client in range(CLIENTS):
        expected = rates_of_client_alone(make_module(), client, tmp_path, **options)
        assert module.rates[client] == expected


class SamplerThatSeesRounds(FixedCohort):
    """Whom it draws in later rounds could depend on earlier ones."""

    def end_round(self, round):
        self.last_round = round


def test_schedule_length_under_an_unpredictable_sampler_counts_all_rounds(tmp_path):
    loop_of_client_0 = FederatedLoop(sampler=SamplerThatSeesRounds([0]), seed=SEED)
    module = fit(loop_of_client_0, tmp_path, RecordsLearningRates(make_one_cycle), rounds=2)

    module_of_all = fit_clients(tmp_path, RecordsLearningRates(make_one_cycle))

    rates_if_all_train = module_of_all.rates[0]
    assert module.rates == {0: rates_if_all_train}


class StepsTwice(ReturnsSchedulerWithoutInterval):
    """Steps its scheduler in training and between rounds."""

    def on_train_epoch_end(self):
        self.lr_schedulers().step()


class KeepsSchedulerInAttribute(StepsScheduleAfterEveryBatch):
    def configure_optimizers(self):
        (optimizer,), (config,) = super().configure_optimizers()
        self.scheduler = config["scheduler"]
        return optimizer


class TrainsTensorBesideParameters(Plain):
    def configure_optimizers(self):
        self.temperature = torch.ones(2, requires_grad=True)
        return torch.optim.SGD([*self.parameters(), self.temperature], lr=0.1)


@pytest.mark.parametrize(
    ("make_module", "message"),
    [
        (
            partial(StepsTwice, make_stairs),
            "StepLR is stepped both while a client trains and between rounds",
        ),
        (
            partial(KeepsSchedulerInAttribute, make_stairs),
            "configure_optimizers does not return the learning-rate scheduler",
        ),
        (
            TrainsTensorBesideParameters,
            r"trains tensors of shape \[\[2\]\] that are not parameters",
        ),
    ],
)
def test_scheduler_or_optimizer_that_mixes_clients_is_refused(tmp_path, make_module, message):
    with refused(message):
        fit_clients(tmp_path, make_module())


def test_trainers_estimate_of_steps_is_lightnings_again_after_a_fit(tmp_path):
    module = fit_clients(tmp_path, Plain())

    trainer = module.trainer
    steps_of_all_epochs = trainer.num_training_batches * trainer.max_epochs
    assert trainer.estimated_stepping_batches == steps_of_all_epochs


class NotesOtherTrainers(Plain):
    """Notes its Trainer's class, and what a Trainer without a loop estimates in the meantime."""

    def __init__(self, other_trainer):
        super().__init__()
        self.shared = SimpleNamespace(classes=set(), estimates=set(), other_trainer=other_trainer)

    def on_train_batch_start(self, batch, batch_idx):
        self.shared.classes.add(type(self.trainer))
        self.shared.estimates.add(self.shared.other_trainer.estimated_stepping_batches)


def test_no_class_of_a_trainer_changes_and_others_keep_lightnings_estimate(tmp_path):
    other_trainer = plain_trainer(tmp_path / "other", rounds=2)
    other_trainer.fit(Plain(), toy_data())
    estimate = other_trainer.estimated_stepping_batches
    module = fit_clients(tmp_path, NotesOtherTrainers(other_trainer))

    assert module.shared.classes == {L.Trainer}
    assert module.shared.estimates == {estimate}


def properties_that_a_loop_replaces():
    """Return what a Trainer answers by: during a fit, one of them asks the fit's loop."""
    trainer_class = L.Trainer
    return (
        trainer_class.is_last_batch,
        trainer_class.estimated_stepping_batches,
        trainer_class.num_training_batches,
        trainer_class.train_dataloader,
    )


def test_properties_of_the_trainers_class_are_lightnings_again_after_a_refused_run(tmp_path):
    properties_before = properties_that_a_loop_replaces()

    with refused("are not parameters"):
        fit_clients(tmp_path, TrainsTensorBesideParameters())

    assert properties_that_a_loop_replaces() == properties_before


#: Of ``toy_data``.
BATCH_SIZE = 8
LENGTH_READERS = [
    lambda trainer: trainer.estimated_stepping_batches / trainer.max_epochs,
    lambda trainer: trainer.num_training_batches,
    lambda trainer: len(trainer.train_dataloader),
    lambda trainer: len(trainer.datamodule.train_dataloader()),
    lambda trainer: math.ceil(len(trainer.train_dataloader.dataset) / BATCH_SIZE),
]


class ReadsScheduleLength(RecordsLearningRates):
    """Its schedule has the length that all these functions of a Trainer return for an epoch."""

    def __init__(self, readers):
        super().__init__(make_linear)
        self.readers = readers

    def schedule_length(self):
        (length_of_epoch,) = {read(self.trainer) for read in self.readers}
        return length_of_epoch * self.trainer.max_epochs


READERS_ALONE = [[read] for read in LENGTH_READERS]
READERS_IN_REVERSE = LENGTH_READERS[::-1]


@pytest.mark.by_turn
@pytest.mark.fast_rows
@pytest.mark.parametrize("readers", [*READERS_ALONE, READERS_IN_REVERSE])
def test_schedule_lengths_read_in_training_are_the_clients_own(tmp_path, readers):
    """Learning rates fall from 0.1 to 0 within each client's steps."""
    module = fit_clients(tmp_path, ReadsScheduleLength(readers))

    assert_clients_have_different_numbers_of_steps(module)
    for rates in module.rates.values():
        num_steps = len(rates)
        expected_rates = [0.1 * (1 - step / num_steps) for step in range(num_steps)]
        learning_rates = [learning_rate for learning_rate, momentum in rates]
        assert learning_rates == pytest.approx(expected_rates)


class ReadsScheduleLengthInSetup(ReadsScheduleLength):
    def setup(self, stage):
        self.length_in_setup = self.schedule_length()


def test_schedule_length_read_in_setup_is_the_largest_clients_with_a_warning(tmp_path):
    module = ReadsScheduleLengthInSetup(LENGTH_READERS[:-1])
    with warns("setup, before any client trains."):
        fit_clients(tmp_path, module)

    steps_of_largest_client = max(len(rates) for rates in module.rates.values())
    assert module.length_in_setup == steps_of_largest_client


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
    make_module, _ = SCHEDULES[kind]
    uninterrupted = fit_clients(tmp_path / "whole", make_module(), rounds=4)

    callbacks = [StopInRound(round_index=2, batch=9, error=RuntimeError), make_saver(tmp_path)]
    with pytest.raises(RuntimeError, match="stopped by the test"):
        fit_clients(
            tmp_path / "half",
            make_module(),
            rounds=4,
            callbacks=callbacks,
            enable_checkpointing=True,
        )
    checkpoint = tmp_path / "on_exception.ckpt"
    resumed = fit_clients(tmp_path / "half", make_module(), rounds=4, ckpt_path=checkpoint)

    assert torch.equal(state_vector(resumed), state_vector(uninterrupted))
    for client, resumed_rates in resumed.rates.items():
        rates = uninterrupted.rates[client]
        rates_of_last_two_rounds = rates[len(rates) // 2 :]
        assert resumed_rates == rates_of_last_two_rounds
