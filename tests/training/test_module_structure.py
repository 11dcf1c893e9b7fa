"""The module's structure: each client starts with the layers, hooks, flags and modes of the round's start."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn

from flsv.federation import FederatedLoop
from flsv.sampling import FixedCohort
from helpers.data import toy_data
from helpers.fits import KeepUpdates, assert_resumes, fit
from helpers.kinds_of_parts import WithBackbone, make_backbone_finetuning
from helpers.models import Plain, network


class Changes(Plain):
    """Changes its structure at its second training step."""

    def __init__(self, change: Callable[[Any], Any]) -> None:
        super().__init__(network())
        self.change = change
        self.activation: nn.Module = nn.Identity()
        self.num_steps = 0

    def forward(self, x: Tensor) -> Tensor:
        logits = self.activation(self.net(x))
        if hasattr(self, "doubled"):
            logits = self.doubled(logits) + logits
        return logits

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.num_steps += 1
        if self.num_steps == 2:
            self.change(self)
        loss = super().training_step(batch, batch_idx)
        weight = self.net[0].weight
        anchor = getattr(weight, "anchor", None)
        if anchor is not None:
            loss = loss + (weight - anchor).square().sum()
        return loss


def freeze(module: Any) -> None:
    module.net[0].requires_grad_(False)


def freeze_one_parameter(module: Any) -> None:
    module.net[1].bias.requires_grad = False


def stop_tracking(module: Any) -> None:
    module.net[1].eval()


def hook_forward(module: Any) -> None:
    module.net[0].register_forward_hook(lambda layer, inputs, output: 1.5 * output)


def hook_forward_before(module: Any) -> None:
    module.net[0].register_forward_pre_hook(lambda layer, inputs: (2 * inputs[0],))


def hook_backward(module: Any) -> None:
    module.net[0].register_full_backward_hook(lambda layer, inputs, outputs: None)
    module.net[4].weight.register_hook(lambda gradient: 0.1 * gradient)


def hook_gradients(module: Any) -> None:
    def shrink(parameter: Tensor) -> None:
        assert parameter.grad is not None
        parameter.grad.mul_(0.1)

    module.net[0].weight.register_post_accumulate_grad_hook(shrink)


def set_attribute_of_parameter(module: Any) -> None:
    module.net[0].weight.anchor = module.net[0].weight.detach().clone()


def add_layer(module: Any) -> None:
    module.doubled = nn.Dropout(0.0)


def replace_layer(module: Any) -> None:
    module.activation = nn.Tanh()


def remove_hooks(module: Any) -> None:
    module.net[0].register_forward_hook(lambda layer, inputs, output: 1.5 * output)
    module.net[0]._forward_hooks.clear()


def replace_parameter(module: Any) -> None:
    module.net[4].bias = nn.Parameter(torch.ones(3))


def replace_forward(module: Any) -> None:
    layer = module.net[4]
    layer.forward = lambda x: 1.5 * nn.functional.linear(x, layer.weight, layer.bias)


FLAGS = (freeze, freeze_one_parameter, stop_tracking)
CHANGES = (
    *FLAGS,
    hook_forward,
    hook_forward_before,
    hook_backward,
    hook_gradients,
    set_attribute_of_parameter,
    add_layer,
    replace_layer,
    remove_hooks,
    replace_parameter,
    replace_forward,
)


@pytest.mark.parametrize("change", CHANGES)
def test_client_does_not_find_the_structure_that_an_earlier_client_has_made(tmp_path, change):
    updates = []
    for cohort in ([2], [0, 1, 2]):
        recorder = KeepUpdates()
        loop = FederatedLoop(recorder, sampler=FixedCohort(cohort), seed=4)
        folder = tmp_path / str(len(cohort))
        fit(loop, folder, Changes(change), toy_data((4, 2, 3)), rounds=1)
        updates.append(recorder.rounds[0][2])

    assert torch.equal(updates[0], updates[1])


def do_nothing(module: Any) -> None:
    return


@pytest.mark.parametrize("change", [hook_forward, freeze, replace_layer])
def test_changes_of_the_structure_change_what_a_client_learns(tmp_path, change):
    updates = []
    for name, change_of_run in (("changed", change), ("plain", do_nothing)):
        recorder = KeepUpdates()
        loop = FederatedLoop(recorder, seed=4)
        fit(loop, tmp_path / name, Changes(change_of_run), toy_data((4, 2, 3)), rounds=1)
        updates.append(recorder.rounds[0][0])

    assert not torch.equal(updates[0], updates[1])


@pytest.mark.parametrize("change", FLAGS)
def test_flags_and_modes_of_the_first_client_are_resumed_bitwise(tmp_path, change):
    assert_resumes(partial(FederatedLoop, seed=3), tmp_path, partial(Changes, change))


class Finetuned(WithBackbone):
    def configure_callbacks(self) -> Any:
        return [make_backbone_finetuning()]


def test_run_goes_on_with_the_layers_that_a_callback_has_unfrozen(tmp_path):
    assert_resumes(partial(FederatedLoop, seed=3), tmp_path, Finetuned)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (hook_forward, "net.0 was Linear with 1 hooks and is Linear with 0 hooks"),
        (replace_layer, "activation was Tanh with 0 hooks and is Identity"),
        (add_layer, "doubled was Dropout with 0 hooks and is missing"),
    ],
)
def test_structure_that_a_checkpoint_lacks_is_named_at_resume(tmp_path, change, message):
    saving = ModelCheckpoint(tmp_path / "saved", filename="last")
    first_run = Changes(change)
    fit(
        FederatedLoop(seed=3),
        tmp_path,
        first_run,
        rounds=1,
        callbacks=[saving],
        enable_checkpointing=True,
    )

    with pytest.warns(UserWarning, match=message):
        fit(
            FederatedLoop(seed=3),
            tmp_path,
            Changes(change),
            rounds=2,
            ckpt_path=tmp_path / "saved" / "last.ckpt",
        )
