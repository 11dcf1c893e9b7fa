"""Copies of modules that keep functions, compiled or not, beside their layers."""

import io
import json
import math
import os
import socket
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import tqdm
from lightning.pytorch.utilities.compile import from_compiled
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm
from torch.utils.data import DataLoader, Dataset, TensorDataset

from flsv import Reporting
from flsv.core.parameter_space import ParameterSpace
from flsv.federation import FederatedLoop
from flsv.games import ModelEvaluator
from flsv.games.module_copies import ModuleCopies, ScoringCopies, named_tensors
from flsv.metrics import (
    CumulativeShapley,
    GradientShapley,
    PartialFederatedShapley,
    ShadowShapley,
)
from flsv.utilities.errors import ConfigurationError
from helpers.data import CLASSES, FEATURES, toy_data
from helpers.fits import fit, state_vector
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


class NeedsArgument:
    """An object that is pickled, but not loaded."""

    def __new__(cls, number: int) -> Any:
        needs_argument = super().__new__(cls)
        needs_argument.number = number
        return needs_argument


class Node:
    """A node of a ring, which is hashed before it is loaded."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.neighbours = {self}

    def __hash__(self) -> int:
        return hash(self.name)


def open_file() -> io.TextIOWrapper:
    return io.TextIOWrapper(io.FileIO(os.devnull, "a"))


def open_bar() -> Any:
    return tqdm.tqdm(total=9, file=open_file())


def second_loader() -> Any:
    return iter(DataLoader(TensorDataset(torch.ones(8, 2)), batch_size=4))


#: Parts that no copy has.
REFUSED: dict[str, Callable[[], Any]] = {
    "a generator": lambda: (number for number in range(3)),
    "a loader's iterator": second_loader,
    "an open file": open_file,
    "a progress bar": open_bar,
    "a thread": threading.Thread,
    "a socket": socket.socket,
    "a part in a list": lambda: [[open_file()]],
    "an argument": lambda: NeedsArgument(3),
    "a ring": lambda: Node("a"),
}


class MakesParts(Kept):
    """It gets a part when its network is scored, or in a round of training."""

    part: Any = None

    def __init__(self, make: Callable[[], Any], round_index: int, uses_part: bool = False) -> None:
        super().__init__()
        self.make = make
        self.round_index = round_index
        self.uses_part = uses_part
        if round_index < 0:
            self.part = make()

    def on_train_epoch_start(self) -> None:
        if self.current_epoch == self.round_index:
            self.part = self.make()

    def forward(self, x: Tensor) -> Tensor:
        if self.uses_part and not self.training and self.part is not None:
            repr(self.part)
        return self.net(x)


def fit_with_metric(module: Any, folder: Path, performance: str, rounds: int = 3) -> Tensor:
    mode = "min" if performance == "val_loss" else None
    metric = CumulativeShapley(performance=performance, mode=mode)
    loop = FederatedLoop(metrics={"sv": metric}, seed=1, reporting=Reporting(table=False))
    fit(loop, folder, module, toy_data(server_val=0.2), rounds=rounds)
    return loop.contributions["sv"]


@pytest.mark.parametrize("performance", ["negative_loss", "val_loss"])
@pytest.mark.parametrize("kind", REFUSED)
def test_part_that_no_score_uses_changes_no_value(
    kind: str, performance: str, tmp_path: Path
) -> None:
    """Whether it is there before training, or training makes it in the first, second or last round."""
    value = fit_with_metric(Kept(), tmp_path / "without", performance)

    assert value.isfinite().all()
    for round_index in (-1, 0, 1, 2):
        module = MakesParts(REFUSED[kind], round_index)
        folder = tmp_path / f"{round_index}"
        assert torch.equal(fit_with_metric(module, folder, performance), value)
        assert module.trainer.current_epoch == 3


@pytest.mark.parametrize("performance", ["negative_loss", "val_loss"])
@pytest.mark.parametrize("kind", REFUSED)
def test_part_that_scores_use_is_named_before_training(
    kind: str, performance: str, tmp_path: Path
) -> None:
    module = MakesParts(REFUSED[kind], round_index=-1, uses_part=True)

    with pytest.raises(ConfigurationError, match=r"copies of MakesParts.*the module\.part"):
        fit_with_metric(module, tmp_path, performance)


METRICS: dict[str, Callable[[], Any]] = {
    "outputs": lambda: CumulativeShapley(performance="negative_loss"),
    "logged value": lambda: CumulativeShapley(performance="val_loss", mode="min"),
    "gradient": lambda: GradientShapley(loss="val_loss"),
    "trained coalitions": lambda: ShadowShapley(coalitions="singles", performance="negative_loss"),
}


@pytest.mark.filterwarnings("ignore:value")
@pytest.mark.parametrize("kind", METRICS)
def test_part_that_scores_use_and_training_makes_ends_no_run(kind: str, tmp_path: Path) -> None:
    loop = FederatedLoop(metrics={"value": METRICS[kind]()}, seed=1)
    module = MakesParts(REFUSED["a progress bar"], round_index=1, uses_part=True)
    fit(loop, tmp_path / "with", module, toy_data(server_val=0.2), rounds=3)

    module_without = MakesParts(REFUSED["a progress bar"], round_index=1, uses_part=True)
    fit(FederatedLoop(seed=1), tmp_path / "without", module_without, toy_data(server_val=0.2))
    assert torch.equal(state_vector(module), state_vector(module_without))
    assert loop.contributions["value"].isnan().all()
    record = json.loads((tmp_path / "with" / "run.json").read_text())
    assert "the module.part" in record["missing"]["value"]


def test_copies_for_vectors_have_one_memory_of_weights() -> None:
    module = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    module.register_buffer("offset", torch.ones(2), persistent=False)
    space = ParameterSpace(module)
    copies = ScoringCopies(module, space).take()

    first_copy = copies.load()
    space.write(first_copy, space.read(module))
    next_copy = copies.load()

    assert torch.equal(space.read(next_copy), space.read(module))
    for name, tensor in named_tensors(next_copy).items():
        is_of_vectors = name in space.names
        first_tensor = named_tensors(first_copy)[name]
        assert (tensor.data_ptr() == first_tensor.data_ptr()) == is_of_vectors
        assert tensor.data_ptr() != named_tensors(module)[name].data_ptr()


def test_module_is_copied_once_a_round() -> None:
    module = nn.Sequential(nn.Linear(2, 2))
    copies = ScoringCopies(module, ParameterSpace(module))

    assert copies.take() is not copies.take()
    copies.begin_round()
    copies_of_round = copies.take()
    assert copies.take() is copies_of_round
    copies.begin_round()
    assert copies.take() is not copies_of_round
    copies.end_round()
    assert copies.take() is not copies.take()


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
