"""Modules whose state is of an unusual kind; and what their forward gives, which is tried before training."""

import copy
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
from helpers.data import FEATURES, toy_data
from helpers.fits import assert_resumes, fit, state_vector
from helpers.models import Plain, network


class Masked(Plain):
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


class MaskedByHand(Masked):
    """The same without anything infinite in its state."""

    def __init__(self):
        super().__init__()
        del self.frozen
        self.frozen = torch.tensor([0.0, -torch.inf])
        self.register_buffer("mask", self.mask, persistent=False)

    training_step = Plain.training_step


def make_game_loop():
    return FederatedLoop(
        metrics={"sv": PartialFederatedShapley()}, sampler=UniformSampler(2), seed=1
    )


@pytest.mark.slow
def test_buffers_with_infinite_entries_are_kept_bitwise_by_the_average(tmp_path):
    masked = Masked()
    by_hand = MaskedByHand()
    modules = [masked, by_hand]
    loops = [make_game_loop(), make_game_loop()]

    for loop, module in zip(loops, modules):
        fit(loop, tmp_path, module, toy_data(server_val=0.2))

    assert torch.equal(masked.mask, Masked().mask)
    assert torch.equal(masked.frozen, Masked().frozen)
    parameters = masked.net.parameters()
    expected_parameters = by_hand.net.parameters()
    for parameter, expected in zip(parameters, expected_parameters):
        assert torch.equal(parameter, expected)

    values, expected_values = (loop.contributions["sv"] for loop in loops)
    torch.testing.assert_close(values, expected_values, rtol=0, atol=0)
    assert masked.net[0].weight.isfinite().all()


class Observer(Plain):
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


class Grows(Plain):
    def on_train_epoch_end(self):
        if not hasattr(self, "late_layer"):
            self.late_layer = nn.Linear(1, 1)


class Bank(Plain):
    """Its buffer gets its size when a client trains."""

    def __init__(self):
        super().__init__()
        self.register_buffer("bank", torch.empty(0))

    def training_step(self, batch, batch_idx):
        features = batch[0].flatten()
        self.bank = torch.cat([self.bank, features])
        return super().training_step(batch, batch_idx)


class BankOfEpoch(Bank):
    """Its buffer gets its size at the end of a round."""

    training_step = Plain.training_step

    def on_train_epoch_end(self):
        self.bank = torch.ones(4, 2)


class OwnSchedule(torch.optim.lr_scheduler.StepLR):
    """Its state holds what refers to everything by name, as a wrapper does."""

    def state_dict(self):
        return {**super().state_dict(), "wrapped": Wrapper()}


class Wrapper:
    def __getattr__(self, name):
        return getattr(self.wrapped, name)


class WithOwnSchedule(Plain):
    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        return [optimizer], [OwnSchedule(optimizer, 1)]


