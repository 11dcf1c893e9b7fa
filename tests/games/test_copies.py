"""Copies of modules that keep functions, compiled or not, beside their layers."""

import io
import json
import math
import os
from collections.abc import Callable
from contextlib import suppress
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
from flsv.games.module_copies import ModuleCopies, ScoringCopies, named_tensors
from flsv.metrics import CumulativeShapley, GradientShapley, ShadowShapley
from helpers import refused
from helpers.data import CLASSES, FEATURES, toy_data
from helpers.fits import fit, state_vector
from helpers.models import Plain, network

eager = partial(torch.compile, backend="eager")


class Kept(Plain):
    def __init__(self, keep: Callable[[Any], Any] | None = None):
        net = network(batch_norm=False)
        super().__init__(net)
        self.f = None if keep is None else keep(self)
        self.may_train = True

    def forward(self, x):
        if self.f is None:
            return self.net(x)
        return self.f(x)

    def training_step(self, batch, batch_idx):
        assert self.may_train
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch, batch_idx):
        outputs = self(batch[0])
        loss = outputs.square().mean()
        self.log("val_loss", loss)


def reach_through_list(module) -> Callable[[Tensor], Tensor]:
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
    first_layer = module.net[0]

    def add_last_weights(layer, args, output: Tensor) -> Tensor:
        last_layer = module.net[4]
        return output + last_layer.weight.sum()

    first_layer.register_forward_hook(add_last_weights)
    return module


def make_normed() -> Kept:
    module = Kept()
    weight_norm(module.net[0])
    module.cache = module.net[0].weight * 2  # in the middle of a graph
    return module


RIGHT = {
    "torch.compile(module)": lambda: eager(Kept()),
    "module.compile()": make_in_place,
    "torch.compile(net)": make_compiled,
    "weight norm": make_normed,
    "lambda": lambda: Kept(lambda module: lambda x: module.net(x)),
    "lambda of a list": lambda: Kept(reach_through_list),
    "hook": make_hooked,
}


def parameter_names(module: nn.Module) -> list[str]:
    return [name for name, _ in module.named_parameters()]


@pytest.mark.fast_rows("weight norm")
@pytest.mark.parametrize("kind", [*RIGHT, "as Lightning unwraps it"])
def test_copied_module_shares_no_weights_with_the_original(kind):
    if kind in RIGHT:
        module = RIGHT[kind]()
    else:
        module = from_compiled(eager(Kept()))

    x = torch.randn(4, FEATURES)
    module(x)
    copied = ModuleCopies(module).load()

    assert parameter_names(copied) == parameter_names(module)
    assert torch.equal(copied(x), module(x))

    output = module(x)
    with torch.no_grad():
        for parameter in copied.parameters():
            parameter += 0.1

    assert torch.equal(module(x), output)
    assert not torch.allclose(copied(x), output)
    assert not any(layer._compiled_call_impl for layer in copied.modules())


@pytest.mark.parametrize("backend", ["vmap", "serial"])
def test_evaluated_modules_follow_changes_of_the_originals_buffers_and_attributes(backend):
    def add_scaled_center(layer, args, output: Tensor) -> Tensor:
        return output + layer.scale * layer.center

    module = nn.Sequential(nn.Linear(FEATURES, CLASSES))
    module.register_forward_hook(add_scaled_center)
    module.register_buffer("scale", torch.ones(()), persistent=False)
    module.center = torch.zeros(CLASSES)

    inputs = torch.zeros(3, FEATURES)
    labels = torch.zeros(3, dtype=torch.long)
    space = ParameterSpace(module)
    evaluate = ModelEvaluator(
        module, space, [(inputs, labels)], num_classes=CLASSES, backend=backend
    )

    def loss_of_zeros() -> float:
        model_of_zeros = torch.zeros(1, space.size)
        return -evaluate(model_of_zeros).value("negative_loss").item()

    # The linear layer of a model of zeros returns 0, so the logits are scale * center. All labels are 0.
    assert loss_of_zeros() == pytest.approx(math.log(3))  # logits 0, 0, 0

    module.center = torch.tensor([20.0, 0.0, 0.0])
    assert loss_of_zeros() == pytest.approx(0, abs=1e-6)  # logits 20, 0, 0

    module.scale = torch.tensor(-1.0)
    assert loss_of_zeros() == pytest.approx(20 + math.log(2))  # logits -20, 0, 0


