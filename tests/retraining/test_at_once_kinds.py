"""Programs whose coalitions would be wrong if they trained at once: what they share differs in each coalition."""

from types import SimpleNamespace
from typing import ClassVar

import pytest
import torch
from retraining.test_at_once import (
    AT_ONCE,
    Classifier,
    UsersData,
    WithZeroGradients,
    fit_with_coalitions,
    is_trained_at_once,
)
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import CatMetric, MeanMetric
from torchmetrics.classification import MulticlassAccuracy

from flsv.data import FederatedDataModule, SizePartitioner
from helpers import make_generator
from helpers.data import CLASSES, FEATURES, draw_around, toy_data, toy_sets

pytestmark = pytest.mark.slow


# ---- what client 1 has not seen: class 2. The witnesses, clients 0 and 2, have seen all classes, as the run has


def data_without_a_class():
    generator = make_generator(0)
    centers = 2 * torch.randn(CLASSES, FEATURES, generator=generator)
    sets = [draw_around(centers, size, generator) for size in (36, 27, 12, 20)]
    inputs, labels = sets[1].tensors
    sets[1] = TensorDataset(inputs[labels < 2], labels[labels < 2])
    return FederatedDataModule(clients=sets[:3], val=sets[3], batch_size=8)


class MasksUnseen(Classifier):
    """Lowers the scores of the classes that it has not seen."""

    def __init__(self):
        super().__init__()
        self.make_memory()

    def make_memory(self):
        pass

    def training_step(self, batch, batch_idx):
        inputs, labels = batch
        seen = self.see(labels.tolist())
        penalties = torch.tensor([0.0 if label in seen else -5.0 for label in range(CLASSES)])
        return functional.cross_entropy(self(inputs) + penalties, labels)


SEEN = set()


class SeenInGlobal(MasksUnseen):
    def see(self, labels):
        SEEN.update(labels)
        return SEEN


class SeenInClass(MasksUnseen):
    seen: ClassVar[set[int]] = set()

    def see(self, labels):
        self.seen.update(labels)
        return self.seen


class SeenInNamespace(MasksUnseen):
    def make_memory(self):
        self.namespace = SimpleNamespace(seen=set())

    def see(self, labels):
        self.namespace.seen.update(labels)
        return self.namespace.seen


class SeenInClosure(MasksUnseen):
    def make_memory(self):
        seen = set()

        def see(labels):
            seen.update(labels)
            return seen

        self.see = see


class SeenInMetric(MasksUnseen):
    def make_memory(self):
        self.metric = MeanMetric()
        self.metric.seen = set()

    def see(self, labels):
        self.metric.seen.update(labels)
        return self.metric.seen


class SeenInDataModule(MasksUnseen):
    def see(self, labels):
        data = self.trainer.datamodule
        data.seen = getattr(data, "seen", set()) | set(labels)
        return data.seen


class SeenInLayerOfList(MasksUnseen):
    def make_memory(self):
        self.unregistered = [nn.Identity()]
        self.unregistered[0].seen = set()

    def see(self, labels):
        self.unregistered[0].seen.update(labels)
        return self.unregistered[0].seen


MEMORIES = [
    SeenInGlobal,
    SeenInClass,
    SeenInNamespace,
    SeenInClosure,
    SeenInMetric,
    SeenInDataModule,
    SeenInLayerOfList,
]


@pytest.mark.by_turn
@pytest.mark.parametrize("make_module", MEMORIES)
@pytest.mark.filterwarnings("ignore:.*training changes")
@pytest.mark.filterwarnings("ignore:.*clients train otherwise")
def test_coalitions_that_have_not_seen_what_others_have_train_one_by_one(
    make_module, monkeypatch, caplog, tmp_path
):
    result = fit_with_coalitions(
        monkeypatch, caplog, tmp_path, AT_ONCE, make_module, data=data_without_a_class
    )
    assert not is_trained_at_once(result)
    assert "at once: training changes" in " ".join(result.lines), result.lines


