"""Copies of modules that keep functions, compiled or not, beside their layers."""

import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.utilities.compile import from_compiled
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm
from torch.utils.data import Dataset

from flsv.core.parameter_space import ParameterSpace
from flsv.federation import FederatedLoop
from flsv.games import ModelEvaluator
from flsv.games.module_copies import ModuleCopies
from flsv.metrics import PartialFederatedShapley
from flsv.utilities.errors import ConfigurationError
from helpers.data import CLASSES, FEATURES, toy_data
from helpers.fits import fit
from helpers.models import Plain, network

eager = partial(torch.compile, backend="eager")


class Kept(Plain):
    def __init__(self, keep: Callable[[Any], Any] | None = None) -> None:
        super().__init__(network(batch_norm=False))
        self.f = None if keep is None else keep(self)
        self.may_train = True

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x) if self.f is None else self.f(x)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        assert self.may_train
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self(batch[0]).square().mean())


def reach_through_list(module: Any) -> Callable[[Tensor], Tensor]:
    """A function that reaches the module's network through a list."""
    modules = [module]
    return lambda x: modules[0].net(x)


def make_compiled() -> Kept:
    module = Kept()
    module.net = eager(module.net)
    return module


def make_in_place() -> Kept:
    module = Kept()
    module.compile(backend="eager")
    module.net.compile(backend="eager")
    return module


def make_hooked() -> Kept:
    module = Kept()
    module.net[0].register_forward_hook(
        lambda layer, args, output: output + module.net[4].weight.sum()
    )
    return module


def make_normed() -> Kept:
    module = Kept()
    weight_norm(module.net[0])
    module.cache = module.net[0].weight * 2  # in the middle of a graph
    return module


RIGHT: dict[str, Callable[[], Any]] = {
    "torch.compile(module)": lambda: eager(Kept()),
    "module.compile()": make_in_place,
    "torch.compile(net)": make_compiled,
    "weight norm": make_normed,
    "lambda": lambda: Kept(lambda module: lambda x: module.net(x)),
    "lambda of a list": lambda: Kept(reach_through_list),
    "hook": make_hooked,
}


@pytest.mark.parametrize("kind", [*RIGHT, "as Lightning unwraps it"])
def test_copied_module_shares_no_weights_with_the_original(kind: str) -> None:
    if kind in RIGHT:
        module = RIGHT[kind]()
    else:
        module = from_compiled(eager(Kept()))

    x = torch.randn(4, FEATURES)
    module(x)
    copied = ModuleCopies(module).load()

    names = [name for name, _ in module.named_parameters()]
    assert [name for name, _ in copied.named_parameters()] == names
    assert torch.equal(copied(x), module(x))

    output = module(x)
    with torch.no_grad():
        for parameter in copied.parameters():
            parameter += 0.1

    assert torch.equal(module(x), output)
    assert not torch.allclose(copied(x), output)
    assert not any(layer._compiled_call_impl for layer in copied.modules())


@pytest.mark.parametrize("backend", ["vmap", "serial"])
def test_evaluated_modules_follow_changes_of_the_originals_buffers_and_attributes(
    backend: Any,
) -> None:
    module = nn.Sequential(nn.Linear(FEATURES, CLASSES))

    def scale_center(layer: Any, args: Any, output: Tensor) -> Tensor:
        return output + layer.scale * layer.center

    module.register_forward_hook(scale_center)
    module.register_buffer("scale", torch.ones(()), persistent=False)
    module.center = torch.zeros(CLASSES)
    batches = [
        (
            torch.zeros(3, FEATURES),
            torch.zeros(3, dtype=torch.long),
        )
    ]
    space = ParameterSpace(module)
    evaluate = ModelEvaluator(
        module,
        space,
        batches,
        num_classes=CLASSES,
        backend=backend,
    )

    def loss_of_zeros() -> float:
        scores = evaluate(torch.zeros(1, space.size))
        return -scores.value("negative_loss").item()

    # All samples are of class 0, and the logits of a model of zeros are scale * center.
    assert loss_of_zeros() == pytest.approx(math.log(3))  # logits 0, 0, 0

    module.center = torch.tensor([20.0, 0.0, 0.0])
    assert loss_of_zeros() == pytest.approx(0, abs=1e-6)  # logits 20, 0, 0

    module.scale = torch.tensor(-1.0)
    assert loss_of_zeros() == pytest.approx(20 + math.log(2))  # logits -20, 0, 0


@torch.jit.script
def double(x: Tensor) -> Tensor:
    return 2 * x


SCRIPTED: dict[str, Callable[[], Any]] = {
    "module": lambda: torch.jit.script(nn.Linear(2, 2)),
    "trace": lambda: torch.jit.trace(nn.Linear(2, 2), torch.ones(1, 2)),
    "function": lambda: double,
}


@pytest.mark.filterwarnings("ignore:.*torch.jit")
@pytest.mark.parametrize("kind", SCRIPTED)
def test_scripted_parts_are_copied(kind: str) -> None:
    module = Kept()
    module.f = SCRIPTED[kind]()
    x = torch.ones(1, 2)

    copied = ModuleCopies(module).load()

    assert torch.equal(copied(x), module(x))
    names = [name for name, _ in module.named_parameters()]
    assert [name for name, _ in copied.named_parameters()] == names
    assert not any(copied.f is layer for layer in module.modules())


def test_part_that_cannot_be_copied_is_named_before_training(tmp_path: Path) -> None:
    module = Kept(reach_through_list)
    module.net.stream = (number for number in range(3))  # type: ignore[assignment]
    loop = FederatedLoop(metrics={"sv": PartialFederatedShapley()})

    message = r"Kept cannot be copied.*the module\._modules\['net'\]\.stream \(generator\)"
    with pytest.raises(ConfigurationError, match=message):
        fit(loop, tmp_path, module, toy_data(server_val=0.2))


class BorrowedNetwork(Dataset):
    """A data set, which copies share, that holds the module's network."""

    def __init__(self, net: nn.Module) -> None:
        self.net = net

    def __len__(self) -> int:
        return 0


@pytest.mark.parametrize("performance", ["negative_loss", "val_loss"])
def test_copy_that_reaches_the_runs_weights_is_refused(tmp_path: Path, performance: str) -> None:
    module = Kept()
    borrowed = BorrowedNetwork(module.net)
    module.borrowed = borrowed
    module.f = lambda x: borrowed.net(x)
    mode = "min" if performance == "val_loss" else None
    metric = PartialFederatedShapley(performance=performance, mode=mode)
    loop = FederatedLoop(metrics={"sv": metric})

    with pytest.raises(ConfigurationError, match="one model, scored twice, has two scores"):
        fit(loop, tmp_path, module, toy_data(server_val=0.2))


@pytest.mark.parametrize("performance", ["negative_loss", "val_loss"])
def test_frozen_layers_are_shared_and_scored(tmp_path: Path, performance: str) -> None:
    module = Kept()
    first_layer: Any = module.net[0]
    first_layer.requires_grad_(False)
    weight = first_layer.weight.clone()
    mode = "min" if performance == "val_loss" else None
    metric = PartialFederatedShapley(performance=performance, mode=mode)
    loop = FederatedLoop(metrics={"sv": metric})

    fit(loop, tmp_path, module, toy_data(server_val=0.2))

    assert loop.contributions["sv"].isfinite().all()
    assert torch.equal(first_layer.weight, weight)
