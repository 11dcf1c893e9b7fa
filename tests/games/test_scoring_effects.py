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


class Scored(Dataset):
    """A data set, which copies share, of the modules that were scored."""

    def __init__(self):
        self.modules = []

    def __len__(self):
        return 0


class Net(nn.Module):
    num_calls: ClassVar[int] = 0

    def __init__(self):
        super().__init__()
        layers = (nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Dropout())
        self.layers = nn.Sequential(*layers)
        self.scored = Scored()

    def forward(self, x):
        self.scored.modules.append(self)
        return self.layers(x)


class CountsInModule(Net):
    def __init__(self):
        super().__init__()
        self.register_buffer("calls", torch.zeros(()), persistent=False)

    def forward(self, x):
        self.calls += 1
        return super().forward(x) * self.calls


class CountsInClass(Net):
    def forward(self, x):
        type(self).num_calls += 1
        return super().forward(x)


class SetsPrecision(Net):
    def forward(self, x):
        torch.set_float32_matmul_precision("medium")
        return super().forward(x)


#: Each module, and what scoring it changes: the program, the module.
EFFECTS = {
    Net: (False, False),
    CountsInModule: (False, True),
    CountsInClass: (True, False),
    SetsPrecision: (True, False),
}


def evaluator_of(module: nn.Module) -> ModelEvaluator:
    space = ParameterSpace(module)
    return ModelEvaluator(module, space, BATCHES, num_classes=3, backend="serial")


@pytest.mark.parametrize("module_class", EFFECTS)
def test_first_score_shows_what_scoring_changes(module_class):
    module = module_class()
    evaluate = evaluator_of(module)

    assert evaluate.effects == ScoringEffects(*EFFECTS[module_class])


@pytest.mark.parametrize("module_class", EFFECTS)
def test_scores_do_not_depend_on_earlier_ones_and_change_nothing(module_class):
    module = module_class()
    evaluate = evaluator_of(module)
    evaluate.copies_module = False
    vectors = evaluate.space.read(module)[None].repeat(2, 1)

    first_losses = evaluate(vectors).value("loss")
    own_losses = evaluate.score_module(module).value("loss")
    next_losses = evaluate(vectors).value("loss")

    assert len(evaluate(vectors[:0])) == 0
    assert first_losses.tolist() == own_losses.tolist() * 2
    assert torch.equal(first_losses, next_losses)
    assert module_class.num_calls == 0
    assert getattr(module, "calls", 0) == 0
    assert torch.get_float32_matmul_precision() == "highest"


@pytest.mark.parametrize("module_class", EFFECTS)
def test_module_that_scoring_leaves_alone_is_scored_in_itself(module_class):
    module = module_class()
    module.layers[1].eval()
    evaluate = evaluator_of(module)

    evaluate.score_module(module)
    assert module.scored.modules[-1] is not module

    evaluate.copies_module = False
    evaluate.score_module(module)
    is_scored_in_itself = module.scored.modules[-1] is module
    assert is_scored_in_itself == (module_class is Net)
    assert [layer.training for layer in module.layers] == [True, False, True]


@pytest.mark.fast_rows
@pytest.mark.parametrize("part", ["module", "layer", "function"])
def test_compiled_module_is_scored_in_a_copy(part):
    module = Net()
    evaluate = evaluator_of(module)
    evaluate.copies_module = False
    if part == "module":
        module.compile(backend="eager")
    elif part == "layer":
        module.layers = torch.compile(module.layers, backend="eager")
    else:
        module.f = torch.compile(torch.relu, backend="eager")

    evaluate.score_module(module)

    assert module.scored.modules[-1] is not module


global_module: Any = None
global_layers: set[nn.Module] = set()


class ReadsGlobal(Net):
    def forward(self, x):
        (layer,) = global_layers
        assert layer is self.layers
        return super().forward(x) + global_module.layers[0].bias


def test_globals_that_refer_to_the_copy_while_it_is_scored_are_no_change(monkeypatch):
    module = ReadsGlobal()
    monkeypatch.setitem(globals(), "global_module", module)
    monkeypatch.setitem(globals(), "global_layers", {module.layers})
    evaluate = evaluator_of(module)

    scores = evaluate(evaluate.space.read(module)[None])
    vector = torch.zeros(1, evaluate.space.size)
    assert evaluate(vector).value("loss") != scores.value("loss")

    assert evaluate.effects.are_none
    assert global_module is module
    assert global_layers == {module.layers}


def counted(monkeypatch, owner: Any, name: str) -> list[str]:
    """A list to which each call of a function adds its name."""
    function = inspect.getattr_static(owner, name)
    calls = []

    @wraps(function)
    def count(*args, **kwargs):
        calls.append(name)
        return function(*args, **kwargs)

    monkeypatch.setattr(owner, name, count)
    return calls


@pytest.mark.slow
def test_coalitions_inherit_what_the_run_has_found(monkeypatch, tmp_path):
    contents = counted(monkeypatch, ModuleCopies, "content_of")
    copies = counted(monkeypatch, ModuleCopies, "__init__")
    identities = counted(monkeypatch, loop, "fit_identity")
    num_copies = []
    for num_clients in (2, 3):
        copies.clear()
        metric = ShadowShapley(performance="negative_loss")
        federated_loop = FederatedLoop(metrics={"value": metric}, seed=1)
        data = toy_data(proportions=(2,) * num_clients, server_val=0.2)
        fit(federated_loop, tmp_path, module=Plain(network()), data=data, rounds=1)
        num_copies.append(len(copies))
        assert federated_loop.contributions["value"].isfinite().all()

    # In both runs alike, however many coalitions each has trained.
    assert len(identities) == 2
    assert len(contents) == 2 * 2
    assert num_copies[0] == num_copies[1]