@torch.jit.script
def double(x: Tensor) -> Tensor:
    return 2 * x


SCRIPTED = {
    "module": lambda: torch.jit.script(nn.Linear(2, 2)),
    "trace": lambda: torch.jit.trace(nn.Linear(2, 2), torch.ones(1, 2)),
    "function": lambda: double,
}


@pytest.mark.filterwarnings("ignore:.*torch.jit")
@pytest.mark.parametrize("kind", SCRIPTED)
def test_scripted_parts_are_copied(kind):
    module = Kept()
    module.f = SCRIPTED[kind]()
    x = torch.ones(1, 2)

    copied = ModuleCopies(module).load()

    assert torch.equal(copied(x), module(x))
    assert parameter_names(copied) == parameter_names(module)
    assert not any(copied.f is layer for layer in module.modules())


class NeedsArgument:
    """An object that is pickled, but not loaded."""

    def __new__(cls, number: int):
        needs_argument = super().__new__(cls)
        needs_argument.number = number
        return needs_argument


class Node:
    """A node of a ring, which is hashed before it is loaded."""

    def __init__(self, name: str):
        self.name = name
        self.neighbours = {self}

    def __hash__(self) -> int:
        return hash(self.name)


def open_file() -> io.TextIOWrapper:
    file = io.FileIO(os.devnull, "a")
    return io.TextIOWrapper(file)


#: Parts that no copy has.
REFUSED = {
    "an open file": open_file,
    "a part in a list": lambda: [[open_file()]],
    "an argument": lambda: NeedsArgument(3),
    "a ring": lambda: Node("a"),
}


class MakesParts(Kept):
    """It gets a part when its network is scored, or in a round of training."""

    part: Any = None

    def __init__(
        self,
        make: Callable[[], Any],
        round_index: int,
        uses_part: bool = False,
    ):
        super().__init__()
        self.make = make
        self.round_index = round_index
        self.uses_part = uses_part
        if round_index < 0:
            self.part = make()

    def on_train_epoch_start(self):
        if self.current_epoch == self.round_index:
            self.part = self.make()

    def forward(self, x):
        has_part = self.part is not None
        is_scored = not self.training
        if self.uses_part and is_scored and has_part:
            self.use_part()
        return self.net(x)

    def use_part(self):
        repr(self.part)


class CatchesErrors(MakesParts):
    def use_part(self):
        with suppress(Exception):
            repr(self.part)


def fit_with_metric(module, folder: Path, performance: str) -> Tensor:
    mode = "min" if performance == "val_loss" else None
    metric = CumulativeShapley(performance=performance, mode=mode)
    loop = FederatedLoop(metrics={"sv": metric}, seed=1)
    fit(
        loop,
        folder,
        module=module,
        data=toy_data(server_val=0.2),
        rounds=2,
    )
    return loop.contributions["sv"]


@pytest.fixture(scope="module", params=["negative_loss", "val_loss"])
def performance_and_values(request, tmp_path_factory):
    """A performance, and the values by it of a module without a further part."""
    folder = tmp_path_factory.mktemp("without")
    values = fit_with_metric(Kept(), folder, request.param)
    assert values.isfinite().all()
    return request.param, values


