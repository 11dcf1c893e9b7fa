"""What the batched engine cannot train is refused with the reason, before the first round."""

from functools import partial

import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import GradientAccumulationScheduler, LambdaCallback, Timer
from torch import nn
from vmap.engines import make_engine_loop

from flsv.training.algorithms import FedProx
from helpers import make_generator, refused
from helpers.data import CLASSES, FEATURES, toy_data
from helpers.fits import fit, state_vector
from helpers.models import Plain, Plainest


class Steps(Plainest):
    """Its step is a function of itself, the plain step's loss and what the plain step is given."""

    def __init__(self, function):
        super().__init__()
        self.function = function
        self.generator = make_generator(1)
        self.beta = 1.0

    def training_step(self, batch, batch_idx):
        return self.function(
            self,
            super().training_step(batch, batch_idx),
            batch,
            batch_idx,
        )


steps = partial(partial, Steps)


def loss_with_annealed_beta(module, loss, *_):
    module.beta = module.beta * 0.99
    return module.beta * loss


class HeadOfFullBatches(Plainest):
    """A head is in the loss of batches of 8 only, so the clients' steps differ."""

    def __init__(self):
        super().__init__()
        self.head = nn.Linear(FEATURES, CLASSES)

    def training_step(self, batch, batch_idx):
        x, _ = batch
        loss = super().training_step(batch, batch_idx)
        return loss + self.head(x).square().mean() if len(x) == 8 else loss


class WithLightningLayer(Plainest):
    """A layer is a LightningModule, too, which reads the trainer."""

    def __init__(self):
        super().__init__()
        self.layer = Plainest()

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        return loss / (1 + self.layer.trainer.estimated_stepping_batches)


def loss_of_labeled_samples(module, loss, batch, _):
    x, y = batch
    is_labeled = y != 2
    return nn.functional.cross_entropy(module(x)[is_labeled], y[is_labeled])


class ModuleThatStoresItsNumberOfCalls(Plainest):
    """Its loss is that of the plain step, so that only its buffer shows that it counts further calls."""

    def __init__(self):
        super().__init__()
        self.num_calls = 0
        self.register_buffer("stored_calls", torch.zeros(()))

    def training_step(self, batch, batch_idx):
        self.num_calls += 1
        self.stored_calls = torch.full_like(self.stored_calls, self.num_calls)
        return super().training_step(batch, batch_idx)


by_step = partial(
    Plainest, scheduler=partial(torch.optim.lr_scheduler.StepLR, step_size=1), interval="step"
)


class Manual(Plainest):
    def __init__(self):
        super().__init__()
        self.automatic_optimization = False


class Hooked(Plainest):
    def on_before_optimizer_step(self, optimizer):
        pass


class ClipsByHook(Plainest):
    def __init__(self):
        super().__init__()
        self.net[0].weight.register_hook(lambda gradient: gradient.clamp(-10.0, 10.0))


class Renormed(nn.Module):
    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(8, 4, max_norm=1.0)
        self.head = nn.Linear(4 * FEATURES, CLASSES)

    def forward(self, x):
        bins = (x * 2).long().clamp(-3, 4)
        embedded = self.words(bins + 3)
        return self.head(embedded.flatten(1))


def make_hooked_sgd(parameters):
    optimizer = torch.optim.SGD(parameters, lr=0.1)
    optimizer.register_step_post_hook(lambda *_: None)
    return optimizer


class HookedTimer(Timer):
    """Not what it is known as."""

    def on_train_batch_start(self, trainer, pl_module, *_):
        pass


def with_callback(callback):
    return {"callbacks": [callback]}


