"""Modules whose state is of an unusual kind; and what their forward gives, which is tried before training."""

import copy
import random

import pytest
import torch
from lightning.pytorch.callbacks import ModelPruning
from torch import nn

from flsv import ClientEvaluation
from flsv.aggregation import FedAdam
from flsv.federation import FederatedLoop
from flsv.metrics import LeaveOneOut, PartialFederatedShapley
from flsv.personalization import FedAMP
from flsv.sampling import UniformSampler
from helpers import refused, warns
from helpers.data import CLASSES, FEATURES, toy_data
from helpers.fits import fit
from helpers.models import Plain, network


class MasksWithInfinity(Plain):
    """Adds -inf to what it must not look at, from buffers and from a frozen parameter."""

    def __init__(self):
        super().__init__()
        self.register_buffer("mask", torch.full((FEATURES, FEATURES), -torch.inf).triu(1))
        self.frozen = nn.Parameter(torch.tensor([0.0, -torch.inf]), requires_grad=False)

    def forward(self, x):
        attention = (x[:, :, None] * x[:, None, :] + self.mask).softmax(-1)
        return self.net((attention @ x[:, :, None])[..., 0] + self.frozen.exp().sum() - 1)

    def training_step(self, batch, batch_idx):
        return super().training_step(batch, batch_idx).reshape(1)  # a loss of one element is a loss


@pytest.mark.slow
def test_buffers_with_infinite_entries_are_kept_bitwise_by_the_average(tmp_path):
    masked = MasksWithInfinity()
    metrics = {"sv": PartialFederatedShapley()}
    loop = FederatedLoop(metrics=metrics, sampler=UniformSampler(2), seed=1)

    fit(loop, tmp_path, masked, toy_data(server_val=0.2))

    assert torch.equal(masked.mask, MasksWithInfinity().mask)
    assert torch.equal(masked.frozen, MasksWithInfinity().frozen)
    for parameter in masked.net.parameters():
        assert parameter.isfinite().all()
    assert loop.contributions["sv"].isfinite().any()


class KeepsLargestInput(Plain):
    """Its buffer starts at -inf and does not stay there."""

    def __init__(self):
        super().__init__()
        self.register_buffer("largest", torch.tensor([-torch.inf, 0.0]))

    def training_step(self, batch, batch_idx):
        self.largest[0] = torch.maximum(self.largest[0], batch[0].max())
        return super().training_step(batch, batch_idx)


def make_broken_module():
    module = Plain()
    with torch.no_grad():
        module.net[0].weight[0, 0] = torch.nan
    return module


def make_sparse_module():
    module = Plain()
    module.graph = nn.Parameter(torch.eye(3).to_sparse())
    return module


class AddsLayerAfterRound(Plain):
    def on_train_epoch_end(self):
        if not hasattr(self, "late_layer"):
            self.late_layer = nn.Linear(1, 1)


class BufferGrowsInTraining(Plain):
    """Its buffer gets its size when a client trains."""

    def __init__(self):
        super().__init__()
        self.register_buffer("bank", torch.empty(0))

    def training_step(self, batch, batch_idx):
        features = batch[0].flatten()
        self.bank = torch.cat([self.bank, features])
        return super().training_step(batch, batch_idx)


class BufferGrowsAfterRound(BufferGrowsInTraining):
    """Its buffer gets its size at the end of a round."""

    training_step = Plain.training_step

    def on_train_epoch_end(self):
        self.bank = torch.ones(4, 2)


class ScheduleOfOwnClass(torch.optim.lr_scheduler.StepLR):
    """Its state holds what refers to everything by name, as a wrapper does."""

    def state_dict(self):
        return {**super().state_dict(), "wrapped": ForwardsAttributes()}


class FirstFeatures(torch.nn.Module):
    """A fixed rule, to which trained models are compared."""

    def forward(self, x):
        return x[:, :CLASSES]


class WithoutParameters(Plain):
    def __init__(self):
        super().__init__()
        self.net = FirstFeatures()

    def configure_optimizers(self):
        return None


