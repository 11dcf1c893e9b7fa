"""FederatedLoop(engine="vmap") against the sequential engine: equal to 1e-5."""

from functools import partial

import pytest
import torch
from lightning.pytorch.callbacks import LambdaCallback, Timer
from torch import nn
from torchmetrics import MetricCollection
from torchmetrics.classification import MulticlassAccuracy, MulticlassConfusionMatrix
from vmap.engines import SIZES, fit_by_both_engines, make_engine_loop

from flsv import ClientEvaluation, FederatedDataModule
from flsv.aggregation import ShapFedWA
from flsv.data import SizePartitioner
from flsv.metrics import ClassSpecificShapley, SurrogateFederatedShapley
from flsv.personalization import ShapFedPersonalizer
from flsv.sampling import UniformSampler
from flsv.utilities.seeding import global_rngs
from flsv.vmap.engine import VmapProcess
from flsv.vmap.row_training import RowTraining
from helpers import warns
from helpers.data import CLASSES, FEATURES, toy_data, toy_sets
from helpers.fits import assert_resumes, fit, state_vector
from helpers.models import Plain, Plainest, make_sgd
from zoo.tasks import Items


class Augmented(Plainest):
    """Draws when batches are transferred."""

    def on_after_batch_transfer(self, batch, dataloader_idx):
        x, y = batch
        return (x + torch.randn_like(x) if self.trainer.training else x), y


class Logs(Plainest):
    """What it logs is left out, also by metrics. Its loss grows with the rounds."""

    def __init__(self):
        super().__init__()
        self.accuracy = MulticlassAccuracy(CLASSES)
        metrics = {"all": MulticlassAccuracy(CLASSES), "matrix": MulticlassConfusionMatrix(CLASSES)}
        self.measures = MetricCollection(metrics, prefix="train_")

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = super().training_step(batch, batch_idx)
        self.log("train_loss", loss, on_epoch=True)
        self.log_dict({"twice": 2 * loss})
        logits = self(x)
        self.log("accuracy", self.accuracy(logits, y))
        self.log("all", self.measures(logits, y)["train_all"])
        self.log("running", self.accuracy.compute())
        return {"loss": loss * (1 + 0.3 * self.current_epoch), "of": self.current_epoch}


class Spare(Plainest):
    """A parameter without a gradient does not decay."""

    def __init__(self):
        super().__init__(MOMENTUM)
        self.spare = nn.Parameter(torch.ones(2))


class LateHead(Plainest):
    """A second head joins the loss in the second round only. Its momentum and decay act in no other round."""

    def __init__(self, make_head=nn.Linear):
        super().__init__(MOMENTUM)
        self.head = make_head(FEATURES, CLASSES)

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        if self.current_epoch != 1:
            return loss
        x, y = batch
        return loss + nn.functional.cross_entropy(self.head(x), y)


class RecurrentHead(nn.Module):
    def __init__(self, num_features, num_classes):
        super().__init__()
        self.layer = nn.LSTM(1, num_classes, batch_first=True)

    def forward(self, x):
        outputs, _ = self.layer(x[:, :, None])
        return outputs[:, -1]


class HeadOfFullBatches(LateHead):
    """The second head is in the loss of batches of 8."""

    def training_step(self, batch, batch_idx):
        loss = Plainest.training_step(self, batch, batch_idx)
        x, y = batch
        if len(x) < 8:
            return loss
        return loss + nn.functional.cross_entropy(self.head(x), y)


class Anchored(Plainest):
    """A penalty by the model at the round's start, which a hook stores."""

    def on_train_epoch_start(self):
        self.anchor = [parameter.detach().clone() for parameter in self.parameters()]

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        for parameter, anchor in zip(self.parameters(), self.anchor):
            loss = loss + (parameter - anchor).square().sum()
        return loss


class Thawing(Plainest):
    """The first layer is trained from the second round on."""

    def __init__(self):
        super().__init__(MOMENTUM)
        self.net[0].requires_grad_(False)

    def on_train_epoch_start(self):
        self.net[0].requires_grad_(self.current_epoch > 0)


class Scaled(Plainest):
    beta = 1.0

    def training_step(self, batch, batch_idx):
        return self.beta * super().training_step(batch, batch_idx)


def anneal_and_freeze(trainer, module):
    """From the second round on."""
    if trainer.current_epoch:
        module.beta += 0.2
        module.net[0].requires_grad_(False)


CALLBACKS = [Timer(), LambdaCallback(on_train_epoch_start=anneal_and_freeze)]


def make_samples_without_tensors():
    """Data that are no tensors."""
    read = Items(toy_sets()[0].__getitem__, range(130))
    read.targets = toy_sets()[0].tensors[1]
    return FederatedDataModule(read, SizePartitioner([3, 1, 2]), batch_size=8)