# ---- the line that says why


class SwallowsRefusal(Classifier):
    weight = 1.0

    def on_train_epoch_start(self):
        try:
            self.weight = 1 / (1 + float(self.network[0].weight.norm()))
        except Exception:
            self.weight = 1.0

    def training_step(self, batch, batch_idx):
        return self.weight * super().training_step(batch, batch_idx)


class LoadsWeights(Classifier):
    def on_train_epoch_start(self):
        if self.current_epoch == 2:
            self.load_state_dict({name: tensor * 0.9 for name, tensor in self.first.items()})

    def on_train_start(self):
        self.first = {name: tensor.clone() for name, tensor in self.state_dict().items()}


class ReadsRateInHook(Classifier):
    def on_train_epoch_end(self):
        self.rate = self.optimizers().param_groups[0]["lr"]


REASONS = {
    SwallowsRefusal: "a hook reads 'network.0.weight' of the module, which each coalition has for itself.",
    LoadsWeights: "a hook reads 'network.0.weight' of the module, which each coalition has for itself.",
    ReadsRateInHook: "a hook reads trainer.strategy, which each coalition has for itself.",
}


@pytest.mark.parametrize("make_module", REASONS)
def test_one_line_says_what_a_hook_reads(make_module, monkeypatch, caplog, tmp_path):
    result = fit_with_coalitions(monkeypatch, caplog, tmp_path, AT_ONCE, make_module)
    assert not is_trained_at_once(result)
    assert any(line.endswith(REASONS[make_module]) for line in result.lines), result.lines


# ---- what only some coalitions come to, which neither all clients nor a client alone do


def weigh_classes(labels):
    """Return other weights if a class is rare: of no client alone and not of all, but of clients 0 and 1."""
    counts = torch.bincount(labels, minlength=CLASSES).double()
    return counts.sum() / counts.clamp_min(1) if counts.min() < 0.2 * counts.max() else None


class WeighsByLabels(Classifier):
    weights = None

    def labels(self):
        return torch.cat([labels for _, labels in self.trainer.datamodule.train_dataloader()])

    def weigh(self):
        self.weights = weigh_classes(self.labels())

    def training_step(self, batch, batch_idx):
        inputs, labels = batch
        weights = None if self.weights is None else self.weights.float()
        return functional.cross_entropy(self(inputs), labels, weight=weights)


class WeighsInSetup(WeighsByLabels):
    def setup(self, stage):
        self.weigh()


class WeighsAtFitStart(WeighsByLabels):
    def on_fit_start(self):
        self.weigh()


class WeighsAtTrainStart(WeighsByLabels):
    def on_train_start(self):
        self.weigh()


class WeighsByCounts(WeighsByLabels):
    def on_fit_start(self):
        counts = self.trainer.datamodule.class_counts.sum(0)
        self.weights = weigh_classes(torch.arange(CLASSES).repeat_interleave(counts))


class WeighsByDataSet(WeighsByLabels):
    def labels(self):
        return self.trainer.datamodule.samples.tensors[1]

    def setup(self, stage):
        self.weigh()


class RateBySamples(Classifier):
    def configure_optimizers(self):
        num_samples = len(self.trainer.datamodule.train_dataloader().dataset)
        return torch.optim.SGD(self.parameters(), lr=1 / num_samples)


class OwnData(UsersData):
    def setup(self, stage):
        self.samples = toy_sets()[0]

    def train_dataloader(self):
        return DataLoader(self.samples, batch_size=8, shuffle=True)


def own_data():
    return FederatedDataModule(OwnData(), SizePartitioner([4, 1, 2]))


class KeepsAccuracy(Classifier):
    def __init__(self):
        super().__init__()
        self.accuracy = MulticlassAccuracy(CLASSES, average="micro")

    def training_step(self, batch, batch_idx):
        inputs, labels = batch
        outputs = self(inputs)
        self.log("train_accuracy", self.accuracy(outputs, labels), prog_bar=True)
        return functional.cross_entropy(outputs, labels)