class WeighsClassesLate(Plain):
    """Gives its loss a weight for each class, which it counts in ``on_fit_start``."""

    def on_fit_start(self):
        counts = self.trainer.datamodule.class_counts.sum(0)
        self.criterion = nn.CrossEntropyLoss(weight=1 / counts)


class WeighsClasses(Plain):
    def setup(self, stage):
        counts = self.trainer.datamodule.class_counts.sum(0)
        self.criterion = nn.CrossEntropyLoss(weight=1 / counts)


class ForwardsAttributes:
    def __getattr__(self, name):
        return getattr(self.wrapped, name)


class WithOwnSchedule(Plain):
    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        return [optimizer], [ScheduleOfOwnClass(optimizer, 1)]


@pytest.mark.parametrize(
    ("module", "kwargs", "message"),
    [
        (
            WithOwnSchedule,
            {},
            "the state_dict of SGD or ScheduleOfOwnClass cannot be copied \\(RecursionError\\)",
        ),
        (
            KeepsLargestInput,
            {},
            r"\['largest'\] held infinite values or NaN when the run began, and a client's training changes",
        ),
        (
            make_broken_module,
            {},
            r"the parameters \['net.0.weight'\] hold NaN or infinite values before training starts",
        ),
        (make_sparse_module, {}, "'graph' is sparse, nested"),
        (
            AddsLayerAfterRound,
            {},
            r"\['late_layer.bias', 'late_layer.weight'\] are new.* before FederatedLoop",
        ),
        (
            WithoutParameters,
            {},
            "WithoutParameters has no parameters, so there is nothing to train",
        ),
        (WeighsClassesLate, {}, r"\['criterion.weight'\] are new.* in its setup instead"),
        (BufferGrowsInTraining, {}, r"changes the sizes of .* bank was \[0\] and is"),
        (BufferGrowsAfterRound, {}, r"changes the sizes of .* bank was \[0\] and is \[4, 2\]"),
        (
            Plain,
            {"callbacks": [ModelPruning("l1_unstructured", amount=0.5)]},
            "ModelPruning changes the module's para",
        ),
    ],
)
def test_module_or_optimizer_state_that_cannot_be_averaged_or_copied_is_refused(
    tmp_path, module, kwargs, message
):
    with refused(message):
        fit(FederatedLoop(seed=1), tmp_path, module(), **kwargs)


def test_class_weights_of_a_loss_that_setup_makes_are_sent_with_the_model(tmp_path):
    loop = FederatedLoop(seed=1)

    fit(loop, tmp_path, WeighsClasses())

    assert "criterion.weight" in loop.space.names


def test_buffer_that_grows_after_the_last_round_is_named(tmp_path):
    with warns(r"bank was \[0\] and is"):
        fit(FederatedLoop(seed=1), tmp_path, BufferGrowsAfterRound(), rounds=1)


class FrozenBody(Plain):
    """A trained head on a frozen body, with a constant buffer, and one that all clients set to the same value."""

    def __init__(self):
        super().__init__(network(batch_norm=False))
        self.net[0].requires_grad_(False)
        self.register_buffer("mean", torch.linspace(0.1, 0.7, FEATURES))
        self.register_buffer("tenths_of_rounds", torch.zeros(1))

    def forward(self, x):
        return self.net(x - self.mean)

    def training_step(self, batch, batch_idx):
        num_rounds = 1 + self.trainer.current_epoch
        self.tenths_of_rounds.fill_(0.1 * num_rounds)
        return super().training_step(batch, batch_idx)


