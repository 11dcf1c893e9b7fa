"""Copies of modules that keep functions, compiled or not, beside their layers."""

import io
import json
import math
import os
from contextlib import suppress
from functools import partial

import pytest
import torch
from lightning.pytorch.utilities.compile import from_compiled
from torch import nn
from torch.nn.utils.parametrizations import weight_norm
from torch.utils.data import Dataset

from flsv.core.parameter_space import ParameterSpace
from flsv.federation import FederatedLoop
from flsv.games import ModelEvaluator
from flsv.games.module_copies import ModuleCopies, ScoringCopies, named_tensors
from flsv.metrics import CumulativeShapley, GradientShapley, ShadowShapley
from helpers import refused
from helpers.data import CLASSES, FEATURES, toy_data
from helpers.fits import fit
from helpers.models import Plain, network

compiled = partial(torch.compile, backend="eager")


class CallsItsFunction(Plain):
    """Its forward calls the function ``f``, if it has one, or else its network."""

    def __init__(self):
        super().__init__(network(batch_norm=False))
        self.f = None

    def forward(self, x):
        if self.f is None:
            return self.net(x)
        return self.f(x)

    def validation_step(self, batch, batch_idx):
        x, _ = batch
        self.log("val_loss", self(x).square().mean())


def compile_module(module):
    return compiled(module)


def compile_and_unwrap_by_lightning(module):
    return from_compiled(compiled(module))


def compile_in_place(module):
    module.compile(backend="eager")
    module.net.compile(backend="eager")
    return module


def compile_network(module):
    module.net = compiled(module.net)
    return module


def normalize_weights(module):
    """Keep a tensor in the middle of an autograd graph, too."""
    weight_norm(module.net[0])
    module.cache = module.net[0].weight * 2
    return module


def add_closure(module):
    module.f = lambda x: module.net(x)
    return module


def add_closure_of_a_list(module):
    modules = [module]
    module.f = lambda x: modules[0].net(x)
    return module


def add_hook(module):
    first_layer = module.net[0]

    def add_last_weights(layer, args, output):
        last_layer = module.net[4]
        return output + last_layer.weight.sum()

    first_layer.register_forward_hook(add_last_weights)
    return module


def parameter_names(module):
    return [name for name, _ in module.named_parameters()]


@pytest.mark.by_turn
@pytest.mark.fast_rows("normalize_weights")
@pytest.mark.parametrize(
    "add_function",
    [
        compile_module,
        compile_and_unwrap_by_lightning,
        compile_in_place,
        compile_network,
        normalize_weights,
        add_closure,
        add_closure_of_a_list,
        add_hook,
    ],
)
def test_copied_module_shares_no_weights_with_the_original(add_function):
    module = add_function(CallsItsFunction())
    x = torch.randn(4, FEATURES)
    output = module(x)  # what is compiled, is compiled by the first call

    copied_module = ModuleCopies(module).load()

    assert parameter_names(copied_module) == parameter_names(module)
    assert torch.equal(copied_module(x), output)
    assert not any(layer._compiled_call_impl for layer in copied_module.modules())

    with torch.no_grad():
        for parameter in copied_module.parameters():
            parameter += 0.1
    assert torch.equal(module(x), output)
    assert not torch.allclose(copied_module(x), output)


class AddsScaledCenter(nn.Linear):
    def __init__(self):
        super().__init__(FEATURES, CLASSES)
        self.register_buffer("scale", torch.ones(()), persistent=False)
        self.center = torch.zeros(CLASSES)

    def forward(self, x):
        return super().forward(x) + self.scale * self.center


def loss_of_zeros(evaluate):
    """Return the loss of a model whose parameters are all 0."""
    model_of_zeros = torch.zeros(1, evaluate.space.size)
    return evaluate(model_of_zeros).value("loss").item()