class SlowsIfAccurate(KeepsAccuracy):
    def on_train_epoch_end(self):
        if self.accuracy.compute() > 0.9:
            self.network[0].requires_grad_(False)
        self.accuracy.reset()


class SlowsByState(KeepsAccuracy):
    def on_train_epoch_end(self):
        if self.accuracy.tp > 10:
            self.network[0].requires_grad_(False)
        self.accuracy.reset()


class SlowsByList(Classifier):
    def __init__(self):
        super().__init__()
        self.losses = CatMetric()

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        self.losses.update(loss.detach())
        return loss

    def on_train_epoch_end(self):
        if len(self.losses.value) and self.losses.value[0] < 0.5:
            self.network[0].requires_grad_(False)
        self.losses.reset()


class SlowsAndCatches(SlowsIfAccurate):
    def on_train_epoch_end(self):
        try:
            super().on_train_epoch_end()
        except Exception:
            self.accuracy.reset()


class PrintsAccuracy(KeepsAccuracy):
    def on_train_epoch_end(self):
        print(f"accuracy {self.accuracy.compute():.3f}")
        self.log("accuracy", self.accuracy.compute())
        self.accuracy.reset()


READS_OF_MEMBERS = {
    WeighsInSetup: toy_data,
    WeighsAtFitStart: toy_data,
    WeighsAtTrainStart: toy_data,
    WeighsByCounts: toy_data,
    WeighsByDataSet: own_data,
    RateBySamples: toy_data,
}
READS_OF_METRICS = [SlowsIfAccurate, SlowsByState, SlowsByList, SlowsAndCatches]


@pytest.mark.by_turn
@pytest.mark.parametrize("make_module", [*READS_OF_MEMBERS, *READS_OF_METRICS])
@pytest.mark.filterwarnings("ignore:.*clients train otherwise")
def test_what_a_hook_may_find_out_of_a_coalition_is_not_trained_at_once(
    make_module, monkeypatch, caplog, tmp_path
):
    data = READS_OF_MEMBERS.get(make_module)
    result = fit_with_coalitions(
        monkeypatch, caplog, tmp_path, AT_ONCE, make_module, data=data, rounds=2
    )
    assert not is_trained_at_once(result)
    reason = "a hook reads the clients' data" if data else "a hook reads "
    assert any(reason in line for line in result.lines), result.lines


def test_a_metric_that_is_only_written_trains_at_once(monkeypatch, caplog, tmp_path):
    result = fit_with_coalitions(monkeypatch, caplog, tmp_path, AT_ONCE, PrintsAccuracy, rounds=2)
    assert is_trained_at_once(result), result.lines


# ---- differences that are no rounding, though training enlarges rounding errors


class OtherLossInRows(WithZeroGradients):
    """From round 3 on, rows have a slightly other loss."""

    def training_step(self, batch, batch_idx):
        inputs, labels = batch
        is_in_row = torch._C._functorch.maybe_current_level() is not None
        smoothing = 0.01 if is_in_row and self.current_epoch >= 2 else 0.0
        return functional.cross_entropy(self(inputs), labels, label_smoothing=smoothing)


class OtherScoresOfRows(WithZeroGradients):
    """After the training of rows, whose hooks are guarded, the same weights have other outputs."""

    shift = 0.0

    def on_train_end(self):
        if "on_train_end" in vars(self):
            self.shift = 0.1

    def forward(self, inputs):
        return super().forward(inputs) + self.shift * inputs[:, :1]


@pytest.mark.parametrize("make_module", [OtherLossInRows, OtherScoresOfRows])
def test_a_small_difference_is_no_rounding(make_module, monkeypatch, caplog, tmp_path):
    result = fit_with_coalitions(monkeypatch, caplog, tmp_path, AT_ONCE, make_module)
    assert not is_trained_at_once(result)
    assert any("this is no rounding error" in line for line in result.lines), result.lines