@pytest.mark.parametrize(
    ("module", "kwargs", "message"),
    [
        (
            WithOwnSchedule,
            {},
            "the state_dict of SGD or OwnSchedule cannot be copied \\(RecursionError\\)",
        ),
        (
            Observer,
            {},
            r"\['largest'\] held infinite values or NaN when the run began, and a client's training changes",
        ),
        (
            make_broken_module,
            {},
            r"the parameters \['net.0.weight'\] hold NaN or infinite values before training starts",
        ),
        (
            Grows,
            {},
            r"have changed since the fit began: \['late_layer.bias', 'late_layer.weight'\] are new",
        ),
        (Bank, {}, r"changes the sizes of .* bank was \[0\] and is"),
        (BankOfEpoch, {}, r"changes the sizes of .* bank was \[0\] and is \[4, 2\]"),
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


def test_buffer_that_gets_its_size_after_the_last_round_is_named(tmp_path):
    with warns(r"bank was \[0\] and is"):
        fit(FederatedLoop(seed=1), tmp_path, BankOfEpoch(), rounds=1)


class FrozenBody(Plain):
    """A trained head on a frozen body, with constants."""

    def __init__(self):
        super().__init__(network(batch_norm=False))
        self.net[0].requires_grad_(False)
        self.register_buffer("mean", torch.linspace(0.1, 0.7, FEATURES))
        self.register_buffer("tenths_of_rounds", torch.zeros(1))

    def forward(self, x):
        return self.net(x - self.mean)

    def training_step(self, batch, batch_idx):
        num_rounds = 1 + self.trainer.current_epoch
        self.tenths_of_rounds.fill_(0.1 * num_rounds)  # the same at all clients
        return super().training_step(batch, batch_idx)


@pytest.mark.parametrize(
    "arguments",
    [
        {"aggregator": FedAdam()},
        {"personalizer": FedAMP()},
    ],
)
def test_state_that_no_client_changes_stays_unchanged(tmp_path, arguments):
    module = FrozenBody()
    initial_state = copy.deepcopy(module.state_dict())
    loop = FederatedLoop(**arguments, sampler=UniformSampler(2), seed=1)

    data = toy_data((4, 1, 2, 3, 3))
    fit(loop, tmp_path, module, data, rounds=3)

    state = module.state_dict()
    for name in ("net.0.weight", "net.0.bias", "mean"):
        assert torch.equal(state[name], initial_state[name]), name
    expected_tenths = torch.full((1,), 0.1 * 3)
    assert torch.equal(module.tenths_of_rounds, expected_tenths)
    assert not torch.equal(state["net.4.weight"], initial_state["net.4.weight"])


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


@pytest.mark.parametrize(
    ("loop", "requester", "squeeze"),
    [
        (EVERY, r"ClientEvaluation\(every=1\)", True),
        ({"metrics": {"mine": LeaveOneOut()}}, r"metric 'mine'", False),
    ],
)
def test_module_with_one_logit_is_refused(tmp_path, loop, requester, squeeze):
    shape = r"\[\d+\]" if squeeze else r"\[\d+, 1\]"
    outputs = rf"torch.float32 {shape} for \d+ samples of 3 classes"
    match = rf"{requester}: the module's forward returns {outputs}, but logits"
    module = OneLogit(squeeze)
    data = toy_data(server_val=0.2)
    with refused(match):
        fit(FederatedLoop(**loop), tmp_path, module, data)


def test_trial_forward_changes_neither_module_nor_generator(tmp_path, monkeypatch):
    """A forward that counts and draws, and a dropout in a layer that is to stay in evaluation mode."""

    class Restless(Plain):
        def __init__(self):
            super().__init__(network(dropout=0.5))
            self.register_buffer("calls", torch.zeros(()))

        def on_train_start(self):
            self.net[1].eval()  # a frozen BatchNorm
            self.modes = [layer.training for layer in self.modules()]
            self.calls_before = float(self.calls)
            self.generator_state = torch.get_rng_state()

        def forward(self, x):
            self.calls += 1
            return self.net(x) + 1e-3 * torch.rand(1)

    runs = []
    for tried in (True, False):
        with monkeypatch.context() as patch:
            if not tried:
                patch.setattr("flsv.engines.scoring.try_forward", lambda *_: None)
            module = Restless()
            torch.manual_seed(5)
            loop = FederatedLoop(**EVERY, seed=1)
            fit(loop, tmp_path, module, toy_data())
            runs.append((module, state_vector(module)))

    (tried, tried_model), (untried, untried_model) = runs
    assert tried.modes == untried.modes
    assert tried.calls_before == untried.calls_before
    assert torch.equal(tried.generator_state, untried.generator_state)
    assert torch.equal(tried_model, untried_model)


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """An ordinary module after a fit."""
    return fit(FederatedLoop(seed=1), tmp_path_factory.mktemp("plain"))


class Thresholded(Plain):
    """Sets a buffer, which is not finite before, in each validation."""

    def __init__(self, initial_threshold):
        super().__init__()
        self.register_buffer("threshold", torch.tensor(initial_threshold))
        self.thresholds_in_training = []

    def on_train_batch_start(self, batch, batch_idx):
        self.thresholds_in_training.append(float(self.threshold))

    def on_validation_epoch_end(self):
        weight = next(self.parameters())
        self.threshold.copy_(weight.detach().max())


@pytest.mark.fast_rows
@pytest.mark.parametrize(
    "threshold",
    [torch.nan, -torch.inf],
)
def test_buffer_that_validation_makes_finite_is_the_validations_at_every_client(
    tmp_path, plain, threshold
):
    module = fit(FederatedLoop(seed=1), tmp_path, Thresholded(threshold))
    weight = next(module.parameters())
    assert module.threshold == weight.max()

    for name, value in plain.state_dict().items():
        assert torch.equal(module.state_dict()[name], value)
    assert torch.tensor(module.thresholds_in_training[-1]).isfinite()


def test_run_resumes_bitwise_with_a_buffer_that_validation_has_made_finite(tmp_path):
    assert_resumes(
        partial(FederatedLoop, seed=1),
        tmp_path,
        partial(Thresholded, -torch.inf),
        toy_data,
    )


def test_sparse_parameters_are_refused_by_name(tmp_path):
    module = Plain()
    module.graph = nn.Parameter(torch.eye(3).to_sparse())
    with refused("'graph' is sparse, nested"):
        fit(FederatedLoop(seed=1), tmp_path, module)


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
    "kind",
    [WithNestedTensor, WithMetaTensor, WithSystemRandom, WithOtherClassifier],
)
def test_attributes_that_have_no_mean_or_no_state_change_nothing(tmp_path, plain, kind):
    module = fit(FederatedLoop(seed=1), tmp_path, kind())
    for name, value in plain.state_dict().items():
        torch.testing.assert_close(module.state_dict()[name], value)