@pytest.mark.parametrize("backend", ["vmap", "serial"])
def test_evaluated_modules_follow_changes_of_the_originals_buffers_and_attributes(backend):
    module = AddsScaledCenter()
    labels = torch.tensor([0, 0, 0])
    batch = (torch.zeros(3, FEATURES), labels)
    evaluate = ModelEvaluator(
        module, ParameterSpace(module), [batch], num_classes=CLASSES, backend=backend
    )

    # The logits of a model of zeros are scale * center.
    loss_by_equal_logits = math.log(3)
    assert loss_of_zeros(evaluate) == pytest.approx(loss_by_equal_logits)

    module.center = torch.tensor([20.0, 0.0, 0.0])
    assert loss_of_zeros(evaluate) == pytest.approx(0, abs=1e-6)

    module.scale = torch.tensor(-1.0)
    loss_by_a_logit_of_minus_20 = 20 + math.log(2)
    assert loss_of_zeros(evaluate) == pytest.approx(loss_by_a_logit_of_minus_20)


@torch.jit.script
def double(x):
    return 2 * x


@pytest.mark.filterwarnings("ignore:.*torch.jit")
@pytest.mark.parametrize(
    "make_part",
    [
        pytest.param(lambda: torch.jit.script(nn.Linear(2, 2)), id="module"),
        pytest.param(lambda: torch.jit.trace(nn.Linear(2, 2), torch.ones(1, 2)), id="trace"),
        pytest.param(lambda: double, id="function"),
    ],
)
def test_scripted_parts_are_copied(make_part):
    module = CallsItsFunction()
    module.f = make_part()
    x = torch.ones(1, 2)

    copied_module = ModuleCopies(module).load()

    assert torch.equal(copied_module(x), module(x))
    assert parameter_names(copied_module) == parameter_names(module)
    assert not any(copied_module.f is layer for layer in module.modules())


class NewNeedsArgument:
    """It can be pickled, but not loaded."""

    def __new__(cls, number):
        return super().__new__(cls)


class HashedBeforeItIsLoaded:
    """A set in itself hashes it by an attribute that it does not have yet when it is loaded."""

    def __init__(self, name):
        self.name = name
        self.neighbours = {self}

    def __hash__(self):
        return hash(self.name)


def open_file():
    file = io.FileIO(os.devnull, "a")
    return io.TextIOWrapper(file)


UNCOPYABLE_PARTS = {
    "an open file": open_file,
    "a file in a list": lambda: [[open_file()]],
    "an argument": lambda: NewNeedsArgument(3),
    "a ring": lambda: HashedBeforeItIsLoaded("a"),
}


class HasPart(CallsItsFunction):
    """Has a part from the beginning, or from a round on."""

    part = None

    def __init__(self, make_part, round_index=None):
        super().__init__()
        self.make_part = make_part
        self.round_index = round_index
        if round_index is None:
            self.part = make_part()

    def on_train_epoch_start(self):
        if self.current_epoch == self.round_index:
            self.part = self.make_part()


class UsesPartWhenScored(HasPart):
    def forward(self, x):
        if not self.training and self.part is not None:
            self.use_part()
        return super().forward(x)

    def use_part(self):
        repr(self.part)


class CatchesErrorsOfPart(UsesPartWhenScored):
    def use_part(self):
        with suppress(Exception):
            super().use_part()


def fit_with_metric(module, folder, performance):
    mode = "min" if performance == "val_loss" else None
    metric = CumulativeShapley(performance=performance, mode=mode)
    loop = FederatedLoop(metrics={"sv": metric}, seed=1)
    fit(loop, folder, module, data=toy_data(server_val=0.2), rounds=2)
    return loop.contributions["sv"]


@pytest.fixture(scope="module", params=["negative_loss", "val_loss"])
def performance_and_values(request, tmp_path_factory):
    """A performance, and the values by it of a module without a further part."""
    performance = request.param
    folder = tmp_path_factory.mktemp("without")
    values = fit_with_metric(CallsItsFunction(), folder, performance)
    assert values.isfinite().all()
    return performance, values


@pytest.mark.by_turn
@pytest.mark.fast_rows
@pytest.mark.parametrize("round_index", [None, 1], ids=["from the beginning", "from round 2"])
@pytest.mark.parametrize("kind", UNCOPYABLE_PARTS)
def test_uncopyable_part_that_no_score_uses_changes_no_value(
    kind, round_index, performance_and_values, tmp_path
):
    performance, values = performance_and_values
    module = HasPart(UNCOPYABLE_PARTS[kind], round_index)

    values_with_part = fit_with_metric(module, tmp_path, performance)

    assert torch.equal(values_with_part, values)


