"""Schedule-free optimizers, whose model is an average that ``eval()`` writes, are as a loop by hand, wherever a module
calls ``train()`` and ``eval()``.

Defazio et al., The Road Less Scheduled, https://arxiv.org/abs/2405.15682
"""

import pytest
import torch

from flsv.federation import FederatedLoop
from helpers.fits import fit, state_vector
from helpers.loops_by_hand import (
    LOCAL_EPOCHS,
    SEED,
    cross_entropy_of,
    take_steps,
    train_with_own_optimizers,
)
from helpers.models import Plain, network

ROUNDS = 3


class ScheduleFree(torch.optim.Optimizer):
    """SGD with the protocol of the package ``schedulefree``, by the paper's names: z takes SGD's steps, x is the
    average of all z, and gradients are taken between them, at y = (1 - momentum) z + momentum x.

    A model's parameters are y while it trains and x otherwise.
    """

    def __init__(self, parameters, lr=0.3, momentum=0.9):
        options = {"lr": lr, "momentum": momentum, "num_steps": 0, "train_mode": False}
        super().__init__(parameters, options)

    def train(self):
        for group in self.param_groups:
            if not group["train_mode"]:
                self._move(group, 1 - group["momentum"])  # from x to y
                group["train_mode"] = True

    def eval(self):
        for group in self.param_groups:
            if group["train_mode"]:
                self._move(group, 1 - 1 / group["momentum"])  # from y to x
                group["train_mode"] = False

    @torch.no_grad()
    def _move(self, group, weight):
        for parameter in group["params"]:
            entries = self.state[parameter]
            if "z" in entries:
                parameter.lerp_(entries["z"], weight)

    @torch.no_grad()
    def step(self, closure=None):
        assert self.param_groups[0]["train_mode"], "train() was not called"
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()

        for group in self.param_groups:
            group["num_steps"] += 1
            share_of_new = 1 / group["num_steps"]
            rate, momentum = group["lr"], group["momentum"]
            for y in group["params"]:
                z = self.state[y].setdefault("z", y.clone())
                x = (y - (1 - momentum) * z) / momentum
                z -= rate * y.grad
                x.lerp_(z, share_of_new)
                y.copy_((1 - momentum) * z + momentum * x)
        return loss


# ---- modules, by where they switch the optimizer's mode


class LeavesModeToTheLoop(Plain):
    """Leaves the modes to the federation."""

    def __init__(self):
        super().__init__(network(batch_norm=False), ScheduleFree)

    def switch_to(self, mode):
        optimizer = self.optimizers()
        getattr(optimizer, mode)()


class SwitchesModeInValidationHooks(LeavesModeToTheLoop):
    def on_train_start(self):
        self.switch_to("train")

    def on_validation_epoch_start(self):
        self.switch_to("eval")

    def on_validation_epoch_end(self):
        self.switch_to("train")


class SwitchesModeWithTheModel(LeavesModeToTheLoop):
    """In the hooks by which Lightning switches the model itself."""

    def on_train_batch_start(self, batch, batch_idx):
        self.switch_to("train")

    def on_validation_model_eval(self):
        super().on_validation_model_eval()
        self.switch_to("eval")

    def on_validation_model_train(self):
        super().on_validation_model_train()
        self.switch_to("train")


def train_in_mode(model, optimizer, batches):
    optimizer.train()
    take_steps(optimizer, cross_entropy_of(model), batches)
    optimizer.eval()


def make_loop(**options):
    return FederatedLoop(seed=SEED, local_epochs=LOCAL_EPOCHS, **options)


KINDS = [LeavesModeToTheLoop, SwitchesModeInValidationHooks, SwitchesModeWithTheModel]


@pytest.mark.fast_rows("reset-SwitchesModeWithTheModel", "persist-SwitchesModeInValidationHooks")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("policy", ["reset", "persist"])
def test_server_receives_the_averaged_weights_of_clients(tmp_path, kind, policy):
    module = kind()
    fit(make_loop(optimizer_state=policy), tmp_path, module, rounds=ROUNDS)

    expected = train_with_own_optimizers(
        ScheduleFree, train_in_mode, rounds=ROUNDS, keep=policy == "persist"
    )
    difference = state_vector(module.net) - state_vector(expected)
    assert difference.abs().max() < 1e-6
