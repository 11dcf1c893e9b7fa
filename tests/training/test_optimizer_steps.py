"""Optimizer steps, whoever takes them and however optimizers are nested: as a loop by hand with an optimizer of its own
for each client and round."""

import copy
from functools import partial

import pytest
import torch
from timm.optim import Lookahead
from torch import nn

from flsv.federation import FederatedLoop
from flsv.training.algorithms import Ditto, FedProx
from helpers import refused
from helpers.data import toy_data
from helpers.fits import KeepsRounds, assert_resumes, fit, state_vector
from helpers.loops_by_hand import LOCAL_EPOCHS, SEED, train_with_own_optimizers
from helpers.models import Plain, make_sgd, network, sgd

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
        parameters = [p for group in self.param_groups for p in group["params"]]
        norms = [parameter.grad.norm() for parameter in parameters]
        norm = torch.stack(norms).norm()
        scale = self.param_groups[0]["rho"] / norm

        for parameter in parameters:
            self.state[parameter]["old_p"] = parameter.clone()
            parameter.add_(scale * parameter.grad)

        self.zero_grad()

    @torch.no_grad()
    def second_step(self):
        for parameter, entries in self.state.items():
            parameter.data = entries["old_p"]
        self.base_optimizer.step()
        self.zero_grad()

    def step(self, closure=None):
        with torch.enable_grad():
            loss = closure()

        self.first_step()
        with torch.enable_grad():
            closure()

        self.second_step()
        return loss


class Averaged:
    """No torch optimizer: counts its steps, and sets the weights to its average of them every second step."""

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
            average.lerp_(parameter, 0.3)
            if self.num_steps % 2 == 0:
                parameter.copy_(average)

        return loss


NESTED = {
    "sam": lambda parameters: SAM(parameters, sgd),
    "lookahead": lambda parameters: Lookahead(sgd(parameters), k=2),
    "own wrapper": lambda parameters: Averaged(sgd(parameters)),
    "lookahead of sam": lambda parameters: Lookahead(SAM(parameters, sgd), k=3),
}


# ---- modules, by who takes the step


class Stepping(Plain):
    """Its batches' steps are taken by Lightning, or by the optimizer that it wraps, with a closure or without."""

    def __init__(self, make, stepped_by="automatic"):
        super().__init__(network(batch_norm=False), make)
        self.stepped_by = stepped_by
        self.automatic_optimization = stepped_by == "automatic"

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        if self.stepped_by == "no closure":
            self.take_step(self.optimizers(use_pl_optimizer=False), loss)

        if self.stepped_by == "closure":
            (optimizer,) = self.trainer.optimizers
            optimizer.step(partial(self.evaluate, optimizer, batch))

        if self.stepped_by == "second step":
            self.take_two_steps(self.optimizers(use_pl_optimizer=False), batch)
        return loss

    def take_step(self, optimizer, loss):
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()

    def take_two_steps(self, optimizer, batch):
        self.evaluate(optimizer, batch)
        optimizer.first_step()
        self.evaluate(optimizer, batch)
        optimizer.second_step()

    def evaluate(self, optimizer, batch):
        optimizer.zero_grad()
        loss = super().training_step(batch, 0)
        self.manual_backward(loss)
        return loss


class Holding(Stepping):
    """Lightning gets no optimizer."""

    def __init__(self, make, stepped_by):
        super().__init__(make, "own")
        self.created_in = stepped_by

    def on_fit_start(self):
        if self.created_in == "on_fit_start":
            self.optimizer = self.make_optimizer(self.parameters())

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        if self.created_in == "first batch" and not hasattr(self, "optimizer"):
            self.optimizer = self.make_optimizer(self.parameters())
        self.optimizer.step(partial(self.evaluate, self.optimizer, batch))
        return loss

    def configure_optimizers(self):
        return None


# ---- by hand


def train_by_closures(make, prox=0.0, keep=False):
    """Return the global model by hand, with steps that are given closures. ``prox`` is FedProx's mu."""

    def train(model, optimizer, batches):
        anchor = copy.deepcopy(model)
        for batch in batches:
            optimizer.step(partial(evaluate_closure, model, optimizer, batch, anchor, prox))

    return train_with_own_optimizers(make, train, rounds=ROUNDS, keep=keep)


def evaluate_closure(model, optimizer, batch, server, prox):
    x, y = batch
    optimizer.zero_grad()
    distance = torch.zeros(())
    pairs = zip(model.parameters(), server.parameters())

    for parameter, anchor in pairs:
        difference = parameter - anchor.detach()
        distance = distance + difference.square().sum()

    loss = nn.functional.cross_entropy(model(x), y)
    loss = loss + prox / 2 * distance
    loss.backward()
    return loss


def assert_as_by_hand(module, expected):
    assert_equal(state_vector(module.net), state_vector(expected))


assert_equal = partial(torch.testing.assert_close, rtol=1e-6, atol=1e-6)


def make_seeded_loop(**kwargs):
    return FederatedLoop(seed=SEED, local_epochs=LOCAL_EPOCHS, **kwargs)


# ---- tests


@pytest.mark.fast_rows
@pytest.mark.parametrize("policy", ["reset", "persist"])
@pytest.mark.parametrize("name", NESTED)
def test_nested_optimizers_are_swapped_between_clients(tmp_path, name, policy):
    module = Stepping(NESTED[name])
    fit(make_seeded_loop(optimizer_state=policy), tmp_path, module)
    assert_as_by_hand(module, train_by_closures(NESTED[name], keep=policy == "persist"))