@pytest.mark.by_turn
@pytest.mark.fast_rows
@pytest.mark.parametrize("performance", ["negative_loss", "val_loss"])
@pytest.mark.parametrize("kind", UNCOPYABLE_PARTS)
def test_uncopyable_part_that_scores_use_is_named_before_training(kind, performance, tmp_path):
    module = UsesPartWhenScored(UNCOPYABLE_PARTS[kind])

    with refused(r"copies of \w+: the module\.part"):
        fit_with_metric(module, tmp_path, performance)


def test_uncopyable_part_whose_error_the_module_catches_is_named_before_training(tmp_path):
    module = CatchesErrorsOfPart(open_file)

    with refused(r"copies of \w+: the module\.part"):
        fit_with_metric(module, tmp_path, performance="negative_loss")


def fit_module_that_opens_a_file(folder, metrics):
    """In the second round it gets the file, with which no copy of it can be scored."""
    loop = FederatedLoop(metrics=metrics, seed=1)
    module = UsesPartWhenScored(open_file, round_index=1)
    fit(loop, folder, module, data=toy_data(server_val=0.2), rounds=2)
    return loop


@pytest.fixture(scope="module")
def model_without_metrics(tmp_path_factory):
    loop = fit_module_that_opens_a_file(tmp_path_factory.mktemp("without"), metrics={})
    return loop.state.model()


@pytest.mark.by_turn
@pytest.mark.fast_rows
@pytest.mark.filterwarnings("ignore:value")
@pytest.mark.parametrize(
    "metric",
    [
        pytest.param(CumulativeShapley(performance="negative_loss"), id="outputs"),
        pytest.param(CumulativeShapley(performance="val_loss", mode="min"), id="logged value"),
        pytest.param(GradientShapley(loss="val_loss"), id="gradient"),
        pytest.param(
            ShadowShapley(coalitions="singles", performance="negative_loss"), id="coalitions"
        ),
    ],
)
def test_uncopyable_part_that_appears_in_training_costs_the_values_and_not_the_run(
    metric, model_without_metrics, tmp_path
):
    loop = fit_module_that_opens_a_file(tmp_path, {"value": metric})

    assert torch.equal(loop.state.model(), model_without_metrics)
    assert loop.contributions["value"].isnan().all()
    record = json.loads((tmp_path / "run.json").read_text())
    assert "the module.part" in record["missing"]["value"]


def names_of_shared_tensors(module, another_module):
    """Return the names of parameters and buffers that are in the same memory."""
    tensors = named_tensors(module)
    addresses = {tensor.data_ptr() for tensor in named_tensors(another_module).values()}
    return {name for name, tensor in tensors.items() if tensor.data_ptr() in addresses}


@pytest.mark.slow
def test_copies_for_vectors_share_memory_only_of_what_a_vector_holds():
    module = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    module.register_buffer("offset", torch.ones(2), persistent=False)
    space = ParameterSpace(module)
    model = space.read(module)
    copies = ScoringCopies(module, space).take()

    first_copy = copies.load()
    space.write(first_copy, model)
    next_copy = copies.load()

    assert torch.equal(space.read(next_copy), model)
    assert names_of_shared_tensors(first_copy, next_copy) == set(space.names)
    assert names_of_shared_tensors(module, next_copy) == set()


def test_module_is_copied_once_in_a_round_and_for_each_score_outside_of_rounds():
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


class SharedDatasetWithNetwork(Dataset):
    """Copies of a module share its data sets, and here with it the module's network."""

    def __init__(self, net):
        self.net = net

    def __len__(self):
        return 0


@pytest.mark.parametrize("performance", ["negative_loss", "val_loss"])
def test_module_whose_copy_uses_the_runs_weights_is_refused(tmp_path, performance):
    module = CallsItsFunction()
    dataset = SharedDatasetWithNetwork(module.net)
    module.dataset = dataset
    module.f = lambda x: dataset.net(x)

    with refused("scored twice, has two scores"):
        fit_with_metric(module, tmp_path, performance)