@pytest.mark.fast_rows
@pytest.mark.parametrize("round_index", [-1, 1], ids=["before training", "in round 2"])
@pytest.mark.parametrize("kind", REFUSED)
def test_part_that_no_score_uses_changes_no_value(
    kind,
    round_index,
    performance_and_values,
    tmp_path,
):
    performance, values = performance_and_values
    module = MakesParts(REFUSED[kind], round_index)

    values_with_part = fit_with_metric(module, tmp_path, performance)

    assert torch.equal(values_with_part, values)


@pytest.mark.fast_rows
@pytest.mark.parametrize("performance", ["negative_loss", "val_loss"])
@pytest.mark.parametrize(
    ("make_module", "kind"),
    [*((MakesParts, kind) for kind in REFUSED), (CatchesErrors, "an open file")],
)
def test_part_that_scores_use_is_named_before_training(
    make_module,
    kind,
    performance,
    tmp_path,
):
    module = make_module(REFUSED[kind], round_index=-1, uses_part=True)

    with refused(r"copies of \w+: the module\.part"):
        fit_with_metric(module, tmp_path, performance)


METRICS = {
    "outputs": lambda: CumulativeShapley(performance="negative_loss"),
    "logged value": lambda: CumulativeShapley(performance="val_loss", mode="min"),
    "gradient": lambda: GradientShapley(loss="val_loss"),
    "trained coalitions": lambda: ShadowShapley(coalitions="singles", performance="negative_loss"),
}


def make_with_file() -> MakesParts:
    return MakesParts(open_file, round_index=1, uses_part=True)


@pytest.mark.fast_rows
@pytest.mark.filterwarnings("ignore:value")
@pytest.mark.parametrize("kind", METRICS)
def test_part_that_scores_use_and_training_makes_ends_no_run(kind, tmp_path):
    metric = METRICS[kind]()
    loop = FederatedLoop(metrics={"value": metric}, seed=1)
    module = make_with_file()
    folder = tmp_path / "with"
    fit(loop, folder, module=module, data=toy_data(server_val=0.2))

    loop_without = FederatedLoop(seed=1)
    module_without = make_with_file()
    fit(
        loop_without,
        tmp_path / "without",
        module=module_without,
        data=toy_data(server_val=0.2),
    )
    weights = state_vector(module)
    weights_without = state_vector(module_without)
    assert torch.equal(weights, weights_without)
    assert loop.contributions["value"].isnan().all()

    record_text = (folder / "run.json").read_text()
    record = json.loads(record_text)
    assert "the module.part" in record["missing"]["value"]


def test_copies_for_vectors_have_one_memory_of_weights():
    module = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    module.register_buffer("offset", torch.ones(2), persistent=False)
    space = ParameterSpace(module)
    copies = ScoringCopies(module, space).take()

    first_copy = copies.load()
    vector = space.read(module)
    space.write(first_copy, vector)
    next_copy = copies.load()

    vector_of_copy = space.read(next_copy)
    assert torch.equal(vector_of_copy, space.read(module))
    module_tensors = named_tensors(module)
    first_tensors = named_tensors(first_copy)
    for name, tensor in named_tensors(next_copy).items():
        address = tensor.data_ptr()
        is_of_vectors = name in space.names
        is_of_first_copy = address == first_tensors[name].data_ptr()
        assert is_of_first_copy == is_of_vectors
        assert address != module_tensors[name].data_ptr()


def test_module_is_copied_once_a_round():
    module = nn.Sequential(nn.Linear(2, 2))
    space = ParameterSpace(module)
    copies = ScoringCopies(module, space)

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

    def __init__(self, net: nn.Module):
        self.net = net

    def __len__(self):
        return 0


@pytest.mark.parametrize("performance", ["negative_loss", "val_loss"])
def test_copy_that_reaches_the_runs_weights_is_refused(tmp_path, performance):
    module = Kept()
    borrowed = BorrowedNetwork(module.net)
    module.borrowed = borrowed
    module.f = lambda x: borrowed.net(x)

    with refused("scored twice, has two scores"):
        fit_with_metric(module, tmp_path, performance)
