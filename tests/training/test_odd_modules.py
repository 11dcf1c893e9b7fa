"""Modules whose state is of an unusual kind; and what their forward gives, which is tried before training."""

import copy
import math
import random
from functools import partial

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
from helpers.fits import fit, state_vector
from helpers.models import Plain, network


def fit_seeded(folder, module=None, **options):
    return fit(FederatedLoop(seed=1), folder, module, **options)


class MasksWithInfinity(Plain):
    """Adds -inf to what it must not look at, from buffers and from a frozen parameter."""

    def __init__(self):
        super().__init__()
        self.register_buffer("mask", torch.full((FEATURES, FEATURES), -torch.inf).triu(1))
        self.frozen = nn.Parameter(torch.tensor([0.0, -torch.inf]), requires_grad=False)

    def forward(self, x):
        features = x[:, :, None]
        scores = features * x[:, None, :] + self.mask
        attention = scores.softmax(-1)
        attended = (attention @ features).squeeze(-1)
        zero = self.frozen.exp().sum() - 1
        return self.net(attended + zero)

    def training_step(self, batch, batch_idx):
        return super().training_step(batch, batch_idx).reshape(1)  # a loss of one element is a loss


@pytest.mark.slow
def test_buffers_with_infinite_entries_are_kept_bitwise_by_the_average(tmp_path):
    module = MasksWithInfinity()
    loop = FederatedLoop(
        metrics={"sv": PartialFederatedShapley()}, sampler=UniformSampler(2), seed=1
    )

    fit(loop, tmp_path, module, toy_data(server_val=0.2))

    initial_module = MasksWithInfinity()
    assert torch.equal(module.mask, initial_module.mask)
    assert torch.equal(module.frozen, initial_module.frozen)
    assert state_vector(module.net).isfinite().all()
    assert loop.contributions["sv"].isfinite().any()


class KeepsLargestInput(Plain):
    """Its buffer starts at -inf and does not stay there."""

    def __init__(self):
        super().__init__()
        self.register_buffer("largest", torch.tensor([-torch.inf, 0.0]))

    def training_step(self, batch, batch_idx):
        x, _ = batch
        self.largest[0] = torch.maximum(self.largest[0], x.max())
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
        x, _ = batch
        self.bank = torch.cat([self.bank, x.flatten()])
        return super().training_step(batch, batch_idx)


class BufferGrowsAfterRound(BufferGrowsInTraining):
    """Its buffer gets its size at the end of a round."""

    training_step = Plain.training_step

    def on_train_epoch_end(self):
        self.bank = torch.ones(4, 2)


class FirstFeatures(torch.nn.Module):
    """A fixed rule, to which trained models are compared."""

    def forward(self, x):
        return x[:, :CLASSES]


class WithoutParameters(Plain):
    def __init__(self):
        super().__init__(FirstFeatures())

    def configure_optimizers(self):
        return None


class WeighsClasses(Plain):
    """Gives its loss a weight for each class."""

    def setup(self, stage):
        counts = self.trainer.datamodule.class_counts.sum(0)
        self.criterion = nn.CrossEntropyLoss(weight=1 / counts)


class WeighsClassesLate(WeighsClasses):
    def setup(self, stage):
        pass

    def on_fit_start(self):
        super().setup("fit")


class MakesLossInStep(Plain):
    def training_step(self, batch, batch_idx):
        x, y = batch
        self.criterion = nn.CrossEntropyLoss(weight=torch.ones(CLASSES))
        return self.criterion(self(x), y)


class ForwardsAttributes:
    """Has no attribute of its own, and looks even for ``wrapped`` in what it wraps, without end."""

    def __getattr__(self, name):
        return getattr(self.wrapped, name)


class ScheduleThatCannotBeCopied(torch.optim.lr_scheduler.StepLR):
    def state_dict(self):
        return {**super().state_dict(), "wrapped": ForwardsAttributes()}


def make_module_with_such_a_schedule():
    return Plain(scheduler=partial(ScheduleThatCannotBeCopied, step_size=1))


@pytest.mark.parametrize(
    ("make_module", "message"),
    [
        (
            make_module_with_such_a_schedule,
            r"the state_dict of SGD or ScheduleThatCannotBeCopied cannot be copied \(RecursionError\)",
        ),
        (
            KeepsLargestInput,
            r"\['largest'\] held infinite values or NaN when the run began, and a client's training changes",
        ),
        (
            make_broken_module,
            r"the parameters \['net.0.weight'\] hold NaN or infinite values before training starts",
        ),
        (make_sparse_module, "'graph' is sparse, nested"),
        (
            AddsLayerAfterRound,
            r"\['late_layer.bias', 'late_layer.weight'\] are new.* before FederatedLoop",
        ),
        (WithoutParameters, "WithoutParameters has no parameters, so there is nothing to train"),
        (WeighsClassesLate, r"\['criterion.weight'\] are new.* or in its setup"),
        (MakesLossInStep, r"\['criterion.weight'\] are new(?!.*on_fit_start).* or in its setup"),
        (BufferGrowsInTraining, r"changes the sizes of .* bank was \[0\] and is"),
        (BufferGrowsAfterRound, r"changes the sizes of .* bank was \[0\] and is \[4, 2\]"),
    ],
)
def test_module_or_optimizer_state_that_cannot_be_averaged_or_copied_is_refused(
    tmp_path, make_module, message
):
    with refused(message):
        fit_seeded(tmp_path, make_module())