#: A module, arguments of the federation and of the Trainer, and the reason.
REFUSED = [
    (
        steps(lambda module, loss, batch, idx: loss * (2 if idx <= 0 else 1)),
        {},
        {},
        "reads batch_idx",
    ),
    (steps(lambda *_: None), {}, {}, "must return a loss, .*returned NoneType"),
    (
        steps(lambda module, loss, *_: loss / (1 + 0.01 * module.global_step)),
        {},
        {},
        "trainer.global_step",
    ),
    (
        steps(lambda module, loss, *_: loss / module.trainer.estimated_stepping_batches),
        {},
        {},
        "trainer.estimated_stepping_batches",
    ),
    (
        steps(lambda module, loss, *_: loss / len(module.trainer.train_dataloader)),
        {},
        {},
        "trainer.train_dataloader",
    ),
    (WithLightningLayer, {}, {}, "reads trainer.estimated_stepping_batches"),
    (HeadOfFullBatches, {}, {}, "which parameters have gradients depends on the size"),
    (steps(loss_with_annealed_beta), {}, {}, "'the loss' differs by .* The tolerance is 1e-05"),
    (ModuleThatStoresItsNumberOfCalls, {}, {}, "'stored_calls' differs by"),
    (
        steps(lambda module, loss, *_: loss * torch.rand((), generator=module.generator)),
        {},
        {},
        "it draws random numbers",
    ),
    (
        steps(lambda module, loss, *_: loss * np.random.rand()),  # noqa: NPY002
        {},
        {},
        "draws random numbers",
    ),
    (steps(loss_of_labeled_samples), {}, {}, "vmap: .*dynamic shape"),
    (partial(Plain, Renormed()), {}, {}, "an embedding with max_norm"),
    (Manual, {}, {}, "steps its optimizers itself"),
    (partial(Plainest, torch.optim.LBFGS), {}, {}, "LBFGS is not known to"),
    (partial(Plainest, make_hooked_sgd), {}, {}, "SGD has hooks around its steps"),
    (by_step, {}, {}, "StepLR steps after every batch"),
    (ClipsByHook, {}, {}, "parameter 'net.0.weight' has a hook"),
    (Hooked, {}, {}, "Hooked defines on_before_optimizer_step"),
    (Plainest, {"optimizer_state": "persist"}, {}, "gives every client the moments"),
    (Plainest, {"client_algorithm": FedProx(0.1)}, {}, "client_algorithm=.*changes the training"),
    (
        Plainest,
        {},
        with_callback(GradientAccumulationScheduler({0: 2, 1: 3})),
        "gradients are accumulated",
    ),
    (
        Plainest,
        {},
        with_callback(LambdaCallback(on_train_batch_start=lambda *_: None)),
        "LambdaCallback defines on_train_batch_start",
    ),
    (Plainest, {}, with_callback(HookedTimer()), "HookedTimer defines on_train_batch_start"),
]


@pytest.mark.by_turn
@pytest.mark.fast_rows
@pytest.mark.filterwarnings("ignore:.*round 1 is discarded.*")
@pytest.mark.parametrize(
    (
        "make",
        "federation",
        "trainer",
        "reason",
    ),
    REFUSED,
    ids=[reason for *_, reason in REFUSED],
)
def test_vmap_with_an_unsupported_setting_is_refused(tmp_path, make, federation, trainer, reason):
    loop = make_engine_loop("vmap", **federation)
    module = make()
    initial_vector = state_vector(module)

    with refused(f'(?s)engine="vmap".*{reason}.*engine="sequential"'):
        fit(loop, tmp_path, module, toy_data((4, 2, 1)), 1, **trainer)

    assert loop.round_index == 0
    assert torch.equal(state_vector(module), initial_vector)


def test_vmap_with_weights_of_half_precision_is_refused(tmp_path):
    with refused("precision='bf16-true'"):
        fit(make_engine_loop("vmap"), tmp_path, Plainest(), rounds=1, precision="bf16-true")


class Penalized(Plainest):
    """From the second round on, a penalty reads what a hook has stored of the model."""

    def __init__(self, store):
        super().__init__()
        self.store = store
        self.stored = []

    def on_train_epoch_start(self):
        if self.current_epoch > 0:
            self.stored = self.store(self.net[0])

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        return loss + sum(tensor.square().sum() for tensor in self.stored)


def draw_in_second_round(module, loss, *_):
    return loss * np.random.rand() if module.current_epoch > 0 else loss  # noqa: NPY002


#: A module whose steps are as without batching in the first round only, and the reason.
REFUSED_LATER = {
    "parameters": (
        partial(Penalized, lambda layer: list(layer.parameters())),
        "in round 2, the gradient of 'net.0.weight' differs by",
    ),
    "values that follow the parameters": (
        partial(Penalized, lambda layer: [layer.weight.detach()]),
        "'the loss' differs by",
    ),
    "random numbers": (steps(draw_in_second_round), "draws random numbers"),
}


@pytest.mark.parametrize("name", REFUSED_LATER)
def test_vmap_refuses_what_a_later_round_trains_otherwise(tmp_path, name):
    make, reason = REFUSED_LATER[name]
    loop = make_engine_loop("vmap")

    with refused(f'(?s)engine="vmap".*{reason}.*engine="sequential"'):
        fit(loop, tmp_path, make(), toy_data((4, 2, 1)), 3)

    assert loop.round_index == 1


def test_shared_constants_that_thaw_are_refused(tmp_path):
    class Thawing(Plainest):
        def __init__(self):
            super().__init__()
            self.net[0].requires_grad_(False)

        def on_train_epoch_start(self):
            self.net[0].requires_grad_(self.current_epoch > 0)

    with refused("'net.0.weight'.* required no gradient when the fit began"):
        fit(
            make_engine_loop("vmap", share="trainable"), tmp_path, Thawing(), toy_data((4, 2, 1)), 2
        )
