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
        (group,) = self.param_groups
        if not group["train_mode"]:
            group["train_mode"] = True
            self._move_to_z(group, share=1 - group["momentum"])  # from x to y

    def eval(self):
        (group,) = self.param_groups
        if group["train_mode"]:
            group["train_mode"] = False
            self._move_to_z(group, share=1 - 1 / group["momentum"])  # from y back to x

    @torch.no_grad()
    def _move_to_z(self, group, share):
        for parameter in group["params"]:
            if parameter in self.state:
                parameter.lerp_(self.state[parameter]["z"], share)

    @torch.no_grad()
    def step(self, closure=None):
        (group,) = self.param_groups
        assert group["train_mode"], "train() was not called"
        with torch.enable_grad():
            loss = closure() if closure else None

        group["num_steps"] += 1
        share_of_new = 1 / group["num_steps"]
        momentum = group["momentum"]
        for y in group["params"]:
            z = self.state[y].setdefault("z", y.clone())
            x = (y - (1 - momentum) * z) / momentum
            z -= group["lr"] * y.grad
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


KINDS = [LeavesModeToTheLoop, SwitchesModeInValidationHooks, SwitchesModeWithTheModel]


@pytest.mark.by_turn
@pytest.mark.fast_rows("reset-SwitchesModeWithTheModel", "persist-SwitchesModeInValidationHooks")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("policy", ["reset", "persist"])
def test_server_receives_the_averaged_weights_of_clients(tmp_path, kind, policy):
    module = kind()
    loop = FederatedLoop(seed=SEED, local_epochs=LOCAL_EPOCHS, optimizer_state=policy)

    fit(loop, tmp_path, module, rounds=ROUNDS)

    keeps_optimizers = policy == "persist"
    expected_model = train_with_own_optimizers(
        ScheduleFree, train_in_mode, rounds=ROUNDS, keep=keeps_optimizers
    )
    torch.testing.assert_close(
        state_vector(module.net), state_vector(expected_model), rtol=0, atol=1e-6
    )
