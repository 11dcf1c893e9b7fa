"""Programs whose coalitions would be wrong if they trained at once: what they share differs in each coalition."""

from types import SimpleNamespace
from typing import ClassVar

import pytest
import torch
from retraining.test_at_once import (
    AT_ONCE,
    Classifier,
    fit_with_coalitions,
    is_trained_at_once,
)
from torch import nn
from torch.nn import functional
from torch.utils.data import TensorDataset
from torchmetrics import MeanMetric

from flsv.data import FederatedDataModule
from helpers import make_generator
from helpers.data import CLASSES, FEATURES, draw_around

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
