"""Optimizer steps, whoever takes them and however optimizers are nested: as a loop by hand with an optimizer of its own
for each client and round."""

from functools import partial

import pytest
import torch
from timm.optim import Lookahead
from torch import nn

from flsv.federation import FederatedLoop
from flsv.training.algorithms import Ditto, FedProx
from flsv.training.swapped_optimizer import SwappedOptimizer
from helpers import refused
from helpers.data import FEATURES, toy_data
from helpers.fits import KeepsRounds, assert_resumes, fit, state_vector
from helpers.loops_by_hand import LOCAL_EPOCHS, SEED, train_with_own_optimizers
from helpers.models import Plainest, make_sgd, sgd

ROUNDS = 3


# ---- optimizers that hold an optimizer


class SAM(torch.optim.Optimizer):
    """The public one, whose first and second step a module may also take itself."""

    def __init__(self, parameters, base, rho=0.05):
        super().__init__(parameters, {"rho": rho})
        self.base_optimizer = base(self.param_groups)
        self.param_groups = self.base_optimizer.param_groups

    @torch.no_grad()
    def first_step(self):
        """Climb by rho along the gradient."""
        (group,) = self.param_groups
        norms = [parameter.grad.norm() for parameter in group["params"]]
        scale = group["rho"] / torch.stack(norms).norm()
        for parameter in group["params"]:
            self.state[parameter]["old_p"] = parameter.clone()
            parameter.add_(scale * parameter.grad)
        self.zero_grad()

    @torch.no_grad()
    def second_step(self):
        """Step from where the climb began, by the gradient of its end."""
        for parameter, entries in self.state.items():
            parameter.data = entries["old_p"]
        self.base_optimizer.step()
        self.zero_grad()

    def step(self, closure):
        with torch.enable_grad():
            loss = closure()
        self.first_step()

        with torch.enable_grad():
            closure()
        self.second_step()
        return loss


class AveragesSteps:
    """No torch optimizer: counts its steps, and sets the weights to a moving average of them every second step."""

    def __init__(self, inner):
        self.inner = inner
        self.defaults = inner.defaults
        self.num_steps = 0
        self.average = None

    @property
    def param_groups(self):
        return self.inner.param_groups

    @property
    def state(self):
        return self.inner.state

    def state_dict(self):
        return self.inner.state_dict()

    def load_state_dict(self, state_dict):
        self.inner.load_state_dict(state_dict)

    def zero_grad(self):
        self.inner.zero_grad()

    @torch.no_grad()
    def step(self, closure=None):
        loss = self.inner.step(closure)
        parameters = self.param_groups[0]["params"]
        if self.average is None:
            self.average = [parameter.clone() for parameter in parameters]

        self.num_steps += 1
        for average, parameter in zip(self.average, parameters):
            average.lerp_(parameter, weight=0.3)
            if self.num_steps % 2 == 0:
                parameter.copy_(average)

        return loss


NESTED = {
    "sam": lambda parameters: SAM(parameters, sgd),
    "lookahead": lambda parameters: Lookahead(sgd(parameters), k=2),
    "own wrapper": lambda parameters: AveragesSteps(sgd(parameters)),
    "lookahead of sam": lambda parameters: Lookahead(SAM(parameters, sgd), k=3),
}


OPTIMIZERS = {"plain": sgd, **NESTED}


# ---- modules, by who takes the step


class StepsOptimizerItself(Plainest):
    """Leaves the step of a batch to subclasses."""

    def __init__(self, make_optimizer):
        super().__init__(make_optimizer)
        self.automatic_optimization = False

    def compute_gradients(self, optimizer, batch):
        """Return the loss of the batch. As a closure, an optimizer may call it again."""
        optimizer.zero_grad()
        loss = super().training_step(batch, 0)
        self.manual_backward(loss)
        return loss


class StepsWithoutClosure(StepsOptimizerItself):
    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers(use_pl_optimizer=False)
        self.compute_gradients(optimizer, batch)
        optimizer.step()


class StepsWithClosure(StepsOptimizerItself):
    def training_step(self, batch, batch_idx):
        (optimizer,) = self.trainer.optimizers
        optimizer.step(partial(self.compute_gradients, optimizer, batch))