@pytest.mark.fast_rows
@pytest.mark.parametrize(
    ("name", "policy", "created_in"),
    [
        ("plain", "persist", "first batch"),
        ("sam", "reset", "on_fit_start"),
        ("own wrapper", "reset", "first batch"),
        ("own wrapper", "persist", "on_fit_start"),
    ],
)
def test_optimizers_in_attributes_of_the_module_are_swapped_between_clients(
    tmp_path,
    name,
    policy,
    created_in,
):
    make = {"plain": sgd, **NESTED}[name]
    module = Holding(make, created_in)
    fit(make_seeded_loop(optimizer_state=policy), tmp_path, module)
    assert_as_by_hand(module, train_by_closures(make, keep=policy == "persist"))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["sam", "lookahead", "own wrapper"])
def test_nested_optimizers_that_clients_keep_resume_bitwise(tmp_path, name):
    make_loop = partial(make_seeded_loop, optimizer_state="persist")
    assert_resumes(make_loop, tmp_path, partial(Stepping, NESTED[name]))


@pytest.mark.fast_rows
@pytest.mark.parametrize(
    ("name", "stepped_by"),
    [
        ("plain", "automatic"),
        ("plain", "no closure"),
        ("sam", "automatic"),
        ("lookahead", "closure"),
        ("own wrapper", "closure"),
        ("lookahead of sam", "closure"),
    ],
)
def test_fedprox_corrects_every_gradient_of_optimizers_once(tmp_path, name, stepped_by):
    """And each batch is counted as one step."""
    make = {"plain": sgd, **NESTED}[name]
    aggregator = KeepsRounds()
    loop = make_seeded_loop(aggregator=aggregator, client_algorithm=FedProx(1.0))
    module = Stepping(make, stepped_by)
    data = toy_data()
    fit(loop, tmp_path, module, data)

    assert_as_by_hand(module, train_by_closures(make, prox=1.0))
    num_batches = [len(data.client_loader(client, "train")) for client in range(3)]
    assert aggregator.rounds[-1].num_steps.tolist() == [
        LOCAL_EPOCHS * length for length in num_batches
    ]


def test_second_step_of_sam_is_a_step_and_refused_where_gradients_escape(tmp_path):
    module = Stepping(NESTED["sam"], "second step")
    fit(make_seeded_loop(), tmp_path, module)

    assert_as_by_hand(module, train_by_closures(NESTED["sam"]))

    with refused("SGD takes.*outside of SAM.step"):
        fit(
            make_seeded_loop(client_algorithm=FedProx(1.0)),
            tmp_path,
            Stepping(NESTED["sam"], "second step"),
        )


class ComputesGradientBeforeTheStep(Stepping):
    """Calls the public SAM as its page says: the first gradient is computed before the step."""

    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers(use_pl_optimizer=False)
        self.evaluate(optimizer, batch)
        optimizer.step(partial(self.evaluate, optimizer, batch))


class PublicSAM(SAM):
    def step(self, closure=None):
        self.first_step()
        with torch.enable_grad():
            loss = closure()
        self.second_step()
        return loss


def make_module_with_public_sam():
    def make_optimizer(parameters):
        return PublicSAM(parameters, sgd)

    return ComputesGradientBeforeTheStep(make_optimizer, stepped_by="public")


def test_sam_step_by_a_gradient_computed_before_it_is_refused_by_fedprox(tmp_path):
    """FedProx changes the gradients of a step, and not one that was computed before."""
    module = make_module_with_public_sam()
    with refused("gradients from before the step"):
        fit(make_seeded_loop(client_algorithm=FedProx(1.0)), tmp_path, module)


class Stepless(Plain):
    def __init__(self):
        super().__init__(network(batch_norm=False))
        self.automatic_optimization = False

    def training_step(self, batch, batch_idx):
        with torch.no_grad():
            self.net[0].bias.add_(0.1)


def test_model_that_changes_without_a_step_is_refused(tmp_path):
    with refused("Stepless changes the model"):
        fit(FederatedLoop(seed=SEED), tmp_path, Stepless())


class Words(Plain):
    """Its embedding's gradients are sparse, if so asked."""

    def __init__(self, sparse):
        super().__init__(network(batch_norm=False), make_sgd())
        self.words = nn.Embedding(5, 6, sparse=sparse)
        nn.init.constant_(self.words.weight, 0.5)

    def forward(self, x):
        is_positive = x[:, 0] > 0
        return self.net(x + self.words(is_positive.long()))


@pytest.mark.fast_rows
@pytest.mark.parametrize("algorithm", [FedProx, Ditto])
def test_sparse_gradients_train_as_dense_ones(tmp_path, algorithm):
    dense = Words(sparse=False)
    sparse = Words(sparse=True)
    for module in (dense, sparse):
        fit(make_seeded_loop(client_algorithm=algorithm()), tmp_path, module)

    assert_equal(state_vector(sparse), state_vector(dense))


def test_optimizer_of_sparse_gradients_is_refused_where_they_become_dense(tmp_path):
    module = Words(sparse=True)
    module.make_optimizer = lambda _: torch.optim.SparseAdam([module.words.weight])
    with refused("SparseAdam takes sparse gradients only"):
        fit(make_seeded_loop(client_algorithm=FedProx(1.0)), tmp_path, module)