def test_pruning_callback_is_refused(tmp_path):
    pruning = ModelPruning("l1_unstructured", amount=0.5)
    with refused("ModelPruning changes the module's para"):
        fit_seeded(tmp_path, callbacks=[pruning])


def test_class_weights_of_a_loss_that_setup_makes_are_sent_with_the_model(tmp_path):
    loop = FederatedLoop(seed=1)

    fit(loop, tmp_path, WeighsClasses())

    assert "criterion.weight" in loop.space.names


def test_buffer_that_grows_after_the_last_round_is_named(tmp_path):
    with warns(r"bank was \[0\] and is"):
        fit_seeded(tmp_path, BufferGrowsAfterRound(), rounds=1)


#: Averages round it.
VALUE_OF_CLIENTS = 0.3


class FrozenBody(Plain):
    """A trained head on a frozen body, with a constant buffer, and one that all clients set to the same value."""

    def __init__(self):
        super().__init__(network(batch_norm=False))
        self.net[0].requires_grad_(False)
        self.register_buffer("mean", torch.linspace(0.1, 0.7, FEATURES))
        self.register_buffer("set_by_clients", torch.zeros(1))

    def forward(self, x):
        return self.net(x - self.mean)

    def training_step(self, batch, batch_idx):
        self.set_by_clients.fill_(VALUE_OF_CLIENTS)
        return super().training_step(batch, batch_idx)


@pytest.mark.parametrize("strategy", [{"aggregator": FedAdam()}, {"personalizer": FedAMP()}])
def test_state_that_clients_do_not_train_is_theirs_bitwise(tmp_path, strategy):
    module = FrozenBody()
    initial_state = copy.deepcopy(module.state_dict())
    loop = FederatedLoop(**strategy, sampler=UniformSampler(2), seed=1)

    fit(loop, tmp_path, module, toy_data((4, 1, 2, 3, 3)))

    state = module.state_dict()
    for frozen_name in ("net.0.weight", "net.0.bias", "mean"):
        assert torch.equal(state[frozen_name], initial_state[frozen_name]), frozen_name
    assert torch.equal(module.set_by_clients, torch.tensor([VALUE_OF_CLIENTS]))
    assert not torch.equal(state["net.4.weight"], initial_state["net.4.weight"])


EVERY = {"evaluation": ClientEvaluation(every=1)}
LEAVE_ONE_OUT = {"metrics": {"mine": LeaveOneOut()}}


ONE_NUMBER_PER_SAMPLE = nn.Sequential(nn.Linear(FEATURES, 1), nn.Flatten(0))


@pytest.mark.parametrize(
    ("options", "requester", "net", "shape"),
    [
        (EVERY, r"ClientEvaluation\(every=1\)", ONE_NUMBER_PER_SAMPLE, r"\[\d+\]"),
        (LEAVE_ONE_OUT, r"metric 'mine'", nn.Linear(FEATURES, 1), r"\[\d+, 1\]"),
    ],
)
def test_module_with_one_logit_is_refused(tmp_path, options, requester, net, shape):
    outputs = rf"torch.float32 {shape} for \d+ samples of 3 classes"
    with refused(rf"{requester}: the module's forward returns {outputs}, but logits"):
        fit(FederatedLoop(**options), tmp_path, Plain(net), toy_data(server_val=0.2))


@pytest.fixture(scope="module")
def plain_state(tmp_path_factory):
    """The state of an ordinary module after a fit."""
    module = fit_seeded(tmp_path_factory.mktemp("plain"))
    return module.state_dict()


class SetsBufferInValidation(Plain):
    """Sets a buffer, which is not finite before, in each validation."""

    def __init__(self):
        super().__init__()
        self.register_buffer("threshold", torch.tensor(torch.nan))
        self.thresholds_in_training = []

    def on_train_batch_start(self, batch, batch_idx):
        self.thresholds_in_training.append(float(self.threshold))

    def on_validation_epoch_end(self):
        self.threshold.copy_(self.net[0].weight.detach().max())


def test_buffer_that_validation_sets_is_received_by_every_client(tmp_path, plain_state):
    module = fit_seeded(tmp_path, SetsBufferInValidation())

    assert module.threshold == module.net[0].weight.max()
    assert math.isfinite(module.thresholds_in_training[-1])
    state = module.state_dict()
    for name, value in plain_state.items():
        assert torch.equal(state[name], value), name


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


@pytest.mark.by_turn
@pytest.mark.fast_rows
@pytest.mark.parametrize(
    "kind", [WithNestedTensor, WithMetaTensor, WithSystemRandom, WithOtherClassifier]
)
def test_attributes_without_a_mean_or_a_state_change_no_value(tmp_path, plain_state, kind):
    module = fit_seeded(tmp_path, kind())

    torch.testing.assert_close(module.state_dict(), plain_state)