class TakesBothStepsOfSAM(StepsOptimizerItself):
    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers(use_pl_optimizer=False)
        self.compute_gradients(optimizer, batch)
        optimizer.first_step()
        self.compute_gradients(optimizer, batch)
        optimizer.second_step()


class KeepsOptimizerFromFitStart(StepsOptimizerItself):
    """Lightning gets no optimizer: it is in an attribute."""

    def on_fit_start(self):
        self.optimizer = self.make_optimizer(self.parameters())

    def training_step(self, batch, batch_idx):
        self.optimizer.step(partial(self.compute_gradients, self.optimizer, batch))

    def configure_optimizers(self):
        return None


class KeepsOptimizerFromFirstBatch(KeepsOptimizerFromFitStart):
    def on_fit_start(self):
        self.optimizer = None

    def training_step(self, batch, batch_idx):
        if self.optimizer is None:
            self.optimizer = self.make_optimizer(self.parameters())
        super().training_step(batch, batch_idx)


# ---- by hand


def train_by_closures(make_optimizer, mu=0.0, keep=False):
    """Return the global model by hand, with steps that are given closures. ``mu`` is FedProx's."""
    train = partial(take_steps_by_closures, mu=mu)
    return train_with_own_optimizers(make_optimizer, train, rounds=ROUNDS, keep=keep)


def take_steps_by_closures(model, optimizer, batches, mu):
    global_vector = nn.utils.parameters_to_vector(model.parameters()).detach()
    for batch in batches:
        closure = partial(compute_gradients, model, optimizer, batch, global_vector, mu)
        optimizer.step(closure)


def compute_gradients(model, optimizer, batch, global_vector, mu):
    """Compute the gradients of the loss plus mu / 2 |model - global model|^2, and return their sum."""
    x, y = batch
    vector = nn.utils.parameters_to_vector(model.parameters())
    squared_distance = (vector - global_vector).square().sum()

    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(model(x), y) + mu / 2 * squared_distance
    loss.backward()
    return loss


def assert_as_by_hand(module, expected):
    assert_close(state_vector(module.net), state_vector(expected))


assert_close = partial(torch.testing.assert_close, rtol=1e-6, atol=1e-6)


def make_seeded_loop(**kwargs):
    return FederatedLoop(seed=SEED, local_epochs=LOCAL_EPOCHS, **kwargs)


# ---- tests


@pytest.mark.by_turn
@pytest.mark.fast_rows("sam-reset-*")
@pytest.mark.parametrize(
    ("name", "policy", "kind"),
    [
        *[(name, policy, Plainest) for name in NESTED for policy in ("reset", "persist")],
        ("plain", "persist", KeepsOptimizerFromFirstBatch),
        ("sam", "reset", KeepsOptimizerFromFitStart),
        ("own wrapper", "reset", KeepsOptimizerFromFirstBatch),
        ("own wrapper", "persist", KeepsOptimizerFromFitStart),
    ],
)
def test_optimizers_are_swapped_between_clients(tmp_path, name, policy, kind):
    """Also nested ones, and those in attributes of the module."""
    make_optimizer = OPTIMIZERS[name]
    module = kind(make_optimizer)

    fit(make_seeded_loop(optimizer_state=policy), tmp_path, module)

    keeps_optimizers = policy == "persist"
    assert_as_by_hand(module, train_by_closures(make_optimizer, keep=keeps_optimizers))


def test_client_begins_with_the_state_that_adagrads_constructor_makes():
    """In torch 2.4 its first step needs one."""
    parameter = nn.Parameter(torch.zeros(2))
    optimizer = torch.optim.Adagrad([parameter], initial_accumulator_value=0.5)
    swapped_optimizer = SwappedOptimizer("optimizer", optimizer)

    swapped_optimizer.store_federation_options()
    swapped_optimizer.enter(stored=None, options=[])

    assert optimizer.state[parameter]["sum"].tolist() == [0.5, 0.5]


@pytest.mark.by_turn
@pytest.mark.slow
@pytest.mark.parametrize("name", ["sam", "lookahead", "own wrapper"])
def test_nested_optimizers_that_clients_keep_resume_bitwise(tmp_path, name):
    make_loop = partial(make_seeded_loop, optimizer_state="persist")
    assert_resumes(make_loop, tmp_path, partial(Plainest, NESTED[name]))