@pytest.mark.parametrize("strategy", [{"aggregator": FedAdam()}, {"personalizer": FedAMP()}])
def test_state_that_clients_do_not_train_is_theirs_bitwise(tmp_path, strategy):
    module = FrozenBody()
    initial_state = copy.deepcopy(module.state_dict())
    loop = FederatedLoop(**strategy, sampler=UniformSampler(2), seed=1)

    fit(loop, tmp_path, module, toy_data((4, 1, 2, 3, 3)), rounds=3)

    state = module.state_dict()
    for unchanged_name in ("net.0.weight", "net.0.bias", "mean"):
        assert torch.equal(state[unchanged_name], initial_state[unchanged_name]), unchanged_name
    tenths_of_3_rounds = torch.tensor([0.1 * 3])
    assert torch.equal(module.tenths_of_rounds, tenths_of_3_rounds)
    trained_name = "net.4.weight"
    assert not torch.equal(state[trained_name], initial_state[trained_name])


class OneLogit(Plain):
    """A binary classifier as many are written: one logit, [B] or [B, 1]."""

    def __init__(self, squeeze):
        super().__init__(nn.Linear(FEATURES, 1))
        self.squeeze = squeeze

    def forward(self, x):
        return self.net(x).squeeze(1) if self.squeeze else self.net(x)

    def training_step(self, batch, batch_idx):
        raise AssertionError("training had started")


EVERY = {"evaluation": ClientEvaluation(every=1)}
LEAVE_ONE_OUT = {"metrics": {"mine": LeaveOneOut()}}


@pytest.mark.parametrize(
    ("options", "requester", "module", "shape"),
    [
        (EVERY, r"ClientEvaluation\(every=1\)", OneLogit(squeeze=True), r"\[\d+\]"),
        (LEAVE_ONE_OUT, r"metric 'mine'", OneLogit(squeeze=False), r"\[\d+, 1\]"),
    ],
)
def test_module_with_one_logit_is_refused(tmp_path, options, requester, module, shape):
    outputs = rf"torch.float32 {shape} for \d+ samples of 3 classes"
    data = toy_data(server_val=0.2)
    with refused(rf"{requester}: the module's forward returns {outputs}, but logits"):
        fit(FederatedLoop(**options), tmp_path, module, data)


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """An ordinary module after a fit."""
    return fit(FederatedLoop(seed=1), tmp_path_factory.mktemp("plain"))


class SetsBufferInValidation(Plain):
    """Sets a buffer, which is not finite before, in each validation."""

    def __init__(self):
        super().__init__()
        self.register_buffer("threshold", torch.tensor(torch.nan))
        self.thresholds_in_training = []

    def on_train_batch_start(self, batch, batch_idx):
        self.thresholds_in_training.append(float(self.threshold))

    def on_validation_epoch_end(self):
        weight = next(self.parameters())
        self.threshold.copy_(weight.detach().max())


def test_buffer_that_validation_sets_is_received_by_every_client(tmp_path, plain):
    module = fit(FederatedLoop(seed=1), tmp_path, SetsBufferInValidation())
    weight = next(module.parameters())
    assert module.threshold == weight.max()

    for name, value in plain.state_dict().items():
        assert torch.equal(module.state_dict()[name], value)
    assert torch.tensor(module.thresholds_in_training[-1]).isfinite()


class WithNestedTensor(Plain):
    def __init__(self):
        super().__init__()
        tensors = [torch.ones(2), torch.ones(3)]
        self.parts = torch.nested.nested_tensor(tensors)


class WithMetaTensor(Plain):
    def __init__(self):
        super().__init__()
        self.shape_only = torch.ones(2, device="meta")


class WithSystemRandom(Plain):
    def __init__(self):
        super().__init__()
        self.entropy = random.SystemRandom()


class WithOtherClassifier(Plain):
    """Has a method of timm's name, of another meaning."""

    def get_classifier(self, name):
        return getattr(self, name)


@pytest.mark.fast_rows
@pytest.mark.parametrize(
    "kind", [WithNestedTensor, WithMetaTensor, WithSystemRandom, WithOtherClassifier]
)
def test_attributes_without_a_mean_or_a_state_change_no_value(tmp_path, plain, kind):
    module = fit(FederatedLoop(seed=1), tmp_path, kind())
    for name, value in plain.state_dict().items():
        torch.testing.assert_close(module.state_dict()[name], value)
