"""What scoring changes: found once, by the first score, and told to coalitions."""

import inspect
from functools import wraps
from typing import Any, ClassVar

import pytest
import torch
from torch import nn
from torch.utils.data import Dataset

from flsv.core.parameter_space import ParameterSpace
from flsv.federation import FederatedLoop, loop
from flsv.games import ModelEvaluator
from flsv.games.module_copies import ModuleCopies, ScoringEffects
from flsv.metrics import ShadowShapley
from helpers.data import toy_data
from helpers.fits import fit
from helpers.models import Plain, network

BATCHES = [(torch.eye(3), torch.tensor([0, 1, 2]))]


class ListOfModules(Dataset):
    """A data set, since copies of a module share its data sets."""

    def __init__(self):
        self.modules = []

    def __len__(self):
        return 0


class RecordsScoredModules(nn.Module):
    num_calls: ClassVar[int] = 0

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Dropout())
        self.scored = ListOfModules()

    def forward(self, x):
        self.scored.modules.append(self)
        return self.layers(x)


class CountsCallsInBuffer(RecordsScoredModules):
    def __init__(self):
        super().__init__()
        self.register_buffer("calls", torch.zeros(()), persistent=False)

    def forward(self, x):
        self.calls += 1
        return super().forward(x) * self.calls


class CountsCallsInItsClass(RecordsScoredModules):
    def forward(self, x):
        type(self).num_calls += 1
        return super().forward(x)


class SetsPrecision(RecordsScoredModules):
    def forward(self, x):
        torch.set_float32_matmul_precision("medium")
        return super().forward(x)


#: What scoring each module changes.
EFFECTS = {
    RecordsScoredModules: ScoringEffects(program=False, module=False),
    CountsCallsInBuffer: ScoringEffects(program=False, module=True),
    CountsCallsInItsClass: ScoringEffects(program=True, module=False),
    SetsPrecision: ScoringEffects(program=True, module=False),
}


def evaluator_of(module):
    space = ParameterSpace(module)
    return ModelEvaluator(module, space, BATCHES, num_classes=3, backend="serial")


@pytest.mark.parametrize("module_class", EFFECTS)
def test_first_score_shows_what_scoring_changes(module_class):
    module = module_class()
    evaluate = evaluator_of(module)

    assert evaluate.effects == EFFECTS[module_class]


def losses_of_two_copies(evaluate, module):
    model = evaluate.space.read(module)
    return evaluate(torch.stack([model, model])).value("loss").tolist()


@pytest.mark.parametrize("module_class", EFFECTS)
def test_scores_of_a_module_do_not_depend_on_earlier_ones(module_class):
    module = module_class()
    evaluate = evaluator_of(module)
    evaluate.copies_module = False

    losses = losses_of_two_copies(evaluate, module)
    loss_of_module = evaluate.score_module(module).value("loss").item()
    next_losses = losses_of_two_copies(evaluate, module)

    assert losses == [loss_of_module, loss_of_module]
    assert next_losses == losses


@pytest.mark.parametrize("module_class", EFFECTS)
def test_scores_change_neither_module_nor_program(module_class):
    module = module_class()
    evaluate = evaluator_of(module)
    evaluate.copies_module = False

    losses_of_two_copies(evaluate, module)
    evaluate.score_module(module)

    assert module_class.num_calls == 0
    assert getattr(module, "calls", 0) == 0
    assert torch.get_float32_matmul_precision() == "highest"


@pytest.mark.parametrize("module_class", EFFECTS)
def test_scores_of_no_models_are_empty(module_class):
    evaluate = evaluator_of(module_class())
    no_models = torch.zeros(0, evaluate.space.size)

    assert len(evaluate(no_models)) == 0


def scored_module(evaluate, module):
    """The module, or the copy of it, whose forward a score has called."""
    evaluate.score_module(module)
    return module.scored.modules[-1]


def test_module_that_scoring_does_not_change_is_scored_itself_if_allowed():
    module = RecordsScoredModules()
    module.layers[1].eval()
    evaluate = evaluator_of(module)

    assert scored_module(evaluate, module) is not module

    evaluate.copies_module = False
    assert scored_module(evaluate, module) is module
    assert [layer.training for layer in module.layers] == [True, False, True]


@pytest.mark.parametrize(
    "module_class", [CountsCallsInBuffer, CountsCallsInItsClass, SetsPrecision]
)
def test_module_that_scoring_changes_is_scored_in_a_copy(module_class):
    module = module_class()
    evaluate = evaluator_of(module)
    evaluate.copies_module = False

    assert scored_module(evaluate, module) is not module


def compile_module(module):
    module.compile(backend="eager")


def compile_layers(module):
    module.layers = torch.compile(module.layers, backend="eager")


def compile_function(module):
    module.f = torch.compile(torch.relu, backend="eager")


@pytest.mark.fast_rows
@pytest.mark.parametrize("compile_part", [compile_module, compile_layers, compile_function])
def test_compiled_module_is_scored_in_a_copy(compile_part):
    module = RecordsScoredModules()
    evaluate = evaluator_of(module)
    evaluate.copies_module = False

    compile_part(module)

    assert scored_module(evaluate, module) is not module


global_module: Any = None
global_layers: set[nn.Module] = set()


class ReadsGlobalVariables(RecordsScoredModules):
    def forward(self, x):
        (layer,) = global_layers
        assert layer is self.layers
        return super().forward(x) + global_module.layers[0].bias


def test_globals_that_refer_to_the_copy_while_it_is_scored_are_no_change(monkeypatch):
    module = ReadsGlobalVariables()
    monkeypatch.setitem(globals(), "global_module", module)
    monkeypatch.setitem(globals(), "global_layers", {module.layers})
    evaluate = evaluator_of(module)

    model = evaluate.space.read(module)
    loss_of_model, loss_of_zeros = evaluate(torch.stack([model, 0 * model])).value("loss")
    assert loss_of_model != loss_of_zeros

    assert evaluate.effects.are_none
    assert global_module is module
    assert global_layers == {module.layers}


def counted(monkeypatch, owner, name):
    """A list to which each call of a function adds its name."""
    function = inspect.getattr_static(owner, name)
    calls = []

    @wraps(function)
    def count(*args, **kwargs):
        calls.append(name)
        return function(*args, **kwargs)

    monkeypatch.setattr(owner, name, count)
    return calls


def fit_with_trained_coalitions(num_clients, folder):
    metric = ShadowShapley(performance="negative_loss")
    federated_loop = FederatedLoop(metrics={"value": metric}, seed=1)
    data = toy_data(proportions=(2,) * num_clients, server_val=0.2)
    fit(federated_loop, folder, module=Plain(network()), data=data, rounds=1)
    assert federated_loop.contributions["value"].isfinite().all()


@pytest.mark.slow
def test_number_of_coalitions_does_not_change_how_often_a_module_is_inspected(
    monkeypatch, tmp_path
):
    inspections = counted(monkeypatch, ModuleCopies, "content_of")
    copies = counted(monkeypatch, ModuleCopies, "__init__")
    identities = counted(monkeypatch, loop, "fit_identity")

    fit_with_trained_coalitions(2, tmp_path)
    num_copies = len(copies)
    num_inspections = len(inspections)
    fit_with_trained_coalitions(3, tmp_path)

    # The lists hold the calls of both fits.
    assert num_inspections == 2
    assert len(inspections) == 2 * num_inspections
    assert len(copies) == 2 * num_copies
    assert len(identities) == 2