@pytest.mark.by_turn
@pytest.mark.fast_rows
@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("plain", Plainest),
        ("plain", StepsWithoutClosure),
        ("sam", Plainest),
        ("lookahead", StepsWithClosure),
        ("own wrapper", StepsWithClosure),
        ("lookahead of sam", StepsWithClosure),
    ],
)
def test_fedprox_corrects_every_gradient_of_optimizers_once(tmp_path, name, kind):
    """And each batch is counted as one step."""
    make_optimizer = OPTIMIZERS[name]
    aggregator = KeepsRounds()
    loop = make_seeded_loop(aggregator=aggregator, client_algorithm=FedProx(mu=1.0))
    module = kind(make_optimizer)
    data = toy_data()

    fit(loop, tmp_path, module, data)

    assert_as_by_hand(module, train_by_closures(make_optimizer, mu=1.0))
    num_batches = [len(data.client_loader(client, "train")) for client in range(3)]
    last_round = aggregator.rounds[-1]
    assert last_round.num_steps.tolist() == [LOCAL_EPOCHS * length for length in num_batches]


def test_module_that_takes_both_steps_of_sam_trains_as_by_hand(tmp_path):
    module = TakesBothStepsOfSAM(NESTED["sam"])
    fit(make_seeded_loop(), tmp_path, module)

    assert_as_by_hand(module, train_by_closures(NESTED["sam"]))


def test_steps_of_sam_outside_of_its_step_are_refused_by_fedprox(tmp_path):
    """FedProx corrects gradients within an optimizer's ``step`` only."""
    module = TakesBothStepsOfSAM(NESTED["sam"])
    with refused("SGD takes.*outside of SAM.step"):
        fit(make_seeded_loop(client_algorithm=FedProx(1.0)), tmp_path, module)


class ComputesGradientBeforeTheStep(StepsOptimizerItself):
    """Calls the public SAM as its page says: the first gradient is computed before the step."""

    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers(use_pl_optimizer=False)
        self.compute_gradients(optimizer, batch)
        optimizer.step(partial(self.compute_gradients, optimizer, batch))


class PublicSAM(SAM):
    def step(self, closure):
        self.first_step()
        with torch.enable_grad():
            loss = closure()
        self.second_step()
        return loss


def test_sam_step_by_a_gradient_computed_before_it_is_refused_by_fedprox(tmp_path):
    """FedProx changes the gradients of a step, and not one that was computed before."""
    module = ComputesGradientBeforeTheStep(partial(PublicSAM, base=sgd))
    with refused("gradients from before the step"):
        fit(make_seeded_loop(client_algorithm=FedProx(1.0)), tmp_path, module)


class ChangesBiasWithoutStep(Plainest):
    def __init__(self):
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch, batch_idx):
        with torch.no_grad():
            self.net[0].bias.add_(0.1)


def test_model_that_changes_without_a_step_is_refused(tmp_path):
    with refused("ChangesBiasWithoutStep changes the model"):
        fit(FederatedLoop(seed=SEED), tmp_path, ChangesBiasWithoutStep())


class EmbedsSigns(Plainest):
    """Its embedding's gradients are sparse, if so asked."""

    def __init__(self, sparse):
        super().__init__(make_sgd())
        self.words = nn.Embedding(num_embeddings=5, embedding_dim=FEATURES, sparse=sparse)
        nn.init.constant_(self.words.weight, 0.5)

    def forward(self, x):
        is_positive = x[:, 0] > 0
        return self.net(x + self.words(is_positive.long()))


@pytest.mark.fast_rows
@pytest.mark.parametrize("algorithm", [FedProx, Ditto])
def test_sparse_gradients_train_as_dense_ones(tmp_path, algorithm):
    dense = EmbedsSigns(sparse=False)
    sparse = EmbedsSigns(sparse=True)
    for module in (dense, sparse):
        fit(make_seeded_loop(client_algorithm=algorithm()), tmp_path, module)

    assert_close(state_vector(sparse), state_vector(dense))


def test_optimizer_of_sparse_gradients_is_refused_where_they_become_dense(tmp_path):
    module = EmbedsSigns(sparse=True)
    module.make_optimizer = lambda _: torch.optim.SparseAdam([module.words.weight])
    with refused("SparseAdam takes sparse gradients only"):
        fit(make_seeded_loop(client_algorithm=FedProx(1.0)), tmp_path, module)
