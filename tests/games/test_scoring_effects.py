"""What scoring changes: found once, by the first score, and told to coalitions."""

from collections import Counter
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
from helpers import record_calls
from helpers.data import toy_data
from helpers.fits import fit

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
    evaluate = evaluator_of(module_class())

    assert evaluate.effects == EFFECTS[module_class]


def losses_of_two_copies(evaluate, module):
    model = evaluate.space.read(module)
    return evaluate(torch.stack([model, model])).value("loss").tolist()


@pytest.mark.parametrize("module_class", EFFECTS)
def test_scores_of_a_module_do_not_depend_on_earlier_ones(module_class):
    module = module_class()
    evaluate = evaluator_of(module)

    losses = losses_of_two_copies(evaluate, module)
    loss_of_module = evaluate.score_module(module, in_copy=False).value("loss").item()
    next_losses = losses_of_two_copies(evaluate, module)

    assert losses == next_losses == [loss_of_module, loss_of_module]


@pytest.mark.by_turn
@pytest.mark.fast_rows
@pytest.mark.parametrize("module_class", EFFECTS)
def test_scores_change_neither_module_nor_program(module_class):
    module = module_class()
    evaluate = evaluator_of(module)

    losses_of_two_copies(evaluate, module)
    evaluate.score_module(module, in_copy=False)

    assert module_class.num_calls == 0
    assert getattr(module, "calls", 0) == 0
    assert torch.get_float32_matmul_precision() == "highest"


def test_scores_of_no_models_are_empty():
    evaluate = evaluator_of(RecordsScoredModules())
    no_models = torch.zeros(0, evaluate.space.size)

    assert len(evaluate(no_models)) == 0


class CountsCallsInItsClassLater(CountsCallsInItsClass):
    num_rounds = 0

    def forward(self, x):
        if self.num_rounds == 0:
            return self.layers(x)
        return super().forward(x) * self.num_calls


@pytest.mark.parametrize("scores_module", [False, True])
def test_scores_that_change_the_program_from_a_later_round_on_are_put_back(scores_module):
    module = CountsCallsInItsClassLater()
    evaluate = evaluator_of(module)
    assert evaluate.effects.are_none

    module.num_rounds = 1
    if scores_module:
        evaluate.score_module(module)
    else:
        loss, repeated_loss = losses_of_two_copies(evaluate, module)
        assert loss == repeated_loss

    assert module.num_calls == 0


def scored_module(evaluate, module, in_copy=False):
    """The module, or the copy of it, whose forward a score has called."""
    evaluate.score_module(module, in_copy)
    return module.scored.modules[-1]


def test_module_that_scoring_does_not_change_is_scored_itself_if_allowed():
    module = RecordsScoredModules()
    linear, norm, dropout = module.layers
    norm.eval()
    evaluate = evaluator_of(module)

    assert scored_module(evaluate, module, in_copy=True) is not module
    assert scored_module(evaluate, module) is module
    # Scored in evaluation mode, its layers are in their modes again.
    assert linear.training
    assert not norm.training
    assert dropout.training


@pytest.mark.by_turn
@pytest.mark.slow
@pytest.mark.parametrize(
    "module_class", [CountsCallsInBuffer, CountsCallsInItsClass, SetsPrecision]
)
def test_module_that_scoring_changes_is_scored_in_a_copy(module_class):
    module = module_class()
    evaluate = evaluator_of(module)

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
    model_of_zeros = torch.zeros_like(model)
    loss_of_model, loss_of_zeros = evaluate(torch.stack([model, model_of_zeros])).value("loss")
    assert loss_of_model != loss_of_zeros

    assert evaluate.effects.are_none
    assert global_module is module
    assert global_layers == {module.layers}


def count_calls_of_a_fit(num_clients, folder):
    """Return how often a fit that trains coalitions calls functions that look at the module, by their names."""
    with pytest.MonkeyPatch.context() as patch:
        inspections = record_calls(patch, ModuleCopies, "content_of")
        copies = record_calls(patch, ModuleCopies, "__init__")
        identities = record_calls(patch, loop, "fit_identity")

        metric = ShadowShapley(performance="negative_loss")
        federated_loop = FederatedLoop(metrics={"value": metric}, seed=1)
        data = toy_data(proportions=[2] * num_clients, server_val=0.2)
        fit(federated_loop, folder, data=data, rounds=1)

    assert federated_loop.contributions["value"].isfinite().all()
    return Counter([*inspections, *copies, *identities])


@pytest.mark.slow
def test_number_of_coalitions_does_not_change_how_often_a_module_is_inspected(tmp_path):
    calls = count_calls_of_a_fit(num_clients=2, folder=tmp_path)

    assert calls["content_of"] == 2
    assert calls["fit_identity"] == 1
    assert count_calls_of_a_fit(num_clients=3, folder=tmp_path) == calls