MOMENTUM = make_sgd(momentum=0.9, weight_decay=0.01)
DECAY = partial(torch.optim.lr_scheduler.StepLR, step_size=1, gamma=0.3)
#: In double precision: kept apart, the norms of small batches blow rounding up, to 3e-5 in single precision.
NORMS = {
    "make": Plain,
    "data": partial(toy_data, (4, 2, 1)),
    "trainer": {"precision": "64-true"},
    "tolerance": 1e-10,
}
PAIRS = {
    "momentum, local epochs of each client": {
        "make": partial(Plainest, MOMENTUM),
        "local_epochs": {"0": 1, "1": 2, "2": 1, "3": 4, "4": 1},
        "evaluation": ClientEvaluation(keep_trained=True),
    },
    "ShapFed": {
        "aggregator": partial(ShapFedWA, "cssv"),
        "metrics": partial(
            lambda: {"cssv": ClassSpecificShapley(), "ssv": SurrogateFederatedShapley()}
        ),
        "personalizer": partial(ShapFedPersonalizer),
        "sampler": partial(UniformSampler, 3),
        "evaluation": ClientEvaluation(every=2),
    },
    "batch norm": NORMS,
    "batch norm kept": {**NORMS, "share": ["!net.1.*"]},
    "a schedule of rounds and clipped norms": {
        "make": partial(Plainest, scheduler=DECAY),
        "trainer": {"gradient_clip_val": 0.2},
    },
    "clipped values": {"trainer": {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"}},
    "mixed precision": {"trainer": {"precision": "bf16-mixed"}, "tolerance": 5e-3},
    "what transfers draw": {"make": Augmented, "local_epochs": 2},
    "data of any kind": {"data": make_samples_without_tensors},
    "a parameter without a gradient": {"make": Spare},
    "a head that joins for a round": {"make": LateHead},
    "a recurrent head that joins for a round": {"make": partial(LateHead, RecurrentHead)},
    "a head of full batches": {"make": HeadOfFullBatches, "data": partial(toy_data, (12, 12, 12))},
    "layers that thaw": {"make": Thawing},
    "what a hook stores of the model": {"make": Anchored},
    "norms that are not clipped": {"trainer": {"gradient_clip_val": 0}},
    "logs, metrics, a dictionary and the epoch": {"make": Logs},
    "callbacks that act once a round": {"make": Scaled, "trainer": {"callbacks": CALLBACKS}},
    "two clients at once": {"engine": partial(VmapProcess, chunk=2), "rounds": 2},
}


@pytest.mark.by_turn
@pytest.mark.fast_rows("batch norm", "two clients at once")
@pytest.mark.filterwarnings("ignore:.*(tensors stay at their clients|noise).*")
@pytest.mark.parametrize("name", PAIRS)
def test_vmap_equals_the_sequential_engine(tmp_path, name):
    fit_by_both_engines(tmp_path, **PAIRS[name])


class Overflows(Plainest):
    """Of a sample with large numbers, the gradient is infinite."""

    def training_step(self, batch, batch_idx):
        x, y = batch
        return (
            super().training_step(batch, batch_idx)
            + (x[:, 0] / 1e20).exp().mean() * self.net[0].bias.sum()
        )


def make_data_with_broken_client():
    data = toy_data(SIZES)
    data.setup("fit")
    data.division.source.train.tensors[0][data.client_indices(2)[5], 0] = 1e30
    return data


def test_vmap_out_of_memory_names_half_the_number_of_clients(tmp_path, monkeypatch):
    train = RowTraining.train

    def with_little_memory(self, states, batches, *arguments):
        count = len(next(iter(states.values())))
        if count > 2:  # the trial before the first round trains two
            raise RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB")
        return train(self, states, batches, *arguments)

    monkeypatch.setattr(RowTraining, "train", with_little_memory)
    data = toy_data((3, 1, 2, 1, 2))

    with pytest.raises(RuntimeError, match="CUDA out of memory") as failure:
        fit(make_engine_loop("vmap"), tmp_path, Plainest(), data, rounds=1)

    notes = "".join(failure.value.__notes__)
    assert "5 clients were trained at once" in notes
    assert "chunk=3" in notes


@pytest.mark.fast_rows
@pytest.mark.parametrize("chunk", [2, None])
def test_vmap_leaves_out_a_client_that_diverges(tmp_path, chunk):
    with warns("client"):
        _, vmap_loop = fit_by_both_engines(
            tmp_path,
            Overflows,
            make_data_with_broken_client,
            rounds=2,
            engine=partial(VmapProcess, chunk=chunk),
        )

    # Client 2 diverges in both rounds.
    assert vmap_loop.participations.tolist() == [2, 2, 0, 2, 2]


def make_resumable():
    return make_engine_loop(
        partial(VmapProcess, chunk=2),
        aggregator=ShapFedWA("cssv"),
        metrics={"cssv": ClassSpecificShapley(momentum=0.7)},
        personalizer=ShapFedPersonalizer(),
        sampler=UniformSampler(3),
        share=["!net.1.*"],
        evaluation=ClientEvaluation(every=2),
        local_epochs=2,
    )


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*tensors stay at their clients.*")
def test_vmap_resumes_bitwise(tmp_path):
    assert_resumes(make_resumable, tmp_path, Plain, partial(toy_data, (4, 2, 1, 3)))


def test_trial_step_of_vmap_leaves_model_optimizer_and_generators_unchanged(tmp_path, monkeypatch):
    from flsv.vmap import engine

    dry_run_of_rows = engine.dry_run_of_rows
    results_of_tries = []

    def dry_run_and_assert_nothing_changed(trainer, *arguments, **options):
        module = trainer.lightning_module
        model_before = state_vector(module)
        generators_before = str(global_rngs())

        result = dry_run_of_rows(trainer, *arguments, **options)
        results_of_tries.append(result)

        assert torch.equal(state_vector(module), model_before)
        assert str(global_rngs()) == generators_before
        assert not trainer.optimizers[0].state
        assert all(parameter.grad is None for parameter in module.parameters())
        return result

    monkeypatch.setattr(engine, "dry_run_of_rows", dry_run_and_assert_nothing_changed)
    fit(make_engine_loop("vmap"), tmp_path, Plainest(), toy_data(SIZES), 1)

    (found,) = results_of_tries  # one trial
    assert not found.unused_names
